"""The file_probe environment: a real tool, a reward recomputed from its log, delays from seeds."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_cases import begins, fresh_mark, is_running, pool

from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.envs.file_probe import FileProbe, FileProbeSuite, file_probe, probe_task
from thundersync_jax.envs.options import Delay
from thundersync_jax.sandbox.base import SandboxError, SandboxPool
from thundersync_jax.trajectory import ToolCall, TrajectoryKey

# The restricted backend runs on every host; the backends' own tests cover both.
BACKEND = "restricted"


def attempt(sandboxes: SandboxPool, secret: int, seed: int = 0) -> Attempt:
    key = TrajectoryKey(step=0, group=0, index=seed)
    task = probe_task("task", secret, 8)
    return Attempt(key=key, task=task, seed=seed, sandboxes=sandboxes)


def probe(*arguments: str, name: str = "probe") -> Action:
    call = ToolCall(name=name, arguments=arguments)
    return Action(text=" ".join((name, *arguments)), tool_calls=(call,))


@contextlib.asynccontextmanager
async def started(
    sandboxes: SandboxPool, secret: int, suite: FileProbeSuite | None = None
) -> AsyncIterator[FileProbe]:
    environment = (suite or file_probe()).make(attempt(sandboxes, secret))
    try:
        await environment.reset()
        yield environment
    finally:
        await environment.close()


def test_every_probe_of_every_secret_gets_its_answer_and_its_reward():
    async def body():
        async with pool(BACKEND, num_slots=1) as sandboxes:
            for secret in range(8):
                async with started(sandboxes, secret) as environment:
                    wrong = [value for value in range(8) if value != secret]
                    for value in wrong:
                        observation = await environment.step(probe(str(value)))
                        word = "higher" if value < secret else "lower"
                        assert observation == Observation(text=word)
                    assert await environment.grade() == 0.0
                    observation = await environment.step(probe(str(secret)))
                    assert observation.is_done
                    assert await environment.grade() == 1.0 - 0.5 * len(wrong) / 10

    asyncio.run(body())


NOT_CALLS = [
    Action(text="higher"),
    Action(text="<eos>"),
    probe(),
    probe("1", "2"),
    probe("8"),
    probe("-1"),
    probe("1.0"),
    probe("\u0661"),  # a digit of another script
    probe("$(touch escaped)"),
    probe("3; rm secret"),
    probe("3", name="rm"),
]


def test_anything_but_a_valid_call_costs_a_turn_and_reaches_no_shell():
    async def body():
        async with pool(BACKEND, num_slots=1) as sandboxes, started(sandboxes, 3) as environment:
            for action in NOT_CALLS[:4]:
                assert await environment.step(action) == Observation(text="error")
            assert await environment.grade() == 0.0
            assert (await environment.step(probe("3"))).is_done
            assert await environment.grade() == 1.0 - 0.5 * 4 / 10
            for action in NOT_CALLS:
                assert await environment.step(action) == Observation(text="error")
            files = (await environment.sandbox.run("ls", 5.0)).output.split()
            assert files == ["probes", "secret"]

    asyncio.run(body())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 7), st.lists(st.integers(-1, 8), max_size=10), st.integers(1, 20))
def test_the_reward_is_that_of_the_first_turn_that_found_the_secret(secret, guesses, max_turns):
    async def body():
        suite = file_probe(max_turns=max_turns)
        async with (
            pool(BACKEND, num_slots=1) as sandboxes,
            started(sandboxes, secret, suite) as environment,
        ):
            for guess in guesses:
                await environment.step(probe(str(guess)))
            found = secret in guesses
            expected = 1.0 - 0.5 * guesses.index(secret) / max_turns if found else 0.0
            assert await environment.grade() == pytest.approx(expected, abs=1e-12)

    asyncio.run(body())


def test_a_log_that_does_not_match_the_calls_is_a_failure_not_a_reward():
    async def body():
        async with pool(BACKEND, num_slots=1) as sandboxes, started(sandboxes, 3) as environment:
            await environment.step(probe("1"))
            await environment.sandbox.run("echo 3 >> probes", 5.0)
            with pytest.raises(SandboxError, match="holds 2 probes, expected 1"):
                await environment.grade()

    asyncio.run(body())


def test_attempts_share_nothing_and_close_leaves_nothing_alive():
    async def body():
        async with pool(BACKEND, num_slots=1) as sandboxes:
            mark = fresh_mark()
            async with started(sandboxes, 3) as environment:
                await environment.step(probe("3"))
                await environment.sandbox.run(f"setsid sleep {mark} &", 5.0)
                assert await begins(mark)
            assert not is_running(mark)
            await environment.close()
            async with started(sandboxes, 5) as environment:
                assert await environment.grade() == 0.0
                assert await environment.step(probe("3")) == Observation(text="higher")

    asyncio.run(body())


def test_close_after_a_failed_or_cancelled_reset_gives_the_sandbox_back():
    async def body():
        async with pool(BACKEND, num_slots=1, acquire_timeout_s=0.1) as sandboxes:
            first = file_probe().make(attempt(sandboxes, 3))
            await first.reset()
            second = file_probe().make(attempt(sandboxes, 3, seed=1))
            with pytest.raises(SandboxError, match="index 1 waited"):
                await second.reset()
            await second.close()
            await first.close()
            third = file_probe().make(attempt(sandboxes, 3, seed=2))
            resetting = asyncio.create_task(third.reset())
            await asyncio.sleep(0)
            resetting.cancel()
            await asyncio.gather(resetting, return_exceptions=True)
            await third.close()
            assert sandboxes.owners == ()

    asyncio.run(body())


def test_a_grader_over_its_deadline_is_stopped_and_close_still_frees_everything():
    async def body():
        suite = file_probe(grade_delay_s=60.0, grade_delay_sigma=0.0)
        async with pool(BACKEND, num_slots=1) as sandboxes:
            async with started(sandboxes, 3, suite) as environment:
                await environment.step(probe("3"))
                began_s = time.monotonic()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await environment.grade()
                assert time.monotonic() - began_s < 5
            assert sandboxes.owners == ()

    asyncio.run(body())


def test_delays_have_the_given_mean_a_heavy_tail_and_depend_on_seed_and_turn_only():
    delay = Delay(mean_s=2.0, sigma=1.0)
    draws = [delay.seconds(seed, turn) for seed in range(2000) for turn in range(10)]
    assert statistics.fmean(draws) == pytest.approx(2.0, rel=0.05)
    assert statistics.median(draws) == pytest.approx(2.0 * 2.718281828**-0.5, rel=0.05)
    assert max(draws) > 30
    assert delay.seconds(5, 3) == delay.seconds(5, 3) != delay.seconds(3, 5)
    assert Delay(mean_s=2.0, sigma=0.0).seconds(1, 1) == pytest.approx(2.0)
    assert Delay(mean_s=0.0, sigma=1.0).seconds(1, 1) == 0.0


def test_tool_delay_delays_the_answer():
    async def body():
        suite = file_probe(tool_delay_s=0.2, tool_delay_sigma=0.0)
        async with (
            pool(BACKEND, num_slots=1) as sandboxes,
            started(sandboxes, 3, suite) as environment,
        ):
            began_s = time.monotonic()
            await environment.step(probe("1"))
            assert 0.2 <= time.monotonic() - began_s < 5

    asyncio.run(body())


def test_the_suite_states_its_vocabulary_and_its_balanced_tasks():
    suite = file_probe(num_values=3, num_train_tasks=9, num_test_tasks=3)
    assert suite.vocabulary == (
        *("<bos>", "<eos>", "probe 0", "probe 1", "probe 2"),
        *("higher", "lower", "error"),
    )
    train, test = suite.tasks("train"), suite.tasks("test")
    assert sorted(task.metadata["secret"] for task in train) == [0] * 3 + [1] * 3 + [2] * 3
    assert {task.task_id for task in train}.isdisjoint(task.task_id for task in test)
    assert suite.prompt(train[0]) == "<bos>" and train[1].files == {"secret": "1\n"}
    assert suite.solved_reward == 0.5
    with pytest.raises(ValueError, match="no split 'dev'"):
        suite.tasks("dev")


@pytest.mark.parametrize(
    "options", [{"num_values": 1}, {"max_turns": 0}, {"tool_delay_s": -1.0}, {"num_test_tasks": 0}]
)
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        file_probe(**options)
