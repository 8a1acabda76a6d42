"""Grouped-query attention: to the tokens of the row, to a prefix before them, or to a K/V cache.

Positions and segments alone decide what is attended: as a dense mask, as `Packed` where that mask
would be too large, or as the kernel's `Visible`. Scores are never kept for the backward pass.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from thundersync_jax.model.kv_cache import KeysValues, KVCache
from thundersync_jax.model.layers import (
    Einsum,
    RMSNorm,
    at_least_float32,
    fan_in_normal,
    residual_scale,
    rotate,
)
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.visible import Visible
from thundersync_jax.sharding import constrain

# Query-key pairs of one head that are scored at once.
MAX_PAIRS = 2**22


class Packed(struct.PyTreeNode):
    """What `packed_mask` is made of, for rows too long for one.

    Attributes:
      positions, segment_ids: int32 [B, T].
      prefix_valid: bool [B, P], or None without a prefix.
      window: int32 [], how many of the last tokens a query sees, or None for all.
    """

    positions: jax.Array
    segment_ids: jax.Array
    prefix_valid: jax.Array | None
    window: jax.Array | None = None


Mask = jax.Array | Packed | Visible


def causal_mask(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Bool [B, T, S]: the key is not later than the query. Positions [B, T], [B, S] or [1, S]."""
    return key_positions[:, None, :] <= query_positions[:, :, None]


def window_mask(
    query_positions: jax.Array, key_positions: jax.Array, window: jax.Array | None
) -> jax.Array:
    """Bool [B, T, S]: the key is one of the query's last `window`; shapes as in `causal_mask`."""
    if window is None:
        return jnp.ones((), bool)
    return query_positions[:, :, None] - key_positions[:, None, :] < window


