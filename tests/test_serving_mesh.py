"""Serving on eight simulated devices: the tokens and log-probabilities of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
EIGHT = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}


@pytest.mark.timeout(500)
def test_a_mesh_samples_and_scores_what_one_device_does():
    """Heads, mlp and vocabulary over 8: turns, truncation, parked rows, scoring in chunks."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "serving_mesh_run.py")],
        capture_output=True,
        text=True,
        timeout=450,
        env={**os.environ, **EIGHT},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["is_same"]
    assert found["num_distinct"] == 7
    assert found["logprob_gap"] <= 1e-5
    assert found["score_gap"] <= 1e-5
