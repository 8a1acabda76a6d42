"""The learner on eight simulated devices: the same gradient and update on every mesh."""

from __future__ import annotations

import dataclasses
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
from thundersync_jax.model.sharded import check_mesh
from thundersync_jax.sharding import MeshError, MeshShape, make_mesh, partition_spec

TESTS = Path(__file__).parent
EIGHT = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "shape",
    [
        "2 2 2",
        pytest.param("8 1 1", marks=pytest.mark.slow),
        pytest.param("2 4 1", marks=pytest.mark.slow),
        pytest.param("1 1 8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rank", ["0", pytest.param("3", marks=pytest.mark.slow)])
def test_every_mesh_gives_the_reference_gradient_and_the_same_update(shape: str, rank: str):
    """Shared prompts, all paths, packed lanes, groups that span replicas, pairs in the host."""
    command = [sys.executable, str(TESTS / "mesh_run.py"), *shape.split(), "4", rank]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **EIGHT}, cwd=TESTS
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["is_same_start"] and found["is_kept_there"]  # the weights as made on the mesh
    assert max(found["distances"]) <= 1e-5
    assert found["update"] <= 1e-3  # Adam divides entries near zero by themselves
    assert sum(found["paths"].values()) == 13


def test_a_mesh_is_of_whole_axes_over_as_many_devices():
    device = jax.devices()[:1]
    with pytest.raises(MeshError, match=r"\(0, 1, 1\) has data = 0: expected at least 1"):
        MeshShape(data=0)
    with pytest.raises(MeshError, match=r"\(1, 2, 1\) needs 2 devices, got 1: pass as many"):
        make_mesh(MeshShape(fsdp=2), device)


@pytest.mark.parametrize(
    ("shape", "lengths", "num_devices", "wrong", "nearest"),
    [
        (
            (1, 4, 8),
            (16, 62),
            32,
            "tensor = 8 does not divide heads = 4, kv_heads = 4, vocab = 14",
            (8, 2, 2),
        ),
        ((1, 4, 8), (16, 62), 32, "fsdp = 4 does not divide bucket 62", (8, 2, 2)),
        ((1, 4, 1), (16, 62), 8, "fsdp = 4 does not divide bucket 62", (2, 2, 1)),
        ((1, 4, 2), (16,), 4, "needs 8 devices, there are 4", (1, 2, 2)),
        ((3, 1, 1), (16,), 1, "needs 3 devices, there are 1", (1, 1, 1)),
        ((1, 1, 7), (16,), 7, "tensor = 7 does not divide heads = 4", (7, 1, 1)),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_nearest_that_does(
    shape, lengths, num_devices, wrong, nearest
):
    model = dataclasses.replace(preset("tiny", vocab_size=14), num_kv_heads=4)
    given = MeshShape(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    with pytest.raises(MeshError) as caught:
        check_mesh(given, model, lengths, num_devices=num_devices)
    message = str(caught.value)
    assert message.startswith(f"config.learner.mesh = {shape}: ")
    assert wrong in message
    assert message.endswith(f'--config.learner.mesh="{nearest}"')
    assert "embed" not in message
    works = MeshShape(**dict(zip(("data", "fsdp", "tensor"), nearest, strict=True)))
    check_mesh(works, model, lengths, num_devices=num_devices)


def test_the_table_refuses_unknown_and_twice_used_axes():
    assert partition_spec(("layers", "embed", "mlp")) == PartitionSpec(None, "fsdp", "tensor")
    with pytest.raises(MeshError, match=r"\['width'\] are not in the table.*add them"):
        partition_spec(("embed", "width"))
    with pytest.raises(MeshError, match="use a mesh axis twice"):
        partition_spec(("heads", "mlp"))


def test_a_mesh_of_one_is_the_default():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert np.size(mesh.devices) == 1
