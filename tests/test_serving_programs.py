"""The serving programs on a TPU host, compiled without one: rows are updated in place, only
activations cross devices, and an 8B model with 64 rows of 8,192 tokens fits 16 GB chips.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from serving_cases import CONFIG

from thundersync_jax import topology
from thundersync_jax.model.presets import preset
from thundersync_jax.serving.placement import serving_mesh
from thundersync_jax.sharding import MeshError

pytestmark = pytest.mark.optimized

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
V5E_BYTES = 16e9  # of a chip as sold


def compiled(*arguments: str) -> dict[str, Any]:
    script = Path(__file__).with_name("serving_programs.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, **topology.environment()},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found: dict[str, Any], model: str, num_slots: int, tokens_per_call: int) -> None:
    """Of a device's memory and of what it sends, on a mesh of `tensor` alone."""
    config = preset(model)
    for name, report in found["programs"].items():
        assert report["alias_bytes"] >= report["in_place_bytes"], name
        assert report["cache_copies"] == 0, name
        assert not report["has_logits"] and not report["has_whole_cache"], name
        assert found["resident_bytes"] + report["extra_bytes"] < V5E_BYTES, name
        assert report["temp_bytes"] < found["resident_bytes"] / 4, name
        assert report["collectives"]["data"][0] == report["collectives"]["fsdp"][0] == 0, name
        # The residual stream of the call's tokens, in bfloat16.
        tokens = num_slots if name == "generate" else tokens_per_call
        assert report["largest_all_reduce"]["tensor"] <= 2 * tokens * config.embed_dim, name
    # A row that truncates has its logits sorted: they are exchanged there, and back.
    logits_bytes = 4 * num_slots * config.vocab_size
    assert found["programs"]["generate"]["collectives"]["tensor"][1] < 2 * logits_bytes


@needs_libtpu
@pytest.mark.slow
def test_the_programs_compile_for_a_tpu_host():
    """qwen3_0p6b on v5e:2x4: 16 rows of 2,048 tokens, 4 x 64 tokens an extension."""
    names = ("prefill", "extend", "generate")
    found = compiled("qwen3_0p6b", "16", "2048", "4", "64", "v5e:2x4", *names)
    assert set(found["programs"]) == set(names)
    check(found, "qwen3_0p6b", 16, 256)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1100)
def test_an_8b_model_serves_64_long_rows_on_16_gb_chips():
    """qwen3_8b on v5e:2x4: 64 rows of 8,192 tokens, 12 x 512 tokens an extension or a
    scoring.
    """
    found = compiled("qwen3_8b", "64", "8192", "12", "512", "v5e:2x4")
    assert found["programs"]["generate"]["in_place_bytes"] == 36 * 64 * 8192 * 2 * 128 * 2
    check(found, "qwen3_8b", 64, 6144)


def test_devices_that_do_not_divide_the_model_are_refused_with_numbers_that_do():
    devices = jax.devices() * 8
    model = dataclasses.replace(CONFIG, vocab_size=16, num_heads=8, num_kv_heads=4)
    with pytest.raises(MeshError, match=r"8 devices .* do not divide kv_heads = 4: .* 1 or 2 or 4"):
        serving_mesh(model, devices)
    assert serving_mesh(model, devices[:1]).size == 1
