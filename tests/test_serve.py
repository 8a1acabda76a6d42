"""Which weights the `serve` main serves, and bad input to it. What it serves them with is in
test_serving_contract.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run

from thundersync_jax.config import resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.saved_policy import FRESH, load_policy, newest_step
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent
CONFIG = resolve(small_run.get_config())
MODEL = preset("tiny", vocab_size=13)


def save(
    workdir: WorkDirectory, *, step: int, version: int, model: TransformerConfig = MODEL
) -> object:
    """A checkpoint as the trainer writes it; returns its parameters."""
    params = init_params(model, 100 + step)
    state = TrainState(
        params=params,
        opt_state=make_optimizer(CONFIG.optimizer).init(params),
        policy_version=version,
    )
    checkpoints = Checkpointer(workdir.checkpoints, keep_last=2)
    checkpoints.save(state, RunPosition(num_steps=step), reward=0.0)
    checkpoints.close()
    return params


def test_the_newest_checkpoint_is_served_and_the_seeds_weights_without_one(
    tmp_path: Path,
) -> None:
    workdir = WorkDirectory(tmp_path)
    assert newest_step(workdir.checkpoints) == FRESH
    params, version = load_policy(CONFIG, MODEL, workdir, FRESH)
    assert version == 0 and not workdir.checkpoints.exists()
    _assert_equal(params, init_params(MODEL, CONFIG.run.seed))

    saved = {step: save(workdir, step=step, version=step - 1) for step in (9, 12)}
    (workdir.checkpoints / "15.orbax-checkpoint-tmp").mkdir()
    assert newest_step(workdir.checkpoints) == 12
    before = sorted(workdir.checkpoints.rglob("*"))
    for step, want in saved.items():
        params, version = load_policy(CONFIG, MODEL, workdir, step)
        assert version == step - 1
        _assert_equal(params, want)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 13: expected one of \[0, 9, 12"):
        load_policy(CONFIG, MODEL, workdir, 13)
    assert sorted(workdir.checkpoints.rglob("*")) == before


def _assert_equal(got: object, want: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_checkpoint_that_cannot_be_read_ends_the_main_with_its_name(tmp_path: Path) -> None:
    """By the child's own message, and without a restart."""
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "compile_cache").symlink_to(jax.config.jax_compilation_cache_dir)
    command = [
        *(sys.executable, "-m", "thundersync_jax.serve"),
        *(f"--config={TESTS / 'small_run.py'}", f"--workdir={tmp_path}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TESTS)
    assert result.returncode == 2, result
    assert "error: the checkpoint of step 7" in result.stderr
    assert result.stderr.endswith("it refused its input, for the reason above\n")
    assert "restarted" not in result.stdout


def test_a_directory_of_another_run_or_of_none_is_refused(tmp_path: Path) -> None:
    def serve(workdir: Path, *arguments: str) -> str:
        command = [
            *(sys.executable, "-m", "thundersync_jax.serve"),
            *(f"--config={TESTS / 'small_run.py'}", f"--workdir={workdir}", *arguments),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TESTS)
        assert result.returncode == 2 and not result.stdout, result
        return result.stderr

    missing = tmp_path / "mistyped"
    assert "mistyped is no directory: give that of a run" in serve(missing)
    assert not missing.exists()
    WorkDirectory(tmp_path).claim(CONFIG, model=MODEL, tokenizer="0")
    message = serve(tmp_path, "--config.env.options.num_values=5", "--config.run.seed=5")
    assert "holds a run of another configuration: env.options: " in message
    assert "run.seed" not in message


def test_a_mistyped_key_is_reported_without_starting_anything(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "thundersync_jax.serve"),
        *(f"--config={TESTS / 'small_run.py'}", f"--workdir={tmp_path}"),
        "--config.serving.num_slot=1",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TESTS)
    assert result.returncode == 2 and "Did you mean 'num_slots'" in result.stderr, result
    assert not result.stdout and not list(tmp_path.iterdir())
