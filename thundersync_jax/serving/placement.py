"""Where the arrays of the serving programs lie on a mesh.

Heads, mlp and vocabulary are split over `tensor`: a device holds its kv heads of every row, so a
decode step exchanges activations, never keys or values. The other axes of a serving mesh are 1: a
row is not cut along its positions, and replicas are engines of their own.

Abstract values only: nothing here allocates. Programs are lowered by `lower_on`, with arguments and
results that are placed here. Called by the engine, the scorer and the weight store.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from thundersync_jax import sharding
from thundersync_jax.model import transformer
from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.decode_state import DecodeState, Prefix
from thundersync_jax.sharding import TABLE, MeshError, MeshShape, make_mesh

_State = TypeVar("_State", DecodeState, Prefix)

_ROWS = PartitionSpec(None, None, None, TABLE["kv_heads"], None)  # [L, B, S, K, H]
_LOGITS = PartitionSpec(None, TABLE["vocab"])  # [B, V]


def serving_mesh(config: TransformerConfig, devices: Any) -> Mesh:
    """All of `devices` along `tensor`.

    Raises:
      MeshError: they do not divide the model.
    """
    count = len(devices)
    sizes = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "mlp": config.mlp_dim,
        "vocab": config.vocab_size,
    }
    uneven = [f"{name} = {size}" for name, size in sizes.items() if size % count]
    if uneven:
        works = [n for n in range(1, count) if not any(size % n for size in sizes.values())]
        raise MeshError(
            f"{count} devices of one engine do not divide {', '.join(uneven)}: give it "
            f"{' or '.join(map(str, works))}"
        )
    return make_mesh(MeshShape(tensor=count), devices)


def place_weights(mesh: Mesh, config: TransformerConfig) -> transformer.Params:
    """The engine's copy, in the dtype that the model computes in."""

    def place(parameter: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        like = jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(config.dtype))
        return _struct(mesh, like, sharding.partition_spec(axes))

    return jax.tree.map(
        place, transformer.abstract_params(config), transformer.logical_axes(config)
    )


def place_cache(mesh: Mesh, cache: KVCache) -> KVCache:
    return jax.tree.map(lambda x: _struct(mesh, x, _ROWS), cache)


def place_state(mesh: Mesh, state: _State) -> _State:
    """Slots, or a prefix: rows by kv heads, logits by vocabulary, the rest everywhere."""
    return dataclasses.replace(
        replicate(mesh, state),
        cache=place_cache(mesh, state.cache),
        logits=_struct(mesh, state.logits, _LOGITS),
    )


def replicate(mesh: Mesh, values: Any) -> Any:
    """Small arrays: batches of pieces, records, scalars."""
    return jax.tree.map(lambda x: _struct(mesh, x, PartitionSpec()), values)


def shardings(placed: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, placed)


def lower_on(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    results: Any,
    *,
    donated: int | None = None,
) -> Callable[[], jax.stages.Lowered]:
    """A function that traces the program of placed arguments and results; `donated` is an index."""
    jitted = jax.jit(
        function,
        donate_argnums=() if donated is None else donated,
        out_shardings=shardings(results),
    )

    def lower() -> jax.stages.Lowered:
        # One device needs no collectives and no constraints: its program names no mesh.
        with jax.set_mesh(mesh) if mesh.size > 1 else contextlib.nullcontext():
            return jitted.lower(*arguments)

    return lower


def _struct(mesh: Mesh, like: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))
