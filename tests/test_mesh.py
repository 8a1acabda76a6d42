"""The learner on eight simulated devices: the same gradient and update on every mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from thundersync_jax.model.presets import preset
from thundersync_jax.model.sharded import check_divisible
from thundersync_jax.sharding import MeshError, MeshShape, make_mesh, partition_spec

TESTS = Path(__file__).parent
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "shape",
    [
        "8 1 1",
        "2 2 2",
        pytest.param("2 4 1", marks=pytest.mark.slow),
        pytest.param("1 1 8", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_gives_the_reference_gradient_and_the_same_update(shape: str):
    """Shared prompts, all paths, packed lanes, groups that span replicas, pairs in the host."""
    command = [sys.executable, str(TESTS / "mesh_run.py"), *shape.split(), "4"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **EIGHT}, cwd=TESTS
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert max(found["distances"]) <= 1e-5
    assert found["update"] <= 1e-3  # Adam divides entries near zero by themselves
    assert sum(found["paths"].values()) == 13


def test_an_impossible_mesh_is_refused_with_what_fits():
    device = jax.devices()[:1]
    with pytest.raises(MeshError, match=r"mesh.data = 0: expected at least 1"):
        MeshShape(data=0)
    with pytest.raises(MeshError, match=r"fsdp 2 x tensor 1 needs 2 devices, there are 1"):
        make_mesh(MeshShape(fsdp=2), device)


def test_sizes_that_do_not_divide_are_all_named_with_the_nearest_mesh():
    model = preset("tiny", vocab_size=14)
    check_divisible(MeshShape(fsdp=4, tensor=2), model, (16, 64))
    with pytest.raises(MeshError) as caught:
        check_divisible(MeshShape(fsdp=4, tensor=8), model, (16, 62))
    message = str(caught.value)
    assert "heads = 4 over tensor = 8 (the nearest that divides is 4)" in message
    assert "vocab = 14 over tensor = 8 (the nearest that divides is 7)" in message
    assert "bucket 62 over fsdp = 4 (the nearest that divides is 2)" in message
    assert "embed" not in message


def test_the_table_refuses_unknown_and_twice_used_axes():
    assert partition_spec(("layers", "embed", "mlp")) == PartitionSpec(None, "fsdp", "tensor")
    with pytest.raises(MeshError, match=r"\['width'\] are not in the table"):
        partition_spec(("embed", "width"))
    with pytest.raises(MeshError, match="use a mesh axis twice"):
        partition_spec(("heads", "mlp"))


def test_a_mesh_of_one_is_the_default():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert np.size(mesh.devices) == 1
