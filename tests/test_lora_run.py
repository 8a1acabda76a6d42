"""A whole run with adapters: sampled, trained, resumed, exported in both forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent


def run(main: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"thundersync_jax.{main}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_adapters_resumes_and_is_exported(dtype: str, tmp_path: Path):
    """Sampler and learner agree as without adapters: both add them to their kernels."""
    workdir = f"--workdir={tmp_path / 'run'}"
    options = [
        *("--config=small_run.py", workdir, f"--config.model.dtype={dtype}"),
        *("--config.model.lora.rank=2", "--config.model.lora.targets=('query','down')"),
        "--config.optimizer.learning_rate=0.1",  # far enough for bfloat16 to show a difference
    ]
    run("train", *options, "--config.run.num_steps=3")
    assert "resumed from the checkpoint of step 3" in run("train", *options).stdout
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    most = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert max(line["logprob_gap_max"] for line in lines) < most
    assert lines[-1]["policy_version"] > 1

    files = {}
    for name, arguments in (
        ("base", ("--checkpoint_step=0",)),
        ("adapter", ("--form=adapter", "--base=base")),
        ("model", ()),
    ):
        to = tmp_path / name
        run("export", workdir, f"--to={to}", "--dtype=float32", *arguments)
        assert (to / "tokenizer.json").exists()
        (file,) = to.glob("*.safetensors")
        files[name] = load_file(file)
    for key, kernel in files["base"].items():
        prefix = f"base_model.model.{key.removesuffix('.weight')}.lora"
        if f"{prefix}_A.weight" in files["adapter"]:
            first, second = (files["adapter"].pop(f"{prefix}_{f}.weight") for f in "AB")
            assert np.any(second)
            kernel = kernel + 16 * second @ first
        np.testing.assert_allclose(files["model"][key], kernel, atol=1e-5)
    assert not files["adapter"]