def packed_mask(
    keys: Packed, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Bool [B, T, P + S]: a valid key of the prefix, or one of the same segment and not later.

    Args:
      positions, segment_ids: int32 [B, T] of the queries; those of the keys by default.
    """
    positions = keys.positions if positions is None else positions
    segment_ids = keys.segment_ids if segment_ids is None else segment_ids
    segments = keys.segment_ids[:, None, :]
    mask = causal_mask(positions, keys.positions)
    mask &= (segment_ids[:, :, None] == segments) & (segments != 0)
    mask &= window_mask(positions, keys.positions, keys.window)
    if keys.prefix_valid is None:
        return mask
    before = keys.prefix_valid[:, None]
    before &= window_mask(positions, jnp.arange(before.shape[2])[None], keys.window)
    before = jnp.broadcast_to(before, (*positions.shape, before.shape[2]))
    return jnp.concatenate([before, mask], axis=2)


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention, the softmax in at least float32.

    Args:
      query: [B, T, K, G, H].
      keys, values: [B, S, K, H].
      mask: bool [B, T, S]. A query that may attend to nothing gets a finite, meaningless output.

    Returns:
      [B, T, K, G, H] in the query's dtype.
    """
    wide = at_least_float32(query.dtype)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", query, keys, preferred_element_type=wide)
    scores = jnp.where(mask[:, None, None], scores * query.shape[-1] ** -0.5, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, values)


def attend_in_chunks(
    query: jax.Array, keys: jax.Array, values: jax.Array, packed: Packed
) -> jax.Array:
    """`attend` for rows of any length, MAX_PAIRS scores of a head at a time."""
    batch, length = packed.positions.shape
    size = max(1, MAX_PAIRS // keys.shape[1])
    num_chunks = -(-length // size)

    def split(x: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (x.ndim - 2)
        chunks = jnp.pad(x, padding).reshape(batch, num_chunks, size, *x.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    @jax.checkpoint
    def one(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        part, positions, segment_ids = chunk
        return attend(part, keys, values, packed_mask(packed, positions, segment_ids))

    chunks = jax.lax.map(one, (split(query), split(packed.positions), split(packed.segment_ids)))
    joined = jnp.moveaxis(chunks, 0, 1).reshape(batch, num_chunks * size, *query.shape[2:])
    return joined[:, :length]


class Attention(nn.Module):
    """Projects, normalises (optionally), rotates; attends to the tokens or to a cache's rows."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        mask: Mask,
        layer: jax.Array,
        rows: jax.Array | None,
        positions: jax.Array,
        cache: KVCache | None,
        prefix: KeysValues | None,
    ) -> tuple[jax.Array, KVCache | None, KeysValues]:
        """Maps [B, T, D] to [B, T, D].

        A given cache first gets the new keys and values and is then attended; a given prefix is
        attended before them. The new keys and values [B, T, K, H] are returned.
        """
        c = self.config
        if c.windows:
            mask, rotary = self._of_layer(layer, mask, rotary, positions)
        query = self._project("query", "heads", c.num_heads)(inputs)  # [B, T, N, H]
        keys = self._project("key", "kv_heads", c.num_kv_heads)(inputs)  # [B, T, K, H]
        values = self._project("value", "kv_heads", c.num_kv_heads)(inputs)
        if c.use_qk_norm:
            query = RMSNorm(c, axis="head_dim", name="query_norm")(query)
            keys = RMSNorm(c, axis="head_dim", name="key_norm")(keys)
        if c.query_scale:
            query = query * jnp.asarray((c.head_dim / c.query_scale) ** 0.5, query.dtype)
        query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        new = KeysValues(keys=keys, values=values)
        if prefix is not None and not isinstance(mask, Visible):
            keys = jnp.concatenate([prefix.keys, keys], axis=1)  # [B, P + T, K, H]
            values = jnp.concatenate([prefix.values, values], axis=1)
        if cache is not None:
            cache = cache.write(layer, rows, positions, keys, values)
            keys, values = cache.read(layer, rows)  # [B, S, K, H]
        attended = self._attend(query, keys, values, mask, prefix)
        output = Einsum(
            c,
            "BTNH,NHD->BTD",
            (c.num_heads, c.head_dim, c.embed_dim),
            ("heads", "head_dim", "embed"),
            fan_in_normal(c.num_heads * c.head_dim, residual_scale(c)),
            name="output",
        )
        return output(attended), cache, new

    def _attend(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        mask: Mask,
        prefix: KeysValues | None,
    ) -> jax.Array:
        """Maps queries [B, T, N, H] to outputs of that shape."""
        c, shape = self.config, query.shape
        query = query.reshape(*shape[:2], c.num_kv_heads, c.heads_per_kv_head, c.head_dim)
        if isinstance(mask, Visible):
            from thundersync_jax.model.splash import splash

            return splash(query, keys, values, mask, prefix).reshape(shape)
        keys = constrain(keys, ("batch", None, "kv_heads", None))  # gathered over fsdp
        values = constrain(values, ("batch", None, "kv_heads", None))
        if isinstance(mask, Packed):
            # Otherwise the masks of all chunks are hoisted out of the loop over layers: T x S.
            once = jax.checkpoint(attend_in_chunks, prevent_cse=False)
            return once(query, keys, values, mask).reshape(shape)
        return jax.checkpoint(attend, prevent_cse=False)(query, keys, values, mask).reshape(shape)

    def _of_layer(
        self,
        layer: jax.Array,
        mask: Mask,
        rotary: tuple[jax.Array, jax.Array],
        positions: jax.Array,
    ) -> tuple[Mask, tuple[jax.Array, jax.Array]]:
        """Its mask and its rotary tables, of a model whose layers have windows."""
        window = jnp.asarray(self.config.windows, jnp.int32)[layer]
        cos, sin = (table[(window > 0).astype(jnp.int32)] for table in rotary)
        window = jnp.where(window > 0, window, jnp.iinfo(jnp.int32).max)
        if isinstance(mask, Packed):
            return mask.replace(window=window), (cos, sin)
        assert isinstance(mask, jax.Array)  # of a cache, whose index is the position
        keys = jnp.arange(mask.shape[2])[None]
        return mask & window_mask(positions, keys, window), (cos, sin)

    def _project(self, name: str, axis: str, num_heads: int) -> Einsum:
        c = self.config
        shape = (c.embed_dim, num_heads, c.head_dim)
        axes = ("embed", axis, "head_dim")
        return Einsum(
            c,
            "BTD,DNH->BTNH",
            shape,
            axes,
            fan_in_normal(c.embed_dim),
            use_bias=c.use_qkv_bias,
            name=name,
        )
