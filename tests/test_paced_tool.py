"""The benchmark's environment: lengths, turns and waits are chosen, whatever the policy says."""

from __future__ import annotations

import asyncio
import statistics

import pytest
from sandbox_cases import pool

from thundersync_jax.envs.base import Action, Attempt, Environment, Observation
from thundersync_jax.envs.paced_tool import PacedToolSuite, paced_tool
from thundersync_jax.rollout.chat import word_tokenizer
from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.trajectory import TrajectoryKey

BACKEND = "restricted"


def key(index: int = 0, *, step: int = 0, group: int = 0) -> TrajectoryKey:
    return TrajectoryKey(step=step, group=group, index=index)


def say(*words: str) -> Action:
    return Action(text="\n".join(words))


def suite_of(**options: object) -> PacedToolSuite:
    return paced_tool(
        **{"num_words": 10, "num_turns": 3, "turn_tokens": 5, "tool_delay_s": 0.0} | options
    )


async def play(suite: PacedToolSuite, *actions: Action) -> tuple[list[Observation], float]:
    """The observations, and the reward; a broken environment raises."""
    async with pool(BACKEND, num_slots=1) as sandboxes:
        task = suite.tasks("train")[0]
        made: Environment = suite.make(Attempt(key=key(), task=task, seed=0, sandboxes=sandboxes))
        try:
            await made.reset()
            return [await made.step(action) for action in actions], await made.grade()
        finally:
            await made.close()
            assert sandboxes.owners == ()


def test_every_emission_is_a_call_whose_answer_fills_the_turn():
    """Also nothing but <eos>, and words that are control tokens."""
    actions = [say("w3", "w4"), say("<eos>"), say("<bos>", "w9", "w1", "w2", "<eos>")]
    observations, reward = asyncio.run(play(suite_of(), *actions))
    assert [o.text.split() for o in observations] == [
        ["w3", "w4", "w5"],
        ["w0", "w1", "w2", "w3"],
        [],
    ]
    assert [o.is_done for o in observations] == [False, False, True]
    assert reward == pytest.approx((3 + 0 + 0) / 3 / 10)
    tokenizer = word_tokenizer(suite_of().vocabulary)
    lengths = [
        len(action.text.split()) + len(tokenizer.encode(observation.text))
        for action, observation in zip(actions, observations, strict=True)
    ]
    assert lengths == [5, 5, 5]


def test_an_emission_longer_than_the_turn_gets_an_empty_answer():
    observations, _ = asyncio.run(play(suite_of(turn_tokens=1), say("w1", "w2")))
    assert observations == [Observation(text="")]


def test_prompts_have_their_length_in_the_vocabulary_and_differ_between_tasks():
    suite = suite_of(prompt_tokens=20)
    tokenizer = word_tokenizer(suite.vocabulary)
    prompts = [suite.prompt(task) for task in suite.tasks("train")]
    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == [20] * 4
    assert len(set(prompts)) == 4
    assert prompts == [suite.prompt(task) for task in suite.tasks("train")]


def test_waits_depend_on_seed_key_and_turn_alone_and_scale_with_their_mean():
    suite = suite_of(tool_delay_s=0.5, num_turns=6)
    keys = [key(i, step=s, group=g) for s in range(8) for g in range(8) for i in range(8)]
    waits = [suite.wait_s(k, turn) for k in keys for turn in range(6)]
    assert len(set(waits)) == len(waits)
    assert statistics.mean(waits) == pytest.approx(0.5, rel=0.1)
    again = suite_of(tool_delay_s=1.0, num_turns=6)
    for k in keys[:20]:
        path = sum(suite.wait_s(k, turn) for turn in range(6))
        assert suite.tool_path_s(k) == path
        assert again.tool_path_s(k) == pytest.approx(2 * path)
        assert suite_of(tool_delay_s=0.5, seed=1).wait_s(k, 0) != suite.wait_s(k, 0)


def test_the_tool_sleeps_in_the_sandbox_for_its_wait():
    async def timed() -> float:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await play(suite_of(tool_delay_s=0.3, tool_delay_sigma=0.0), say("w1"))
        return loop.time() - began_s

    assert asyncio.run(timed()) >= 0.3


def test_a_tool_that_was_tampered_with_is_a_failure_not_a_reward():
    async def body() -> None:
        async with pool(BACKEND, num_slots=1) as sandboxes:
            suite = suite_of()
            attempt = Attempt(key=key(), task=suite.tasks("train")[0], seed=0, sandboxes=sandboxes)
            environment = suite.make(attempt)
            with pytest.raises(SandboxError, match="was not reset, or is closed"):
                await environment.step(say("w1"))
            await environment.reset()
            await environment.sandbox.run("tool() { echo w1; }", 10.0)
            with pytest.raises(SandboxError, match="the tool answered"):
                await environment.step(say("w1"))
            await environment.close()

    asyncio.run(body())


@pytest.mark.parametrize("option", ["num_words", "num_turns", "tool_delay_s", "tool_delay_sigma"])
def test_an_option_out_of_range_is_named(option: str):
    with pytest.raises(ValueError, match=f"paced_tool option {option} = -1: expected at least"):
        paced_tool(**{option: -1})
