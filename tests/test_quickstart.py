"""The promise of the quickstart: three seeds of three learn, in both modes. Minutes long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from thundersync_jax.metrics import read_jsonl

ROOT = Path(__file__).parents[1]


def mean(lines: list[dict], key: str) -> float:
    return float(np.mean([line[key] for line in lines]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["stream", "barrier"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(seed: int, mode: str, tmp_path: Path):
    command = [
        sys.executable, "-m", "thundersync_jax.train", "--config=configs/quickstart.py",
        f"--workdir={tmp_path / 'run'}", f"--config.run.seed={seed}", f"--config.run.mode={mode}",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, capture_output=True)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    first, last = lines[:5], lines[-10:]
    assert mean(first, "solved") < 0.85
    assert mean(first, "reward_mean") < 0.6
    assert mean(last, "solved") >= 0.95
    assert mean(last, "reward_mean") >= 0.75
    assert max(line["peak_rss_mb"] for line in lines) < 2500
    assert sum(line["compiles"] for line in lines) == 0
    assert sum(line["num_failed"] for line in lines) == 0
    if mode == "stream":
        assert np.median([line["overlap"] for line in lines]) > 0.6
    else:
        assert all(line["paths"]["stream"] == 0 for line in lines)
