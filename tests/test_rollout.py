"""The turn loop and one attempt, with a policy and an environment that can be computed by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Coroutine
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import ids

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.envs.base import Observation
from thundersync_jax.rollout.agent import derive_seed
from thundersync_jax.rollout.phases import AttemptError, contained, run_phase, to_completion
from thundersync_jax.rollout.renderer import WordRenderer, truncate_middle
from thundersync_jax.rollout.rollout import RolloutRunner
from thundersync_jax.trajectory import (
    OBSERVATION_VERSION,
    Rollout,
    Task,
    TrajectoryKey,
    Verdict,
)
from thundersync_jax.transport.messages import SampleRequest, SampleResult

LONG = 10_000


class Trial:
    """One attempt by a runner over fakes, and everything that came out of it."""

    def __init__(
        self,
        script: list[str],
        *,
        prompt: str = "<bos>",
        max_context: int = LONG,
        key: TrajectoryKey | None = None,
        task: Task | None = None,
        client: fakes.FakePolicyClient | None = None,
        **limits: object,
    ) -> None:
        self.client = client or fakes.FakePolicyClient(script)
        self.suite = fakes.FakeSuite()
        self.contents: list[Rollout] = []
        self.key = key or fakes.key(step=1, group=2, index=3)
        self.task = task or fakes.task(done_after=2)
        self.prompt_ids = ids(prompt)
        self.ticks = iter(range(LONG))
        self.runner = RolloutRunner(
            client=self.client,
            suite=self.suite,
            renderer=WordRenderer(fakes.FakeSuite()),
            sandboxes=None,
            limits=RolloutSection(**limits),
            sampling=SamplingSection(),
            run_seed=5,
            max_context=max_context,
            clock=lambda: float(next(self.ticks)),
        )

    async def attempt(self) -> Verdict:
        return await self.runner.run(self.key, self.task, self.prompt_ids, self.contents.append)

    def run(self) -> Verdict:
        self.verdict = run(self.attempt())
        return self.verdict

    @property
    def rollout(self) -> Rollout:
        (rollout,) = self.contents
        return rollout


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs `work` and asserts that it leaves no task behind."""

    async def main() -> Any:
        result = await asyncio.wait_for(work, 10)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(main())


def test_ids_mask_logprobs_and_versions_are_those_of_the_turns() -> None:
    trial = Trial(["say 3 <eos>", "say 4 5 <eos>"], client=None, task=fakes.task(done_after=2))
    assert trial.run() == Verdict(reward=12.0)
    tokens = trial.rollout.tokens
    assert tuple(tokens.token_ids) == ids("say 3 <eos> heard 3 say 4 5 <eos>")
    assert tokens.action_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    expected = np.float32([-0.01, -0.02, -0.03, 0, 0, -0.04, -0.05, -0.06, -0.07])
    np.testing.assert_array_equal(tokens.behavior_logprobs, expected)
    versions = [0] * 3 + [OBSERVATION_VERSION] * 2 + [0] * 4
    assert tokens.policy_versions.tolist() == versions
    assert trial.rollout.stop_reason == "done"
    assert trial.rollout.prompt_ids == (0,)
    assert trial.rollout.key == trial.key


def test_turns_carry_texts_and_times() -> None:
    trial = Trial(["say 3 <eos>"], task=fakes.task(done_after=1))
    trial.run()
    (turn,) = trial.rollout.turns
    assert turn.action_text == "say\n3\n<eos>\n"
    assert turn.observation_text == "heard\n3"
    assert turn.num_action_tokens == 3
    assert (turn.started_s, turn.sampled_s, turn.ended_s) == (0.0, 1.0, 2.0)


def test_every_context_is_the_prompt_and_the_trajectory_so_far() -> None:
    """Sampled ids are sent back as they came: decoding and encoding are never between them."""
    trial = Trial(["say 1 <eos>"], prompt="<bos> 9", task=fakes.task(done_after=3))
    trial.run()
    whole = trial.rollout.prompt_ids + tuple(trial.rollout.tokens.token_ids)
    contexts = [request.context_ids for request in trial.client.requests]
    assert [len(context) for context in contexts] == [2, 7, 12]
    assert all(whole[: len(context)] == context for context in contexts)


