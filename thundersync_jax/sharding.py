"""The mesh and the one table that places logical axes on it.

    data     replicas of the learner: each accumulates its own trajectories
    fsdp     parameters, accumulators and the tokens of a trajectory
    tensor   heads, mlp and vocabulary

Parameters are sharded over fsdp and tensor, and replicated over data. Accumulators have a leading
`data` axis: every replica has sums of its own, and nothing crosses replicas until the update.
Optimizer state and master weights are sharded over data as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from thundersync_jax.errors import UserError

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"

# Logical axis of a parameter or activation -> mesh axis; None is replicated.
TABLE: dict[str, str | None] = {
    "layers": None,
    "embed": FSDP,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "rank": None,
    "batch": None,
    "length": FSDP,
}


class MeshError(UserError, ValueError):
    """A mesh that does not fit the model or the devices: what does not, and what does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise MeshError(
                    f"a mesh of {dataclasses.astuple(self)} has {name} = {size}: expected at least "
                    "1 along every axis, as in (1, 1, 1)"
                )

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given shape over `devices` (all of them by default), near ones along `tensor`;
    an axis may be a part of one of the slice's own.
    """
    found = list(jax.devices() if devices is None else devices)
    if shape.num_devices != len(found):
        raise MeshError(
            f"a mesh of {dataclasses.astuple(shape)} needs {shape.num_devices} devices, got "
            f"{len(found)}: pass as many as it has, or another shape"
        )
    placed = mesh_utils.create_device_mesh(
        dataclasses.astuple(shape), found, allow_split_physical_axes=True
    )
    return Mesh(placed, (DATA, FSDP, TENSOR), axis_types=(AxisType.Auto,) * 3)


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """The mesh axes of one array's logical axes.

    Raises:
      MeshError: an axis is not in the table, or two of the array's axes share a mesh axis.
    """
    unknown = [axis for axis in axes if axis not in TABLE]
    if unknown:
        raise MeshError(
            f"logical axes {unknown} are not in the table of {sorted(TABLE)}: add them there"
        )
    placed = [TABLE[axis] for axis in axes]
    used = [axis for axis in placed if axis is not None]
    if len(used) != len(set(used)):
        raise MeshError(
            f"logical axes {tuple(axes)} use a mesh axis twice: {placed}. Place one of them on "
            "another axis of the table, or on None"
        )
    return PartitionSpec(*placed)


def constrain(array: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Places an activation by its logical axes inside a program of the mesh; elsewhere a no-op."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or FSDP not in mesh.axis_names:
        return array
    placed = (None if axis is None else TABLE[axis] for axis in axes)
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*placed))


def num_shards(axis: str) -> int:
    """Pieces of a logical axis in the program of a mesh that is being traced; elsewhere 1."""
    mesh = jax.sharding.get_abstract_mesh()
    name = TABLE[axis]
    return 1 if name is None or name not in mesh.axis_names else mesh.shape[name]


def replica_spec(spec: PartitionSpec) -> PartitionSpec:
    """Of an accumulator: a leading axis over `data`, then the parameter's own axes."""
    return PartitionSpec(DATA, *spec)


def spread_over_data(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """`spec` with `data` added to the largest dimension that it divides; as it is when none is."""
    return _spread(spec, shape, mesh, DATA)


def spread_over_replica(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """`spec` with those of `fsdp` and `tensor` that it does not use added in the same way."""
    used = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
    for axis in (FSDP, TENSOR):
        if axis not in used:
            spec = _spread(spec, shape, mesh, axis)
    return spec


def _spread(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, axis: str) -> PartitionSpec:
    placed = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    placed += [()] * (len(shape) - len(spec))
    pieces = [math.prod(mesh.shape[name] for name in axes) for axes in placed]
    count = mesh.shape[axis]
    fitting = [i for i, size in enumerate(shape) if size % (pieces[i] * count) == 0]
    if count == 1 or not fitting:
        return spec
    best = max(fitting, key=lambda i: shape[i] // pieces[i])
    placed[best] = (*placed[best], axis)
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in placed))


def named(mesh: Mesh, specs: Any) -> Any:
    """Shardings of a pytree of partition specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
