"""Splash attention: the TPU kernel that never holds the scores of all queries and keys.

Keys are P of a prefix, that every query may attend to where they are valid, and then the T of the
queries themselves: a query attends to those of its own segment up to itself. The kernel's own
segment ids cannot say "or the prefix", so they carry the validity of keys alone. Which of the T are
visible is a range per query, from the first token of its segment to itself, and the mask function
of the kernel unpacks it from the one integer a query has there.

The kernel cannot be partitioned automatically: in a program of a mesh it runs under a shard_map of
its own over the axes that are not manual yet, queries split over `fsdp`, heads over `tensor`.
Called by `attention`, which has the plain form of the same function and imports this module where a
program takes the kernel: importing Pallas takes as long as JAX itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask_info as mask_infos,
)
from jax.sharding import PartitionSpec

from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.visible import (
    INDEX_BITS,
    MAX_BLOCK,
    MAX_LENGTH,
    MIN_BLOCK,
    Visible,
    num_query_shards,
    platform,
)
from thundersync_jax.sharding import FSDP, TENSOR


def splash(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: Visible,
    prefix: KeysValues | None = None,
) -> jax.Array:
    """Softmax attention with float32 softmax and sums; interpreted where there is no TPU.

    Args:
      query: [B, T, K, G, H].
      keys, values: [B, T, K, H].
      prefix: keys and values [B, P, K, H] before them, the P of `visible`.

    Returns:
      [B, T, K, G, H] in the query's dtype. Queries that may attend to nothing get a finite,
      meaningless output.
    """
    length, shards = query.shape[1], num_query_shards()
    num_before = 0 if prefix is None else prefix.keys.shape[1]
    block_q = _block(length // shards)
    block_kv = _block(length)
    padded = _round_up(length, math.lcm(shards * block_q, block_kv))
    padded_before = _round_up(num_before, math.lcm(shards, block_kv))
    kernel = _kernel(padded, padded_before, shards, block_q, block_kv, platform() != "tpu")

    # The kernel has no scale of its own, and its heads come before the length.
    scaled = query * query.shape[-1] ** -0.5
    grouped = _pad(scaled, 1, padded - length).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]

    def parts(before: jax.Array | None, own: jax.Array) -> tuple[jax.Array, ...]:
        """[B, P, K, H] and [B, T, K, H] as multiples of the block."""
        padded_own = _pad(own, 1, padded - length)
        if before is None:
            return (padded_own,)
        return _pad(before, 1, padded_before - num_before), padded_own

    valid_before, valid_own = jnp.split(visible.valid, [num_before], axis=1)
    attended = _on_mesh(
        kernel,
        grouped.astype(query.dtype),
        parts(None if prefix is None else prefix.keys, keys),
        parts(None if prefix is None else prefix.values, values),
        _pad(visible.ranges, 1, padded - length),
        jnp.concatenate(
            [
                _pad(valid_before, 1, padded_before - num_before),
                _pad(valid_own, 1, padded - length),
            ],
            axis=1,
        ),
    )
    return attended.transpose(0, 3, 1, 2, 4)[:, :length]


def _on_mesh(
    kernel: kernels.SplashAttentionKernel,
    query: jax.Array,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    ranges: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """`_on_device` on every device's share: queries over `fsdp`, heads over `tensor`.

    Keys come split over `fsdp` and are gathered here, part by part: the transpose of that is the
    reduce-scatter of their gradients, whatever the partitioner would have made of it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _on_device(kernel, query, _joined(keys), _joined(values), ranges, valid)

    def share(kernel: Any, query: jax.Array, keys: Any, values: Any, *masks: jax.Array) -> Any:
        keys, values = jax.tree.map(_gathered, (keys, values))
        return _on_device(kernel, query, _joined(keys), _joined(values), *masks)

    spec = PartitionSpec
    queries, parts = spec(None, TENSOR, None, FSDP, None), spec(None, FSDP, TENSOR, None)
    # Block masks are [1, blocks of queries, blocks of keys], the sequence of queries is [T].
    split = jax.tree.map(lambda x: spec(None, FSDP, None) if x.ndim == 3 else spec(FSDP), kernel)
    return jax.shard_map(
        share,
        in_specs=(split, queries, parts, parts, spec(None, FSDP), spec(None, None)),
        out_specs=queries,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(kernel, query, keys, values, ranges, valid)


def _gathered(share: jax.Array) -> jax.Array:
    """[B, S / fsdp, K, H] of every device of `fsdp`, as [B, S, K, H].

    Heads are joined on the way: on TPUs a reduce-scatter along an axis that does not lie outermost
    becomes an all-reduce from some size on, and a layout may put heads outside of positions.
    """
    batch, length, *heads = share.shape
    whole = jax.lax.all_gather(share.reshape(batch, length, -1), FSDP, axis=1, tiled=True)
    return whole.reshape(batch, -1, *heads)


def _joined(parts: tuple[jax.Array, ...]) -> jax.Array:
    """[B, S, K, H] of all parts, as [B, K, S, H]."""
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    return whole.transpose(0, 2, 1, 3)


def _on_device(
    kernel: kernels.SplashAttentionKernel,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    ranges: jax.Array,
    valid: jax.Array,
) -> jax.Array:
    """Of whole arrays on one device; `query` is [B, K, G, T, H], the result too."""
    rows, kv_heads, group, length, width = query.shape
    every = jnp.ones(length, jnp.int32)

    def row(
        query: jax.Array, keys: jax.Array, values: jax.Array, ranges: jax.Array, valid: jax.Array
    ) -> Any:
        ranged = jax.tree.map(lambda x: ranges if x.ndim == 1 else x, kernel)
        return ranged(query, keys, values, segment_ids=kernels.SegmentIds(q=every, kv=valid))

    query = query.reshape(rows, kv_heads * group, length, width)
    attended = jax.vmap(row)(query, keys, values, ranges, valid)
    return attended.reshape(rows, kv_heads, group, length, width)


class _PrefixAndRange(masks._ComputableMask):
    """The whole prefix, and of the own keys the range of the query.

    With the row's index for a range it is the causal mask of one segment: no mask of packed
    segments sees more, so the blocks that it leaves out are empty in all of them.
    """

    def __init__(self, length: int, prefix: int) -> None:
        self._identity = (length, prefix)
        super().__init__((length, prefix + length), functools.partial(_sees, prefix))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PrefixAndRange) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


