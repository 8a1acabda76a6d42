"""The rows of the embedding, by token.

On a mesh the lookup runs under a shard_map of its own. A gather from a table split over two
automatic axes aborts XLA's partitioner when a third axis is manual, and gathering the table instead
moves V x D numbers; this moves the T x D of the result.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from thundersync_jax.model.layers import at_least_float32
from thundersync_jax.sharding import FSDP, TENSOR


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of `table` [V, D] at `tokens` int32 [B, T], clipped into the vocabulary: [B, T, D].

    On a mesh the table lies as ("vocab", "embed"), the result as ("batch", "length", None).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _take(table, tokens)
    is_split = tokens.shape[1] % mesh.shape[FSDP] == 0
    return jax.shard_map(
        functools.partial(_look_up_shares, table.shape[0], is_split),
        in_specs=(PartitionSpec(TENSOR, FSDP), PartitionSpec()),
        out_specs=PartitionSpec(None, FSDP if is_split else None, None),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(table, tokens)


def _look_up_shares(
    vocab_size: int, is_split: bool, share: jax.Array, tokens: jax.Array
) -> jax.Array:
    """From every device's share [V / tensor, D / fsdp] of the table."""
    rows = share.shape[0]
    offsets = jnp.clip(tokens, 0, vocab_size - 1) - jax.lax.axis_index(TENSOR) * rows
    is_mine = (offsets >= 0) & (offsets < rows)
    found = _take(share, offsets)
    found = jnp.where(is_mine[..., None], found, 0)  # [B, T, D / fsdp]
    found = jax.lax.psum(found, TENSOR)
    if is_split:
        return jax.lax.all_to_all(found, FSDP, split_axis=1, concat_axis=2, tiled=True)
    return jax.lax.all_gather(found, FSDP, axis=2, tiled=True)


@jax.custom_vjp
def _take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table, clipped into it; the gradients of a row taken often are summed in float32.

    In bfloat16 that sum stands still at 256 times what is added.
    """
    return jnp.take(table, rows, axis=0, mode="clip")


def _take_forward(
    table: jax.Array, rows: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _take(table, rows), (table, rows)


def _take_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    table, rows = saved
    wide = at_least_float32(table.dtype)
    rows = jnp.clip(rows, 0, table.shape[0] - 1)
    total = jnp.zeros(table.shape, wide).at[rows].add(cotangent.astype(wide))
    return total.astype(table.dtype), None


_take.defvjp(_take_forward, _take_backward)
