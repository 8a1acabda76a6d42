"""A model on a mesh: whether it fits there, and new parameters made where they are kept."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
from jax.sharding import Mesh

from thundersync_jax import sharding
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import Params, abstract_params, init_params, logical_axes
from thundersync_jax.sharding import FSDP, TABLE, TENSOR, MeshError, MeshShape


def check_mesh(
    shape: MeshShape, model: TransformerConfig, lengths: Sequence[int], *, num_devices: int
) -> None:
    """Raises MeshError naming everything that does not fit, and the nearest mesh that does.

    Args:
      lengths: padded lengths, whose tokens are sharded over fsdp.
      num_devices: how many there are; a mesh may have fewer.
    """
    sizes = _sharded_sizes(model, lengths)
    wrong = []
    if shape.num_devices > num_devices:
        wrong.append(f"needs {shape.num_devices} devices, there are {num_devices}")
    for axis, devices in ((FSDP, shape.fsdp), (TENSOR, shape.tensor)):
        uneven = [name for name, size in sizes[axis].items() if size % devices]
        if uneven:
            wrong.append(f"{axis} = {devices} does not divide {', '.join(uneven)}")
    if wrong:
        nearest = dataclasses.astuple(_nearest(shape, sizes, num_devices))
        raise MeshError(
            f"config.learner.mesh = {dataclasses.astuple(shape)}: {'; '.join(wrong)}. The nearest "
            f'that works is --config.learner.mesh="{nearest}"'
        )


def init_on_mesh(model: TransformerConfig, seed: int, mesh: Mesh) -> Params:
    """`init_params`, each made in pieces where the optimizer's copy of it lies.

    The values are those of `init_params`, whatever the mesh; no device holds a whole one.
    """
    make = functools.partial(init_params, model)
    return jax.jit(make, out_shardings=master_shardings(model, mesh))(seed)


def master_shardings(model: TransformerConfig, mesh: Mesh) -> Any:
    """Where the optimizer's copy of every parameter lies: in pieces, on as many devices as can."""
    specs = jax.tree.map(
        lambda parameter, axes: sharding.spread_over_data(
            sharding.partition_spec(axes), parameter.shape, mesh
        ),
        abstract_params(model),
        logical_axes(model),
    )
    return sharding.named(mesh, specs)


def _sharded_sizes(
    model: TransformerConfig, lengths: Sequence[int]
) -> dict[str | None, dict[str, int]]:
    """By mesh axis: what must divide by its devices, named as in "heads = 4"."""
    sizes = {
        "embed": model.embed_dim,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "mlp": model.mlp_dim,
        "vocab": model.vocab_size,
    }
    found: dict[str | None, dict[str, int]] = {FSDP: {}, TENSOR: {}}
    for axis, size in sizes.items():
        found[TABLE[axis]][f"{axis} = {size}"] = size
    for length in lengths:
        found[TABLE["length"]][f"bucket {length}"] = length
    return found


def _nearest(
    shape: MeshShape, sizes: Mapping[str | None, Mapping[str, int]], num_devices: int
) -> MeshShape:
    """Of the meshes that work on as many devices: there always is one, for data may be any."""
    count = min(shape.num_devices, num_devices)
    fsdp_limit, tensor_limit = (math.gcd(*sizes[axis].values()) for axis in (FSDP, TENSOR))
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    working = [
        MeshShape(data=count // (fsdp * tensor), fsdp=fsdp, tensor=tensor)
        for fsdp in divisors
        for tensor in divisors
        if count % (fsdp * tensor) == 0 and fsdp_limit % fsdp == 0 and tensor_limit % tensor == 0
    ]

    def distance(other: MeshShape) -> Fraction:
        """The factors by which axes grow or shrink, multiplied."""
        pairs = zip(dataclasses.astuple(shape), dataclasses.astuple(other), strict=True)
        return math.prod((Fraction(max(a, b), min(a, b)) for a, b in pairs), start=Fraction(1))

    return min(working, key=distance)
