"""Grouped-query attention: to the tokens of the row, to a prefix before them, or to a K/V cache.

Positions and segments alone decide what is attended, as a dense mask or as the kernel's `Visible`.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

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
from thundersync_jax.model.splash import Visible, splash
from thundersync_jax.sharding import constrain


def causal_mask(query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """Bool [B, T, S]: the key is not later than the query. Positions [B, T], [B, S] or [1, S]."""
    return key_positions[:, None, :] <= query_positions[:, :, None]


def packed_mask(
    positions: jax.Array, segment_ids: jax.Array, prefix_valid: jax.Array | None
) -> jax.Array:
    """Bool [B, T, P + T]: a valid key of the prefix, or one of the same segment and not later.

    Args:
      positions, segment_ids: int32 [B, T]; 0 is padding.
      prefix_valid: bool [B, P], or None without a prefix.
    """
    keys = segment_ids[:, None, :]
    mask = causal_mask(positions, positions) & (segment_ids[:, :, None] == keys) & (keys != 0)
    if prefix_valid is None:
        return mask
    before = jnp.broadcast_to(prefix_valid[:, None], (*positions.shape, prefix_valid.shape[1]))
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


class Attention(nn.Module):
    """Projects, normalises (optionally), rotates; attends to the tokens or to a cache's rows."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        mask: jax.Array | Visible,
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
        query = self._project("query", "heads", c.num_heads)(inputs)  # [B, T, N, H]
        keys = self._project("key", "kv_heads", c.num_kv_heads)(inputs)  # [B, T, K, H]
        values = self._project("value", "kv_heads", c.num_kv_heads)(inputs)
        if c.use_qk_norm:
            query = RMSNorm(c, axis="head_dim", name="query_norm")(query)
            keys = RMSNorm(c, axis="head_dim", name="key_norm")(keys)
        query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        new = KeysValues(keys=keys, values=values)
        if prefix is not None and not isinstance(mask, Visible):
            keys = jnp.concatenate([prefix.keys, keys], axis=1)  # [B, P + T, K, H]
            values = jnp.concatenate([prefix.values, values], axis=1)
        if cache is not None:
            cache = cache.write(layer, rows, positions, keys, values)
            keys, values = cache.read(layer, rows)  # [B, S, K, H]
        batch, length = inputs.shape[:2]
        query = query.reshape(batch, length, c.num_kv_heads, c.heads_per_kv_head, c.head_dim)
        if isinstance(mask, Visible):
            attended = splash(query, keys, values, mask, prefix)
        else:
            keys = constrain(keys, ("batch", None, "kv_heads", None))  # gathered over fsdp
            values = constrain(values, ("batch", None, "kv_heads", None))
            attended = jax.checkpoint(attend, prevent_cse=False)(query, keys, values, mask)
        attended = attended.reshape(batch, length, c.num_heads, c.head_dim)
        output = Einsum(
            c,
            "BTNH,NHD->BTD",
            (c.num_heads, c.head_dim, c.embed_dim),
            ("heads", "head_dim", "embed"),
            fan_in_normal(c.num_heads * c.head_dim, residual_scale(c)),
            name="output",
        )
        return output(attended), cache, new

    def _project(self, name: str, axis: str, num_heads: int) -> Einsum:
        c = self.config
        shape = (c.embed_dim, num_heads, c.head_dim)
        axes = ("embed", axis, "head_dim")
        return Einsum(c, "BTD,DNH->BTNH", shape, axes, fan_in_normal(c.embed_dim), name=name)
