"""The example of a user's own environment runs as it stands."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict
from sandbox_cases import pool

from thundersync_jax.config import RunConfig, resolve
from thundersync_jax.config_sections import EnvSection
from thundersync_jax.envs.base import Action, Attempt
from thundersync_jax.errors import ConfigError
from thundersync_jax.rollout.renderer import WordRenderer
from thundersync_jax.runtime import (
    check_environment,
    check_prompt,
    load_renderer,
    load_split,
    load_suite,
)
from thundersync_jax.trajectory import Task, TrajectoryKey
from thundersync_jax.workdir import WorkDirectory

ROOT = Path(__file__).parents[1]


def test_the_example_plays_and_grades(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    example = importlib.import_module("configs.custom_env")
    config = resolve(example.get_config())
    module, _, function = config.env.factory.partition(":")
    suite = getattr(importlib.import_module(module), function)(**config.env.options)
    assert suite.vocabulary[:2] == ("<bos>", "<eos>")

    async def play(sandboxes, task, *texts):
        key = TrajectoryKey(step=0, group=0, index=0)
        environment = suite.make(Attempt(key=key, task=task, seed=0, sandboxes=sandboxes))
        await environment.reset()
        observations = [await environment.step(Action(text=text)) for text in texts]
        reward = await environment.grade()
        await environment.close()
        return [(o.text, o.is_done) for o in observations], reward

    async def body():
        async with pool("restricted", num_slots=1) as sandboxes:
            task = suite.tasks("train")[2]
            assert task.files == {"hidden": "cheese"}
            played = await play(sandboxes, task, "apple", "no", "cheese")
            assert played == ([("no", False), ("what?", False), ("no", True)], 1 / 3)
            assert await play(sandboxes, task, "bread; rm hidden") == ([("what?", False)], 0.0)
            assert sandboxes.owners == ()

    asyncio.run(body())


def test_tasks_and_prompts_that_are_none_are_refused(tmp_path):
    suite = types.SimpleNamespace(tasks=lambda split: [{"task_id": "t"}])
    with pytest.raises(ConfigError, match=r"tasks\('train'\) .* has {'task_id': 't'}: expected"):
        load_split(RunConfig(), suite, WorkDirectory(tmp_path), "train")
    renderer = types.SimpleNamespace(prompt_ids=lambda task: None + 1)
    with pytest.raises(ConfigError, match=r"the prompt of task 't': TypeError.* mend the suite"):
        check_prompt(Task(task_id="t", instruction=""), renderer, max_context=8)


def returns_none() -> None:
    return None


@pytest.mark.parametrize("name", ["test_envs_custom:returns_none", "test_envs_custom:Path"])
def test_a_factory_of_no_suite_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"factory = '{name}' returned .*expected a suite"):
        load_suite(EnvSection(factory=name))


def make_suite(**parts: object) -> types.SimpleNamespace:
    """A suite as far as `load_suite` looks, unless `parts` say otherwise."""
    return types.SimpleNamespace(**{"make": print, "solved_reward": 1.0, **parts})


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


FAULTS = (RuntimeError("no"), OSError(2, "no"), IndexError("no"), AssertionError(), SystemExit())


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_what_a_suite_raises_is_told_by_name_and_place(error: BaseException, tmp_path: Path):
    said = rf"raised {type(error).__name__}.*\({__file__}, line \d+\)\. .*[Mm]end the suite$"

    class Broken:
        make = tasks = prompt = raising(error)
        vocabulary = tools = property(raising(error))
        solved_reward = property(raising(error))

    suite = Broken()
    with pytest.raises(ConfigError, match=rf"tasks\('train'\) of .*{said}"):
        load_split(RunConfig(), suite, WorkDirectory(tmp_path), "train")
    with pytest.raises(ConfigError, match=rf"^vocabulary of .*{said}"):
        load_renderer(RunConfig(), suite)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ConfigError, match=rf"^make or solved_reward of .*{said}"),
    ):
        patch.setattr(sys.modules[__name__], "make_suite", Broken)
        load_suite(EnvSection(factory="test_envs_custom:make_suite"))
    renderer = WordRenderer(make_suite(vocabulary=["<bos>", "<eos>"], prompt=suite.prompt))
    with pytest.raises(ConfigError, match=rf"of task 't': prompt\(task\) of .*{said}"):
        check_prompt(Task(task_id="t", instruction=""), renderer, max_context=8)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (None, "returned None: expected a sequence"),
        (iter([Task(task_id="t", instruction="")]), "returned <list_iterator.*expected a sequence"),
        ([], "has no tasks"),
        ([Task(task_id=3, instruction="")], r"has Task\(task_id=3.*a str task_id\. Mend the suite"),
    ],
)
def test_tasks_of_another_kind_are_refused(tasks: object, said: str, tmp_path: Path):
    suite = make_suite(tasks=lambda split: tasks)
    with pytest.raises(ConfigError, match=said):
        load_split(RunConfig(), suite, WorkDirectory(tmp_path), "train")


@pytest.mark.parametrize("words", [None, ["<bos>", "<eos>", 3], iter(["<bos>", "<eos>"])])
def test_a_vocabulary_that_is_none_is_refused(words: object):
    with pytest.raises(ConfigError, match=r"^vocabulary .* is .*: expected a sequence of words"):
        load_renderer(RunConfig(), make_suite(vocabulary=words))


@pytest.mark.parametrize("solved", [float("nan"), None, "1"])
def test_a_solved_reward_that_no_reward_compares_with_is_refused(solved: object):
    env = EnvSection(
        factory="test_envs_custom:make_suite", options=ConfigDict({"solved_reward": solved})
    )
    with pytest.raises(ConfigError, match=rf"whose solved_reward is {solved!r}: expected a suite"):
        load_suite(env)


def with_environment(environment: object) -> list[str]:
    """What is announced of it."""
    said: list[str] = []
    suite = types.SimpleNamespace(make=lambda attempt: environment)
    task = Task(task_id="t", instruction="")
    asyncio.run(check_environment(RunConfig(), suite, task, None, said.append))
    return said


async def phase() -> None: ...


WHOLE = {"reset": phase, "step": phase, "grade": phase, "close": phase}


def test_an_environment_that_is_none_is_refused_at_the_start():
    with pytest.raises(
        ConfigError, match=r"'t', returned None, which has no reset, step, grade, c"
    ):
        with_environment(None)
    with pytest.raises(ConfigError, match="which has no grade: expected an environment"):
        with_environment(types.SimpleNamespace(**WHOLE | {"grade": None}))
    suite = types.SimpleNamespace(make=lambda attempt: attempt.sandbox)
    with pytest.raises(ConfigError, match=r"raised AttributeError: .*sandbox.*Mend the suite"):
        asyncio.run(
            check_environment(RunConfig(), suite, Task(task_id="t", instruction=""), None, print)
        )


def test_an_environment_that_is_one_is_closed_and_may_fail_to():
    assert with_environment(types.SimpleNamespace(**WHOLE)) == []
    (said,) = with_environment(types.SimpleNamespace(**WHOLE | {"close": lambda: None}))
    assert "that was not reset cannot be closed" in said
