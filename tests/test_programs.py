"""The learner's real programs on real meshes: who talks to whom, and what is updated in place."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thundersync_jax import topology

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def compiled(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    script = Path(__file__).with_name("learner_programs.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: dict[str, Any]) -> None:
    """Nothing crosses `data` before the update; every accumulator is updated in place."""
    update = found.pop("Wholeupdate")
    assert update["collectives"]["data"][0] > 0
    for name, report in found.items():
        assert report["collectives"]["data"] == [0, 0], name
        assert report["alias_bytes"] >= report["donated_bytes"], name


def test_replicas_do_not_communicate_before_the_update():
    flags = "--xla_force_host_platform_device_count=8"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    check(compiled(environment, "tiny", "32", "16", "2", "2", "2"))


@needs_libtpu
@pytest.mark.parametrize("model", ["tiny", "qwen3_0p6b"])
def test_the_programs_compile_for_a_tpu_host(model: str):
    """v5e:2x4, data 2 x fsdp 2 x tensor 2: 2,048 tokens after a shared prompt of 1,024."""
    found = compiled(topology.environment(), model, "2048", "1024", "2", "2", "2", "v5e:2x4")
    check(found)
    assert found["Fold"]["collectives"]["fsdp"][0] > 0
    assert found["Fold"]["peak_bytes"] < 16e9


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("bucket", [8192, 32768])
def test_an_8b_step_compiles_for_a_pod(bucket: int):
    """qwen3_8b on v5e:16x16, data 16 x fsdp 16: two pairs, a shared prompt of 2,048 tokens."""
    arguments = ("qwen3_8b", str(bucket), "2048", "16", "16", "1", "v5e:16x16")
    found = compiled(topology.environment(), *arguments)
    check(found)
    assert found["Fold"]["peak_bytes"] < 16e9
