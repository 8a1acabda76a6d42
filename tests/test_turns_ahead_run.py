"""A run whose turns stream without a teacher, and its replay from the committed trajectories."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import init_params

TESTS = Path(__file__).parent


def train(workdir: Path, *arguments: str) -> None:
    command = [
        sys.executable, "-m", "thundersync_jax.train", f"--config={TESTS / 'small_run.py'}",
        f"--workdir={workdir}", "--config.run.num_steps=3", "--config.model.preset=micro",
        "--config.checkpoint.every_steps=100", "--config.learner.stream_turns=idle",
        "--config.env.options.tool_delay_s=0.02", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=TESTS)
    assert done.returncode == 0, done.stderr


def weights_of(workdir: Path) -> list[np.ndarray]:
    checkpoints = Checkpointer(workdir / "checkpoints", keep_last=1)
    params = checkpoints.restore_policy(init_params(preset("micro", vocab_size=9), 0), 3)[0]
    checkpoints.close()
    return params


@pytest.mark.slow
def test_turns_run_while_their_tools_do_and_the_run_replays_to_the_same_weights(tmp_path: Path):
    train(tmp_path / "run")
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["num_failed"] == 0 and line["compiles"] == 0
        assert sum(line["paths"].values()) == line["num_trajectories"] == 8
    assert sum(line["num_by_turns"] for line in lines) > 0
    assert sum(line["replayed_tokens"] for line in lines) > 0
    journal = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in journal].count("TurnScored") >= 24
    again = Path(shutil.copytree(tmp_path / "run", tmp_path / "again"))
    shutil.rmtree(again / "checkpoints")
    train(again)
    assert lc.rel_l2(weights_of(again), weights_of(tmp_path / "run")) < 1e-3