def test_the_environment_gets_text_and_parsed_call() -> None:
    trial = Trial(["say 1 <eos>"], task=fakes.task(done_after=1))
    trial.run()
    (action,) = trial.suite.actions
    assert action.text == "say\n1\n<eos>"
    assert (action.tool_call.name, action.tool_call.arguments) == ("say", ("1",))


@pytest.mark.parametrize(
    ("script", "limits", "stop_reason", "expected"),
    [
        (["say 1"], {"max_turns": 2}, "max_turns", "say 1 heard 1 say 1"),
        (["say 1"], {"max_tokens": 6}, "max_tokens", "say 1 heard 1 say 1"),
        (["say 1"], {"max_tokens": 5}, "max_tokens", "say 1 heard 1 say"),
        (["say 1"], {"max_tokens": 4}, "max_tokens", "say 1"),
        (["say 1"], {"max_tokens": 1}, "max_tokens", "say"),
        (["say 1 2"], {"max_turn_tokens": 2, "max_turns": 1}, "max_turns", "say 1"),
        (["say 1", "<eos>"], {"max_turns": 2}, "max_turns", "say 1 heard 1 <eos>"),
        (["<eos>"], {"max_turns": 2}, "max_turns", "<eos> heard <eos>"),
    ],
)
def test_every_budget_has_its_stop_reason_and_no_trailing_observation(
    script: list[str], limits: dict[str, int], stop_reason: str, expected: str
) -> None:
    trial = Trial(script, task=fakes.task(), **limits)
    trial.run()
    assert trial.rollout.stop_reason == stop_reason
    assert tuple(trial.rollout.tokens.token_ids) == ids(expected)
    assert trial.rollout.tokens.action_mask[-1]


@pytest.mark.parametrize(
    ("max_context", "expected"),
    [
        (7, "say 1 heard 1 say 1"),  # the second turn fills the context exactly
        (6, "say 1 heard 1 say"),  # after the observation there is room for one token
        (5, "say 1"),  # the observation fills the context: no turn could read it
        (4, "say 1"),  # the observation does not fit
        (2, "say"),  # a prompt one short of the limit: one token
    ],
)
def test_the_context_limit_is_reached_exactly(max_context: int, expected: str) -> None:
    trial = Trial(["say 1"], task=fakes.task(), max_context=max_context)
    trial.run()
    assert trial.rollout.stop_reason == "context"
    assert tuple(trial.rollout.tokens.token_ids) == ids(expected)
    longest = max(len(r.context_ids) + r.sampling.max_tokens for r in trial.client.requests)
    assert longest <= max_context


@pytest.mark.parametrize("max_context", [3, 2])
def test_a_prompt_at_or_above_the_limit_fails_by_name(max_context: int) -> None:
    trial = Trial(["say 1"], prompt="<bos> 1 2", max_context=max_context)
    assert trial.run() == Verdict(
        failure="no token could be sampled for step 1 group 2 index 3: its prompt has 3 tokens and "
        f"model.max_context is {max_context}; shorten the prompt or raise the limit"
    )
    assert not trial.contents and not trial.client.requests


def test_a_full_row_of_the_engine_stops_the_trajectory() -> None:
    trial = Trial([], client=fakes.FakePolicyClient(["say 1"], row=6), task=fakes.task())
    trial.run()
    assert trial.rollout.stop_reason == "context"
    assert tuple(trial.rollout.tokens.token_ids) == ids("say 1 heard 1 say")


def test_a_long_observation_keeps_head_and_tail() -> None:
    task = fakes.task(answer="\n".join("0123456789"), done_after=2)
    trial = Trial(["say"], task=task, max_observation_tokens=5)
    trial.run()
    assert tuple(trial.rollout.tokens.token_ids) == ids("say 0 1 2 8 9 say")
    assert trial.rollout.turns[0].observation_text == "\n".join("0123456789")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_truncation_keeps_what_fits(max_tokens: int) -> None:
    kept = {1: (0,), 2: (0, 2), 3: (0, 1, 2), 4: (0, 1, 2)}
    assert truncate_middle((0, 1, 2), max_tokens) == kept[max_tokens]


