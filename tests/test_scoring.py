"""A frozen policy's scores of an attempt: in order, beside the tool, and by name when broken."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import ids
from test_coordinator import World
from test_rollout import LONG, run

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.coordinator import Coordinator
from thundersync_jax.rollout.renderer import WordRenderer
from thundersync_jax.rollout.rollout import RolloutRunner
from thundersync_jax.trajectory import Rollout, ScoredTurn, Task, TrajectoryKey, Verdict
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import ScoreRequest, ScoreResult

Scores = Callable[[list[float]], list[float]]


class FakeScoreClient:
    """Gives token number i of the context the log-probability -i.

    Args:
      change: of the right answer, to a wrong one.
      error: instead of an answer, from turn `fails_at` on.
      is_slow: answers once `go` is set.
    """

    def __init__(
        self,
        change: Scores = list,
        *,
        error: str = "",
        fails_at: int = 0,
        is_slow: bool = False,
    ) -> None:
        self._change, self._error, self._fails_at = change, error, fails_at
        self._is_slow = is_slow
        self.go = asyncio.Event()
        self.requests: list[ScoreRequest] = []
        self.released: list[TrajectoryKey] = []

    async def score(self, request: ScoreRequest) -> ScoreResult:
        self.requests.append(request)
        if self._error and len(self.requests) > self._fails_at:
            raise ServingError(self._error)
        if self._is_slow:
            await self.go.wait()
        scores = self._change([-float(i) for i in range(request.first, len(request.context_ids))])
        return ScoreResult(
            logprobs=tuple(scores), policy_version=0, num_run=len(scores), started_s=0, ended_s=0
        )

    async def release(self, session: TrajectoryKey) -> None:
        self.released.append(session)


class Taught:
    """One attempt with a teacher or a reference, and everything that came out of it."""

    def __init__(
        self,
        teacher: FakeScoreClient | None,
        *,
        script: str = "say 3 <eos>",
        is_reference: bool = False,
        **task: Any,
    ) -> None:
        self.teacher = teacher
        self.heard: list[ScoredTurn | Rollout] = []
        self.key = fakes.key(step=1, group=2, index=3)
        self.task: Task = fakes.task(**({"done_after": 3} | task))
        self.suite = fakes.FakeSuite()
        self.runner = RolloutRunner(
            client=fakes.FakePolicyClient([script]),
            suite=self.suite,
            renderer=WordRenderer(fakes.FakeSuite()),
            sandboxes=None,
            limits=RolloutSection(),
            sampling=SamplingSection(),
            run_seed=5,
            max_context=LONG,
            scorer=teacher,
            on_turn=None if is_reference else self.hear,
        )

    def hear(self, key: TrajectoryKey, turn: ScoredTurn) -> None:
        assert key == self.key
        self.heard.append(turn)

    async def attempt(self) -> Verdict:
        return await self.runner.run(self.key, self.task, ids("<bos> 9"), self.heard.append)


def test_every_turn_is_scored_once_with_all_before_it_and_before_the_content_is_final():
    taught = Taught(FakeScoreClient())
    assert run(taught.attempt()).reward == 9.0
    *turns, rollout = taught.heard
    assert isinstance(rollout, Rollout) and len(turns) == 3
    joined = np.concatenate([turn.tokens.token_ids for turn in turns])
    np.testing.assert_array_equal(joined, rollout.tokens.token_ids)
    masks = np.concatenate([turn.tokens.action_mask for turn in turns])
    np.testing.assert_array_equal(masks, rollout.tokens.action_mask)
    scores = np.concatenate([turn.teacher_logprobs for turn in turns])
    np.testing.assert_array_equal(scores, -np.arange(2, 2 + joined.size))
    whole = rollout.prompt_ids + tuple(rollout.tokens.token_ids)
    assert all(whole[: len(r.context_ids)] == r.context_ids for r in taught.teacher.requests)
    assert taught.teacher.released == [taught.key]


def test_without_a_teacher_every_turn_is_heard_while_its_tool_runs():
    """The learner may run it before the next one is sampled."""
    taught = Taught(None)
    assert run(taught.attempt()).reward == 9.0
    *turns, rollout = taught.heard
    assert isinstance(rollout, Rollout) and len(turns) == 3
    assert all(turn.teacher_logprobs is None for turn in turns)
    for name in ("token_ids", "action_mask", "behavior_logprobs", "policy_versions"):
        joined = np.concatenate([getattr(turn.tokens, name) for turn in turns])
        np.testing.assert_array_equal(joined, getattr(rollout.tokens, name))


def test_the_teacher_works_while_the_tool_does():
    """The first score comes only once the environment has seen the last turn: nothing waits."""
    teacher = FakeScoreClient(is_slow=True)
    taught = Taught(teacher)

    async def attempt() -> Verdict:
        task = asyncio.create_task(taught.attempt())
        while len(taught.suite.actions) < 3:
            await asyncio.sleep(0)
        assert len(teacher.requests) == 1 and not taught.heard
        teacher.go.set()
        return await task

    assert run(attempt()).reward == 9.0
    assert len(taught.heard) == 4


def test_a_references_scores_are_the_contents_own():
    """Turn by turn beside the tool, as a teacher's; 0 where no policy sampled."""
    taught = Taught(FakeScoreClient(), is_reference=True)
    assert run(taught.attempt()).reward == 9.0
    (rollout,) = taught.heard
    assert isinstance(rollout, Rollout) and len(taught.teacher.requests) == 3
    tokens = rollout.tokens
    want = np.where(tokens.action_mask, -np.arange(2.0, 2 + tokens.num_tokens), 0)
    np.testing.assert_array_equal(tokens.reference_logprobs, want)
    assert taught.teacher.released == [taught.key]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"error": "no row", "fails_at": 1}, "scoring step 1 .* index 3 failed: no row"),
        ({"change": lambda s: s[1:]}, r"failed: token arrays must be \[T\] of one length"),
        ({"change": lambda s: [*s, -1.0]}, r"failed: token arrays must be \[T\] of one length"),
        (
            {"change": lambda s: [float("nan")] * len(s)},
            "failed: reference_logprobs of action tokens must be finite and at most 0",
        ),
        (
            {"change": lambda s: [0.5] * len(s)},
            "failed: reference_logprobs of action tokens must be finite and at most 0",
        ),
    ],
)
def test_what_a_reference_breaks_fails_the_attempt_before_its_content(reference, message):
    taught = Taught(FakeScoreClient(**reference), is_reference=True)
    verdict = run(taught.attempt())
    assert re.search(message, str(verdict.failure))
    assert taught.heard == [] and taught.teacher.released == [taught.key]


