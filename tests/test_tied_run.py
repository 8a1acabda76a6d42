"""Dynamic sampling where every group ties: the run ends by its refill limit, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import fakes
import pytest
import small_run
from ml_collections import ConfigDict
from test_coordinator import World

from thundersync_jax.config import RunConfig
from thundersync_jax.coordinator.coordinator import Coordinator
from thundersync_jax.coordinator.step_run import StepResult
from thundersync_jax.learner.checkpoint import RunPosition
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.trainer import Trainer, warnings_of
from thundersync_jax.trajectory import Rollout, Task, TrajectoryKey, Verdict
from thundersync_jax.viewing.progress import Progress

TESTS = Path(__file__).parent


def get_config() -> ConfigDict:
    """DAPO on an environment without differences, for the main; a last step is far away."""
    config = small_run.get_config()
    config.run.num_steps = 50
    config.run.max_refilled_groups = 3
    config.model.preset = "micro"
    config.learner.objective = "dapo"
    config.env.factory = "tied_env:IndifferentSuite"
    config.env.options = ConfigDict()
    return config


async def graded_one(
    key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: Callable
) -> Verdict:
    on_content(fakes.rollout(key))
    return Verdict(reward=1.0)


async def half_broken(
    key: TrajectoryKey,
    task: Task,
    prompt_ids: tuple[int, ...],
    on_content: Callable[[Rollout], None],
) -> Verdict:
    if key.index % 2:
        return Verdict(failure="no sandbox")
    return await graded_one(key, task, prompt_ids, on_content)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[1.0, 1.0], [0.0, 0.0, None]], ["2 of 2 groups have equal rewards (mean 0.5)"]),
        ([[1.0, None], [None, None]], ["2 of 2 groups have fewer than two rewards"]),
        ([[1.0, 1.0], [0.0, None]], ["1 of 2 groups have equal", "1 of 2 groups have fewer"]),
    ],
)
def test_a_step_without_an_update_says_what_its_groups_lack(
    groups: list[list[float | None]], said: list[str]
):
    """None is the reward of an attempt that failed: one survivor ties with nobody."""
    records = [
        SimpleNamespace(
            key=TrajectoryKey(step=7, group=group, index=index),
            verdict=Verdict(failure="broke") if reward is None else Verdict(reward=reward),
        )
        for group, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]
    report = SimpleNamespace(is_empty=True, reward_mean=0.5, zero_variance_groups=len(groups))
    warnings = warnings_of(
        cast(StepResult, SimpleNamespace(step=7, records=records, report=report))
    )
    reasons = ("groups have equal", "groups have fewer")
    assert sum(reason in warnings[-1] for reason in reasons) == len(said)
    assert "step 7: no update, for" in warnings[-1] and all(part in warnings[-1] for part in said)


def stop_reason(path: Path, attempts: Callable, num_steps: int = 1) -> tuple[World, str | None]:
    """Two groups of four and three refills."""
    world = World(path, attempts, groups_per_step=2, max_refilled_groups=3, max_empty_steps=2)
    world.num_groups = 5

    async def body(coordinator: Coordinator) -> str | None:
        for step in range(num_steps):
            await world.step(coordinator, step)
        return coordinator.stop_reason

    return world, world.run(body)


def test_the_coordinator_stops_after_the_first_step_at_its_limit(tmp_path: Path):
    world, reason = stop_reason(tmp_path, graded_one)
    assert reason == (
        "step 0 had no gradient: the rewards of each of its 5 groups tie, and 3 of them took the "
        "place of others, the limit being run.max_refilled_groups = 3; 20 of 20 attempts have a "
        "reward, 1 in the mean. Take tasks that the policy solves sometimes, raise "
        "sampling.temperature or run.group_size, or raise the limit"
    )
    assert len(world.committed[0]) == 20 and world.published == []


def test_failed_attempts_are_counted_apart(tmp_path: Path):
    _, reason = stop_reason(tmp_path, half_broken)
    assert reason is not None and "10 of 20 attempts have a reward, 1 in the mean" in reason


def test_a_group_that_differs_goes_on(tmp_path: Path):
    """The last refill's rewards differ: the step has a gradient."""

    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: Callable
    ) -> Verdict:
        run = graded_one if key.group < 4 else fakes.instant_attempt
        return await run(key, task, prompt_ids, on_content)

    world, reason = stop_reason(tmp_path, attempt, num_steps=3)
    assert reason is None and world.published == [1, 2, 3]


class Finished(Trainer):
    """A run whose last step was just made, and what it then says."""

    def __init__(self, stop_reason: str | None, is_interrupted: bool) -> None:
        self._progress = cast(Progress, SimpleNamespace(status=self._note))
        self._config = RunConfig()
        self._position = RunPosition(num_steps=self._config.run.num_steps)
        self._made = cast(Coordinator, SimpleNamespace(stop_reason=stop_reason))
        self.is_interrupted = is_interrupted

    def _note(self, text: str) -> None:
        self.last_status = text

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Coordinator]:
        yield self._made

    async def _save(self) -> None: ...


@pytest.mark.parametrize(
    ("reason", "is_interrupted", "told"),
    [("no gradient", False, "no gradient"), (None, False, None), ("interrupted", True, None)],
)
def test_a_reason_to_stop_in_the_last_step_is_told(
    reason: str | None, is_interrupted: bool, told: str | None
):
    """As in any other step; an interrupted run has then made all its steps."""
    trainer = Finished(reason, is_interrupted)
    assert asyncio.run(trainer.run()) == told
    assert trainer.last_status == ("done" if told is None else "stopped")


def test_a_dapo_run_whose_groups_all_tie_ends_by_its_limit(tmp_path: Path):
    command = [
        sys.executable, "-m", "thundersync_jax.train", f"--config={__file__}",
        f"--workdir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=TESTS)
    assert done.returncode == 1, done.stderr
    expected = "stopped: step 0 had no gradient: the rewards of each of its 5 groups tie, and 3"
    assert expected in done.stderr
    assert "the limit being run.max_refilled_groups = 3; 20 of 20 attempts" in done.stderr
    (line,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert line["zero_variance_groups"] == line["num_groups"] == 5
    assert line["policy_version"] == 0