def test_seeds_name_run_step_group_index_and_turn() -> None:
    def seeds(key: TrajectoryKey) -> list[int]:
        trial = Trial(["say 1"], key=key, task=fakes.task(), max_turns=3)
        trial.run()
        (attempt,) = trial.suite.attempts
        return [attempt.seed, *(r.sampling.seed for r in trial.client.requests)]

    keys = [fakes.key(s, g, i) for s in range(2) for g in range(2) for i in range(2)]
    assert seeds(keys[0]) == seeds(keys[0]) == [derive_seed(5, 0, 0, 0, *t) for t in [(), *TURNS]]
    everything = [seed for key in keys for seed in seeds(key)]
    assert len(set(everything)) == len(everything) == 32
    assert all(0 <= seed < 2**31 for seed in everything)


TURNS = [(0,), (1,), (2,)]


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, 1, 2, 3) == 1459500379


PHASES = ("reset", "step", "grade")


@pytest.mark.parametrize("phase", ["make", *PHASES])
def test_a_phase_that_raises_fails_the_attempt_by_name(phase: str) -> None:
    trial = Trial(["say 1"], task=fakes.task(done_after=1, raises=phase))
    label = "step 0" if phase == "step" else phase
    expected = f"{label} of step 1 group 2 index 3 raised OSError: the {phase} broke"
    assert trial.run() == Verdict(failure=expected)
    assert trial.suite.closed == ([] if phase == "make" else [trial.key])
    assert len(trial.contents) == (phase == "grade")


def test_an_exception_that_cannot_be_shown_fails_the_attempt_by_its_type() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise KeyError

    phase, expected = "step 0", "raised Mute, whose message raised KeyError"
    with (
        pytest.raises(AttemptError, match=expected),
        contained(phase, TrajectoryKey(step=1, group=2, index=3)),
    ):
        raise Mute


@pytest.mark.parametrize("text", [b"x", None, 3])
def test_an_observation_is_text(text: object) -> None:
    with pytest.raises(TypeError, match="text of an Observation must be a str"):
        Observation(text=text, is_done=True)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["hangs", "stubborn"])
def test_a_phase_that_hangs_fails_with_its_deadline(
    phase: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thundersync_jax.rollout.phases.CANCEL_GRACE_S", 0.05)
    timeouts = {"reset_timeout_s": 0.11, "tool_timeout_s": 0.12, "grade_timeout_s": 0.13}
    trial = Trial(["say 1"], task=fakes.task(done_after=1, **{how: phase}), **timeouts)

    async def body() -> None:
        verdict = await trial.attempt()
        label, took = {
            "reset": ("reset", 0.11),
            "step": ("step 0", 0.12),
            "grade": ("grade", 0.13),
        }[phase]
        expected = f"{label} of step 1 group 2 index 3 took more than {took} s"
        assert verdict == Verdict(failure=expected)
        assert trial.suite.closed == [trial.key]
        trial.suite.is_over = True
        await asyncio.sleep(0.05)

    run(body())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "raised SystemExit: 3"),
        ("closes", "raised GeneratorExit"),
        ("cancels_itself", "cancelled itself"),
    ],
)
def test_a_phase_can_neither_end_the_process_nor_vanish(phase: str, how: str, said: str) -> None:
    trial = Trial(["say 1"], task=fakes.task(done_after=1, **{how: phase}))
    assert said in trial.run().failure
    assert trial.suite.closed == [trial.key]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), "1", None, True])
def test_a_reward_that_is_no_finite_number_is_a_failure_that_names_it(reward: object) -> None:
    trial = Trial(["say 1"], task=fakes.task(done_after=1, reward=reward))
    failure = trial.run().failure
    assert failure.startswith("grade of step 1 group 2 index 3 raised TrajectoryError: a reward")
    assert repr(reward) in failure


