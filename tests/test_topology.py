"""TPU programs compile without a TPU, and their memory and exchanges are read from the result."""

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

pytestmark = pytest.mark.optimized

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def on_topology(name: str) -> Any:
    script = Path(__file__).with_name("tpu_topology.py")
    done = subprocess.run(
        [sys.executable, str(script), name],
        env={**os.environ, **topology.environment()},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_libtpu
def test_the_kernel_compiles_inside_the_manual_region_and_stays_in_its_replica() -> None:
    """Forward and backward for v5e:2x4, data 2 x fsdp 2 x tensor 2, chosen by "auto"."""
    found = on_topology("kernel")
    assert found["kernels"] == 3  # forward, dq, dkv
    assert found["report"]["collectives"]["data"] == [0, 0]
    assert found["scattered"] >= 2  # the gradients of keys and of values, over fsdp
    # Of one device: queries [256, 4 heads, 128] and their gradient in bfloat16.
    assert found["report"]["argument_bytes"] >= 256 * 4 * 128 * 2
    assert found["report"]["peak_bytes"] >= found["report"]["argument_bytes"]


@needs_libtpu
def test_a_gradient_that_is_not_scattered_is_seen_as_an_all_reduce_of_its_size() -> None:
    found = on_topology("gradients")
    largest, _ = found["scattered"]
    assert largest == 0
    largest, num_bytes = found["whole"]
    assert largest >= num_bytes


@needs_libtpu
def test_logits_of_the_whole_vocabulary_are_seen_where_they_are() -> None:
    assert on_topology("logits") == {"pieces": False, "one piece": True}


@needs_libtpu
def test_ids_are_places_in_the_mesh_whatever_its_order() -> None:
    """A sum over `data`, on a mesh whose devices are shuffled, is seen as one over `data` alone."""
    for found in on_topology("numbering"):
        assert found == {"data": 1, "fsdp": 0, "tensor": 0}


@needs_libtpu
def test_a_mesh_may_divide_the_axes_of_its_slice() -> None:
    """As configs/ has them for v6e:8x8 and v5p:4x4x4."""
    assert on_topology("divided") == [[4, 8, 2, 64], [2, 16, 2, 64]]


@needs_libtpu
def test_an_unknown_topology_is_named_with_some_that_exist() -> None:
    for message in on_topology("unknown"):
        assert "v9z:2x4" in message or "v5e:3x5" in message
        assert "v5e:2x4" in message


def test_a_missing_compiler_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(topology.TopologyError, match=r"'v5e:2x4'.*pip install libtpu"):
        topology.topology_devices("v5e:2x4")