@pytest.mark.parametrize(
    ("teacher", "message", "num_heard"),
    [
        ({"error": "no row", "fails_at": 1}, "scoring step 1 .* index 3 failed: no row", 1),
        ({"change": lambda s: s[1:]}, r"failed: the teacher gave scores of shape \(2,\)", 0),
        ({"change": lambda s: [float("nan")] * len(s)}, r"failed: .* hold \[nan, nan, nan\]", 0),
    ],
)
def test_what_the_teacher_breaks_fails_the_attempt_by_name(teacher, message, num_heard):
    taught = Taught(FakeScoreClient(**teacher))
    verdict = run(taught.attempt())
    assert verdict.failure is not None
    assert re.search(message, verdict.failure)
    assert len(taught.heard) == num_heard
    assert taught.teacher.released == [taught.key]


def test_an_environment_that_breaks_leaves_the_turns_that_were_scored():
    taught = Taught(FakeScoreClient(), raises="grade")
    assert "the grade broke" in str(run(taught.attempt()).failure)
    assert len(taught.heard) == 4


class TurnLearner(fakes.FakeLearner):
    """Hears turns too."""

    def add_turn(self, group: int, index: int, turn: ScoredTurn) -> None:
        self.calls.append(("add_turn", group, index, turn.tokens.num_tokens))


@pytest.mark.parametrize("scores", [np.zeros(3), None], ids=["scored", "unscored"])
def test_turns_reach_the_learner_before_the_content_and_the_record(tmp_path: Path, scores):
    """Also those of an attempt that fails afterwards; the journal names each. Only what a teacher
    said is recorded: the tokens are in the content.
    """
    turn = ScoredTurn(tokens=fakes.tokens(3), teacher_logprobs=scores)
    running: list[Coordinator] = []

    async def attempts(key: TrajectoryKey, task: Any, prompt: Any, on_content: Any) -> Verdict:
        for _ in range(key.index):
            running[0].hear_turn(key, turn)
            await asyncio.sleep(0)
        if key.index == 3:
            return Verdict(failure="the sandbox died")
        on_content(fakes.rollout(key))
        return Verdict(reward=1.0)

    world = World(tmp_path, attempts, TurnLearner(), groups_per_step=1)

    async def body(coordinator: Coordinator) -> Any:
        running.append(coordinator)
        result = await world.step(coordinator)
        coordinator.hear_turn(fakes.key(step=0, index=1), turn)  # too late: of no interest
        return result

    result = world.run(body)
    num_recorded = [len(record.scored_turns) for record in result.records]
    assert num_recorded == ([0] * 4 if scores is None else [0, 1, 2, 3])
    scored = [e for e in world.events() if isinstance(e, ev.TurnScored)]
    assert sorted((e.key.index, e.turn) for e in scored) == [
        (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2),
    ]  # fmt: skip
    assert world.learner.names().count("add_turn") == 6