@pytest.mark.parametrize("reward", [np.float32(0.5), np.int64(2), 3])
def test_numbers_of_numpy_are_rewards(reward: object) -> None:
    verdict = Trial(["say 1"], task=fakes.task(done_after=1, reward=reward)).run()
    assert type(verdict.reward) is float and verdict.reward == reward


def test_an_observation_outside_the_vocabulary_fails_the_attempt() -> None:
    verdict = Trial(["say 1"], task=fakes.task(answer="heard\nnonsense")).run()
    assert "TokenizerError: 'nonsense' is not one of the 14 words" in verdict.failure


def test_an_error_of_the_serving_side_fails_the_attempt() -> None:
    trial = Trial([], client=fakes.FakePolicyClient(["say"], error="the row is gone"))
    expected = "sampling step 1 group 2 index 3 failed: the row is gone"
    assert trial.run() == Verdict(failure=expected)
    assert trial.client.released == trial.suite.closed == [trial.key]


@pytest.mark.parametrize(
    ("token_ids", "logprob", "message"),
    [
        ((99,), -0.5, r"decode of step 1 group 2 index 3 raised TokenizerError: token ids \[99\]"),
        ((2,), float("nan"), "build of step 1 group 2 index 3 raised TrajectoryError: behavior"),
    ],
)
def test_what_no_policy_can_say_fails_the_attempt(
    token_ids: tuple[int, ...], logprob: float, message: str
) -> None:
    class Broken(fakes.FakePolicyClient):
        async def sample(self, request: SampleRequest) -> SampleResult:
            result = await super().sample(request)
            return dataclasses.replace(result, token_ids=token_ids, logprobs=(logprob,))

    trial = Trial([], client=Broken(["say"]), task=fakes.task(done_after=1))
    assert re.match(message, trial.run().failure)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_verdict_stands_when_closing_fails(how: str, caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial(["say 1"], task=fakes.task(done_after=1, **{how: "close"}), reset_timeout_s=0.1)
    with caplog.at_level(logging.ERROR):
        assert trial.run() == Verdict(reward=1.0)
    assert "close of step 1 group 2 index 3" in caplog.text


def test_the_row_is_released_before_the_verifier_runs() -> None:
    released = []
    trial = Trial(["say 1"], task=fakes.task(done_after=1))

    async def body() -> None:
        await trial.runner.run(
            trial.key, trial.task, (0,), lambda _: released.extend(trial.client.released)
        )

    run(body())
    assert released == [trial.key]


@pytest.mark.parametrize("where", ["reset", "sample", "step", "grade", "close"])
def test_cancelled_at_any_wait_the_attempt_still_frees_everything(where: str) -> None:
    trial = Trial(
        [],
        client=fakes.FakePolicyClient(["say 1"], hang=where == "sample"),
        task=fakes.task(done_after=1, hangs=where),
        reset_timeout_s=0.3,
    )

    async def body() -> None:
        attempt = asyncio.create_task(trial.attempt())
        await asyncio.sleep(0.05)
        attempt.cancel()
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert trial.suite.closed == [trial.key]
        assert trial.client.released == ([] if where == "reset" else [trial.key])

    run(body())


def test_others_are_not_charged_for_code_that_blocks_the_loop() -> None:
    async def main() -> None:
        key = TrajectoryKey(step=0, group=0, index=0)
        other = asyncio.create_task(run_phase("step 0", key, 0.1, lambda: asyncio.sleep(0.05, 7)))
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # blocks the event loop, as code without await does
        assert await other == 7

    run(main())


def test_to_completion_raises_what_the_work_raised() -> None:
    async def broken() -> None:
        raise OSError("broke")

    with pytest.raises(OSError, match="broke"):
        run(to_completion(broken()))


def test_a_phase_returns_what_its_work_returns() -> None:
    async def work() -> int:
        return 7

    assert run(run_phase("step", fakes.key(), 1.0, work)) == 7
