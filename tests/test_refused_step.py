"""A committed step that the learner refuses: what a user is told, and that doing it helps."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import fakes
import pytest
import small_run
from ml_collections import ConfigDict
from tied_env import Indifferent, IndifferentSuite

from thundersync_jax.config import RunConfig
from thundersync_jax.envs.base import Attempt
from thundersync_jax.learner.statistics import LogprobGapError, NonFiniteGradientError
from thundersync_jax.losses.objective import ObjectiveError
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.trainer import RefusedStepError, Trainer
from thundersync_jax.trajectory import MAX_REWARD, TrajectoryKey, TrajectoryRecord, Verdict
from thundersync_jax.trajectory_log import step_path, write_step
from thundersync_jax.transport.messages import UpdateReport
from thundersync_jax.viewing.progress import Progress
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent


class Graded(Indifferent):
    """The reward of an attempt is its index, in units that a file holds."""

    def __init__(self, index: int, unit: Path) -> None:
        self._index = index
        self._unit = unit

    async def grade(self) -> float:
        return self._index * float(self._unit.read_text())


class GradedSuite(IndifferentSuite):
    def __init__(self, unit: str) -> None:
        self._unit = Path(unit)

    def make(self, attempt: Attempt) -> Graded:
        return Graded(attempt.key.index, self._unit)


def get_config() -> ConfigDict:
    config = small_run.get_config()
    config.run.num_steps = 1
    config.model.preset = "micro"
    config.learner.objective = "test_learner_edges:steep"
    config.env.factory = "test_refused_step:GradedSuite"
    config.env.options = ConfigDict({"unit": ""})
    return config


@pytest.mark.slow
def test_a_step_that_overflows_is_rolled_out_again_once_its_file_is_moved_away(tmp_path: Path):
    unit, workdir = tmp_path / "unit", tmp_path / "run"
    command = [
        sys.executable, "-m", "thundersync_jax.train", f"--config={__file__}",
        f"--workdir={workdir}", f"--config.env.options.unit={unit}",
    ]  # fmt: skip

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=TESTS)

    path = workdir / "trajectories" / "step_000000.jsonl"
    unit.write_text(f"{MAX_REWARD / 4}")
    done = run()
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: step 0: the batch gradient has norm inf")
    assert f"trains on the step's trajectories again, from {path}. " in error
    assert "mend the environment and move that file away" in error
    assert not read_jsonl(workdir / "metrics.jsonl")
    unit.write_text("1.0")
    path.rename(tmp_path / "moved")
    done = run()
    assert done.returncode == 0, done.stderr
    (line,) = read_jsonl(workdir / "metrics.jsonl")
    assert line["reward_mean"] == 1.5 and line["policy_version"] == 1


def failed(key: TrajectoryKey) -> TrajectoryRecord:
    return TrajectoryRecord(
        key=key,
        task_id="t",
        prompt_ids=(0,),
        rollout=None,
        verdict=Verdict(failure="no sandbox"),
        dispatched_s=0.0,
        content_s=None,
        terminal_s=1.0,
    )


class Refusing(fakes.FakeLearner):
    """A learner whose update finds something wrong."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def warm_up(self) -> int:
        return 1

    def update(self) -> UpdateReport:
        raise self._error


@pytest.mark.parametrize("kind", [NonFiniteGradientError, LogprobGapError, ObjectiveError])
def test_a_replayed_step_that_is_refused_names_its_file(kind: type[Exception], tmp_path: Path):
    workdir = WorkDirectory(tmp_path / "run")
    workdir.open(RunConfig())
    run = RunConfig().run
    keys = [fakes.key(0, g, i) for g in range(run.groups_per_step) for i in range(run.group_size)]
    write_step(workdir.trajectories, 0, [failed(key) for key in keys])
    runtime: Any = types.SimpleNamespace(
        config=RunConfig(),
        workdir=workdir,
        train_tasks=[fakes.task()],
        renderer=types.SimpleNamespace(tokenizer=fakes.tokenizer(), template_fingerprint=""),
        model=preset("tiny", vocab_size=8),
        frozen=None,
        learner=Refusing(kind("it is wrong")),
        worker=types.SimpleNamespace(warm_up=lambda: 1),
    )
    try:
        with Progress("none", num_steps=1) as progress, pytest.raises(RefusedStepError) as refused:
            asyncio.run(Trainer(runtime, progress).run())
    finally:
        workdir.close()
    path = step_path(workdir.trajectories, 0)
    assert str(refused.value).startswith("step 0: it is wrong. The same command trains")
    assert f"again, from {path}. " in str(refused.value)
