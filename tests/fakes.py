"""Fakes with outputs that can be computed by hand: policy client, environments, learner."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.rollout.chat import Tokenizer, word_tokenizer
from thundersync_jax.trajectory import (
    Rollout,
    Task,
    TrajectoryBuilder,
    TrajectoryKey,
    TrajectoryTokens,
    Verdict,
)
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import (
    FinishReason,
    SampleRequest,
    SampleResult,
    UpdateReport,
)

DIGITS = tuple(str(digit) for digit in range(10))
VOCABULARY = ("<bos>", "<eos>", "say", "heard", *DIGITS)


def tokenizer() -> Tokenizer:
    return word_tokenizer(VOCABULARY)


def ids(text: str) -> tuple[int, ...]:
    """Token ids of words separated by blanks: "say 3" is (2, 7)."""
    return tuple(VOCABULARY.index(word) for word in text.split())


def task(name: str = "task", **metadata: object) -> Task:
    return Task(task_id=name, instruction="say something", metadata=metadata)


def key(step: int = 0, group: int = 0, index: int = 0) -> TrajectoryKey:
    return TrajectoryKey(step=step, group=group, index=index)


def tokens(num_tokens: int = 3) -> TrajectoryTokens:
    builder = TrajectoryBuilder()
    builder.append_action([2] * num_tokens, [-0.5] * num_tokens, [0] * num_tokens)
    return builder.build()


def rollout(for_key: TrajectoryKey, num_tokens: int = 3) -> Rollout:
    return Rollout(
        key=for_key,
        task_id="task",
        prompt_ids=(0,),
        tokens=tokens(num_tokens),
        turns=(),
        stop_reason="done",
    )


class FakePolicyClient:
    """Says the words, or ids, of `script`, one entry a turn, again and again; cut to the request's
    budget.

    Token number i of a session has log-probability -(i + 1) / 100 and every token `policy_version`.

    Args:
      row: the longest context that a session can hold.
      hang: never answers.
    """

    def __init__(
        self,
        script: Sequence[str | tuple[int, ...]],
        *,
        policy_version: int = 0,
        row: int = 10_000,
        hang: bool = False,
        error: str = "",
    ) -> None:
        self._script = [ids(said) if isinstance(said, str) else said for said in script]
        self._policy_version = policy_version
        self._row = row
        self._hang = hang
        self._error = error
        self._num_turns: dict[TrajectoryKey, int] = {}
        self._num_tokens: dict[TrajectoryKey, int] = {}
        self.requests: list[SampleRequest] = []
        self.released: list[TrajectoryKey] = []

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.requests.append(request)
        if self._error:
            raise ServingError(self._error)
        if self._hang:
            await asyncio.Event().wait()
        session = request.session
        turn = self._num_turns.get(session, 0)
        self._num_turns[session] = turn + 1
        room = self._row - len(request.context_ids)
        wanted = self._script[turn % len(self._script)]
        said = wanted[: min(request.sampling.max_tokens, room)]
        first = self._num_tokens.get(session, 0)
        self._num_tokens[session] = first + len(said)
        if said and said[-1] in request.sampling.stop_ids:
            finish_reason = FinishReason.STOP
        elif len(said) == room:
            finish_reason = FinishReason.CONTEXT
        else:
            finish_reason = FinishReason.LENGTH
        now = time.monotonic()
        return SampleResult(
            token_ids=said,
            logprobs=tuple(-(first + i + 1) / 100 for i in range(len(said))),
            policy_versions=(self._policy_version,) * len(said),
            finish_reason=finish_reason,
            slot=0,
            started_s=now,
            ended_s=now,
        )

    async def release(self, session: TrajectoryKey) -> None:
        self.released.append(session)


class FakeEnvironment:
    """Answers "heard" and the action's first argument; its reward is the sum of the digits it
    heard.

    The task's metadata bend it: `done_after=n` ends the attempt with turn n; `reward=x` is returned
    as it is; `raises`, `hangs` and `stubborn` name a phase ("reset", "step", "grade", "close") that
    raises, waits for ever, or waits for ever and ignores its cancellation.
    """

    def __init__(self, attempt: Attempt, suite: FakeSuite) -> None:
        self._metadata = attempt.task.metadata
        self._key = attempt.key
        self._suite = suite
        self._heard: list[int] = []
        self._num_steps = 0

    async def reset(self) -> None:
        await self._misbehave("reset")

    async def step(self, action: Action) -> Observation:
        await self._misbehave("step")
        self._suite.actions.append(action)
        call = action.tool_call
        digits = [int(word) for word in call.arguments if word in DIGITS] if call else []
        self._heard += digits
        answer = "\n".join(("heard", *map(str, digits)))
        self._num_steps += 1
        is_done = self._num_steps >= self._metadata.get("done_after", 1000)
        return Observation(text=self._metadata.get("answer", answer), is_done=is_done)

    async def grade(self) -> float:
        await self._misbehave("grade")
        return self._metadata.get("reward", float(sum(self._heard)))

    async def close(self) -> None:
        self._suite.closed.append(self._key)
        await self._misbehave("close")

    async def _misbehave(self, phase: str) -> None:
        if self._metadata.get("raises") == phase:
            raise OSError(f"the {phase} broke")
        if self._metadata.get("exits") == phase:
            raise SystemExit(3)
        if self._metadata.get("closes") == phase:
            raise GeneratorExit
        if self._metadata.get("cancels_itself") == phase:
            raise asyncio.CancelledError
        if self._metadata.get("hangs") == phase:
            await asyncio.Event().wait()
        if self._metadata.get("stubborn") == phase:
            while not self._suite.is_over:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue


class FakeSuite:
    """Makes FakeEnvironments and keeps what they saw."""

    vocabulary = VOCABULARY
    solved_reward = 1.0

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.actions: list[Action] = []
        self.closed: list[TrajectoryKey] = []
        self.is_over = False

    def tasks(self, split: str) -> Sequence[Task]:
        return (task(f"{split} 0"), task(f"{split} 1"))

    def prompt(self, task: Task) -> str:
        return "<bos>"

    def make(self, attempt: Attempt) -> FakeEnvironment:
        if attempt.task.metadata.get("raises") == "make":
            raise OSError("the make broke")
        self.attempts.append(attempt)
        return FakeEnvironment(attempt, self)


class FakeLearner:
    """A strict learner: a call that the contract forbids raises AssertionError.

    Every trajectory is one program, ready when its content is there. Its score gradient is its
    number of action tokens, so the update is sum over groups and members of (reward - group mean) *
    tokens / all rewarded tokens.

    Args:
      program_s: how long one program blocks its thread.
      fail_in: the method that raises.
    """

    def __init__(
        self, *, program_s: float = 0.0, fail_in: str = "", policy_version: int = 0
    ) -> None:
        self._program_s = program_s
        self._fail_in = fail_in
        self._policy_version = policy_version
        self._groups: dict[int, _FakeGroup] = {}
        self._num_opened = 0
        self.calls: list[tuple[object, ...]] = []
        self.threads: set[int] = set()
        self.program_times_s: list[float] = []
        self.has_postponed = False

    def open_group(self, task_id: str, prompt_ids: Sequence[int], group_size: int) -> int:
        self._note("open_group", task_id, tuple(prompt_ids), group_size)
        self._num_opened += 1
        group_id = 100 + self._num_opened
        self._groups[group_id] = _FakeGroup(task_id, group_size)
        return group_id

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None:
        self._note("add_trajectory", group, index)
        assert 0 <= index < self._groups[group].size
        assert index not in self._groups[group].tokens
        assert index not in self._groups[group].verdicts
        self._groups[group].tokens[index] = tokens.num_action_tokens

    def set_reward(self, group: int, index: int, reward: float) -> None:
        self._note("set_reward", group, index, reward)
        assert index in self._groups[group].tokens, "a reward needs content"
        assert index not in self._groups[group].verdicts, "one verdict only"
        self._groups[group].verdicts[index] = reward

    def set_failed(self, group: int, index: int, reason: str) -> None:
        self._note("set_failed", group, index, reason)
        assert 0 <= index < self._groups[group].size
        assert index not in self._groups[group].verdicts, "one verdict only"
        self._groups[group].verdicts[index] = None

    def work(self, max_steps: int | None = None, *, max_call_s: float = math.inf) -> int:
        self._note("work")
        ready = [
            (group, index)
            for group in self._groups.values()
            for index in group.tokens
            if index not in group.done and group.verdicts.get(index, 0.0) is not None
        ][:max_steps]
        self.has_postponed = bool(ready) and self._program_s > max_call_s
        if self.has_postponed:
            return 0
        for group, index in ready:
            group.done.add(index)
            time.sleep(self._program_s)
            self.program_times_s.append(time.monotonic())
        return len(ready)

    def update(self) -> UpdateReport:
        self._note("update")
        groups = list(self._groups.values())
        self._groups = {}
        for group in groups:
            assert len(group.verdicts) == group.size, f"group {group.task_id} is open"
            assert group.done >= group.rewards().keys(), f"{group.task_id} has programs left"
        rewards = [r for group in groups for r in group.rewards().values()]
        num_tokens = sum(group.tokens[i] for group in groups for i in group.rewards())
        is_empty = all(len(set(group.rewards().values())) <= 1 for group in groups)
        self._policy_version += 0 if is_empty else 1
        return UpdateReport(
            policy_version=self._policy_version,
            is_empty=is_empty,
            reward_mean=sum(rewards) / len(rewards) if rewards else float("nan"),
            num_groups=len(groups),
            num_trajectories=sum(group.size for group in groups),
            num_failed=sum(group.size - len(group.rewards()) for group in groups),
            zero_variance_groups=sum(len(set(g.rewards().values())) <= 1 for g in groups),
            action_tokens=num_tokens,
            grad_norm=abs(sum(g.gradient() for g in groups)) / max(num_tokens, 1),
            logprob_gap_mean=0.0,
            logprob_gap_max=0.0,
            learning_rate=1e-3,
            paths={"direct": 0, "stream": len(rewards), "ahead": 0},
            num_held=0,
        )

    def names(self) -> list[object]:
        """The methods called so far, without `work`."""
        return [call[0] for call in self.calls if call[0] != "work"]

    def _note(self, *call: object) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(call)
        if call[0] == self._fail_in:
            raise RuntimeError(f"{self._fail_in} broke")


class _FakeGroup:
    def __init__(self, task_id: str, size: int) -> None:
        self.task_id = task_id
        self.size = size
        self.tokens: dict[int, int] = {}
        self.verdicts: dict[int, float | None] = {}
        self.done: set[int] = set()

    def rewards(self) -> dict[int, float]:
        return {i: reward for i, reward in self.verdicts.items() if reward is not None}

    def gradient(self) -> float:
        rewards = self.rewards()
        mean = sum(rewards.values()) / max(len(rewards), 1)
        return sum((rewards[i] - mean) * self.tokens[i] for i in sorted(rewards))


async def instant_attempt(
    key: TrajectoryKey,
    task: Task,
    prompt_ids: tuple[int, ...],
    on_content: Callable[[Rollout], None],
) -> Verdict:
    """Reward 1, 2, 3, ... by index, at once."""
    on_content(rollout(key))
    return Verdict(reward=float(key.index + 1))
