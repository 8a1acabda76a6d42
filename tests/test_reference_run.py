"""A reference policy in whole runs: a KL to the initial policy, its replay, and a teacher beside
rewards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import forward, init_params, logits
from thundersync_jax.trajectory import TrajectoryRecord
from thundersync_jax.trajectory_log import read_step

TESTS = Path(__file__).parent
MODEL = preset("micro", vocab_size=9)
LENGTH = 12


def train(workdir: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    command = [
        sys.executable, "-m", "thundersync_jax.train", f"--config={TESTS / 'small_run.py'}",
        f"--workdir={workdir}", "--config.model.preset=micro",
        "--config.checkpoint.every_steps=100", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return read_jsonl(workdir / "metrics.jsonl")


def train_with_kl(workdir: Path, num_steps: int) -> list[dict[str, Any]]:
    return train(
        workdir,
        "--config.learner.objective_options.kl_coefficient=0.1",
        "--config.reference.policy=initial",
        f"--config.run.num_steps={num_steps}",
    )


@pytest.fixture(scope="module")
def regularized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with a KL to the initial policy, no checkpoint but the last."""
    workdir = tmp_path_factory.mktemp("regularized") / "run"
    train_with_kl(workdir, 3)
    return workdir


def restored(workdir: Path, num_steps: int) -> Any:
    checkpoints = Checkpointer(workdir / "checkpoints", keep_last=1)
    try:
        return checkpoints.restore_policy(init_params(MODEL, 0), num_steps)[0]
    finally:
        checkpoints.close()


def records_of(workdir: Path, step: int) -> list[TrajectoryRecord]:
    return read_step(workdir / "trajectories", step, num_groups=2, group_size=4)


def assert_scored_by(params: Any, records: list[TrajectoryRecord]) -> None:
    """The recorded reference_logprobs are those of the policy, and 0 off its own tokens."""
    for record in records:
        assert record.rollout is not None
        tokens = record.rollout.tokens
        before, ids = len(record.prompt_ids), np.zeros(LENGTH, np.int32)
        ids[: before + tokens.num_tokens] = [*record.prompt_ids, *tokens.token_ids]
        want = np.asarray(logprobs(params, ids))[before - 1 :][: tokens.num_tokens]
        want = np.where(tokens.action_mask, want, 0.0)
        np.testing.assert_allclose(tokens.reference_logprobs, want, atol=1e-5)


@jax.jit
def logprobs(params: Any, ids: jax.Array) -> jax.Array:
    """Of every token after the first."""
    hidden = forward(MODEL, params, ids[None, :-1], jnp.arange(LENGTH - 1)[None])
    every = jax.nn.log_softmax(logits(MODEL, params, hidden)[0])
    return jnp.take_along_axis(every, ids[1:, None], axis=1)[:, 0]


def test_a_run_with_a_kl_reports_how_far_it_is_from_its_initial_policy(regularized: Path):
    lines = read_jsonl(regularized / "metrics.jsonl")
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["num_failed"] == 0 and line["compiles"] == 0 and line["grad_norm"] > 0
    first, *later = [line["reference_kl_k3_mean"] for line in lines]
    assert abs(first) < 1e-9 and min(later) > 1e-6
    for step in (0, 2):
        assert_scored_by(init_params(MODEL, 0), records_of(regularized, step))


def test_a_replay_trains_on_the_committed_scores_and_goes_on_with_the_same_reference(
    regularized: Path, tmp_path: Path
):
    again = Path(shutil.copytree(regularized, tmp_path / "run"))
    shutil.rmtree(again / "checkpoints")
    assert len(train_with_kl(again, 4)) == 4
    replayed, trained = restored(again, 3), restored(regularized, 3)
    assert lc.rel_l2(replayed, trained) < 1e-3
    assert lc.rel_l2(trained, init_params(MODEL, 0)) > 1e-2
    assert_scored_by(init_params(MODEL, 0), records_of(again, 3))


def test_rewards_and_a_teacher_train_one_policy(regularized: Path, tmp_path: Path):
    """The teacher is what another run has come to; engine and scorer are that run's programs."""
    cache = "compile_cache"
    shutil.copytree(regularized / cache, tmp_path / "run" / cache)
    lines = train(
        tmp_path / "run",
        "--config.learner.objective_options="
        "{'distillation_coefficient': 1.0, 'distillation_ratio_cap': 2.0}",
        f"--config.reference.policy={regularized}",
        "--config.run.num_steps=2",
    )
    assert [line["policy_version"] for line in lines] == [1, 2]
    assert all(line["reference_kl_k3_mean"] > 1e-6 and line["num_failed"] == 0 for line in lines)
    for step in (0, 1):
        assert_scored_by(restored(regularized, 3), records_of(tmp_path / "run", step))
