"""The learner's real programs on real meshes: who talks to whom, what is updated in place, and
that an 8B model fits a pod. TPU programs are compiled without a TPU.
"""

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
from thundersync_jax.model.presets import preset

pytestmark = pytest.mark.optimized

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
V5E_BYTES = 16e9  # of a chip as sold; its compiler states 16.9e9


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
    for name, report in found.items():
        assert report["alias_bytes"] >= report["donated_bytes"], name
        is_update = name in ("update", "gather")
        assert (report["collectives"]["data"][0] > 0) == is_update, name


def check_on_tpu(found: dict[str, Any], model: str) -> None:
    """Gradients are scattered as they are reduced over `fsdp`; no program holds [T, vocab]."""
    config = preset(model)
    # Of a layer's query kernel, whole: what an all-reduce of its gradient would result in.
    kernel_bytes = 2 * config.embed_dim * config.num_heads * config.head_dim
    for name in ("Fold", "PromptBackward"):
        assert found[name]["collectives"]["fsdp"][0] > 0
        assert found[name]["largest_all_reduce"]["fsdp"] < kernel_bytes, name
        assert not found[name]["has_logits"], name
    for name, report in found.items():
        assert report["total_bytes"] < V5E_BYTES, name


@pytest.mark.parametrize(
    ("model", "reduction"),
    [
        ("tiny", "ordered"),
        pytest.param("tiny", "exact", marks=pytest.mark.slow),
        pytest.param("tiny+2", "ordered", marks=pytest.mark.slow),
    ],
)
def test_replicas_do_not_communicate_before_the_update(model: str, reduction: str):
    environment = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    check(compiled(environment, model, reduction, "32", "16", "2", "2", "2"))


@needs_libtpu
@pytest.mark.parametrize("names", [("Fold", "update"), pytest.param((), marks=pytest.mark.slow)])
def test_programs_compile_for_a_tpu_host(names: tuple[str, ...]):
    """Some, or all; v5e:2x4 as data 2 x fsdp 2 x tensor 2: 2,048 tokens after a shared prompt of
    1,024.
    """
    arguments = ("2048", "1024", "2", "2", "2", "v5e:2x4", *names)
    check(compiled(topology.environment(), "tiny", "ordered", *arguments))


@needs_libtpu
@pytest.mark.slow
def test_a_gradient_on_a_tpu_host_is_scattered_and_holds_no_logits():
    """qwen3_0p6b on v5e:2x4 as data 2 x fsdp 4: 2,048 tokens after a shared prompt of 1,024."""
    arguments = ("2048", "1024", "2", "4", "1", "v5e:2x4", "Fold", "PromptBackward")
    found = compiled(topology.environment(), "qwen3_0p6b", "ordered", *arguments)
    check(found)
    check_on_tpu(found, "qwen3_0p6b")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("bucket", [8192, 32768])
def test_an_8b_model_fits_a_pod_of_16_gb_chips(bucket: int):
    """qwen3_8b, all parameters trained, on v5e:16x16 as data 8 x fsdp 16 x tensor 2: pairs and
    slots for prompts of 2,048 tokens of 32 groups that stream at a time, a held gradient on every
    replica.
    """
    arguments = ("qwen3_8b", "ordered", str(bucket), "2048", "8", "16", "2", "v5e:16x16")
    found = compiled(topology.environment(), *arguments)
    check(found)
    check_on_tpu(found, "qwen3_8b")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_512_groups_of_an_8b_model_with_adapters_fit_it_too():
    """qwen3_8b with adapters of rank 16, as above, for 512 groups instead of 32."""
    arguments = ("qwen3_8b+16", "ordered", "8192", "2048", "8", "16", "2", "v5e:16x16")
    found = compiled(topology.environment(), *arguments)
    check(found)
    assert max(report["total_bytes"] for report in found.values()) < V5E_BYTES
    assert not found["Fold"]["has_logits"]