def _sees(prefix: int, ranges: jax.Array, key: jax.Array) -> jax.Array:
    own = key - prefix
    first, last = (ranges >> INDEX_BITS) & (MAX_LENGTH - 1), ranges & (MAX_LENGTH - 1)
    return (own < 0) | ((own >= first) & (own <= last))


@functools.lru_cache(maxsize=64)
def _kernel(
    length: int, prefix: int, shards: int, block_q: int, block_kv: int, interpret: bool
) -> kernels.SplashAttentionKernel:
    """The kernel of one shape. Its block masks are numpy arrays: no trace or device owns them."""
    mask = masks.MultiHeadMask([_PrefixAndRange(length, prefix)])  # one for all heads
    block = (block_q, block_kv)
    forward, function = mask_infos.process_mask(mask, block, q_seq_shards=shards)
    backward, _ = mask_infos.process_mask_dkv(mask, block, q_seq_shards=shards)
    return kernels.SplashAttentionKernel(
        forward,
        forward,
        backward,
        is_mqa=False,
        save_residuals=False,
        mask_value=kernels.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=function,
        interpret=interpret,
        block_sizes=kernels.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
    )


def _block(length: int) -> int:
    """The largest block that divides `length`; the smallest when none does."""
    sizes = (MAX_BLOCK, MAX_BLOCK // 2, MIN_BLOCK)
    return next((size for size in sizes if length % size == 0), MIN_BLOCK)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(array: jax.Array, axis: int, amount: int) -> jax.Array:
    """Zeros after the end; of ranges and validity that is nothing to attend to."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, amount)
    return jnp.pad(array, widths)
