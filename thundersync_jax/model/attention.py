"""Grouped-query attention, with or without a K/V cache. Positions alone decide what is attended."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.model.layers import (
    Einsum,
    RMSNorm,
    at_least_float32,
    fan_in_normal,
    residual_scale,
    rotate,
)
from thundersync_jax.model.presets import TransformerConfig


def causal_mask(
    query_positions: jax.Array, key_positions: jax.Array, key_valid: jax.Array | None
) -> jax.Array:
    """Bool [B, T, S]: the key is valid and not later than the query.

    Args:
      query_positions: [B, T].
      key_positions: [B, S] or [1, S].
      key_valid: bool [B, S], or None when every key is.
    """
    mask = key_positions[:, None, :] <= query_positions[:, :, None]
    return mask if key_valid is None else mask & key_valid[:, None, :]


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
        mask: jax.Array,
        layer: jax.Array,
        rows: jax.Array | None,
        positions: jax.Array,
        cache: KVCache | None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Maps [B, T, D] to [B, T, D]; a given cache first gets the new keys and values."""
        c = self.config
        query = self._project("query", "heads", c.num_heads)(inputs)  # [B, T, N, H]
        keys = self._project("key", "kv_heads", c.num_kv_heads)(inputs)  # [B, T, K, H]
        values = self._project("value", "kv_heads", c.num_kv_heads)(inputs)
        if c.use_qk_norm:
            query = RMSNorm(c, axis="head_dim", name="query_norm")(query)
            keys = RMSNorm(c, axis="head_dim", name="key_norm")(keys)
        query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        if cache is not None:
            cache = cache.write(layer, rows, positions, keys, values)
            keys, values = cache.read(layer, rows)  # [B, S, K, H]
        batch, length = inputs.shape[:2]
        query = query.reshape(batch, length, c.num_kv_heads, c.heads_per_kv_head, c.head_dim)
        attended = attend(query, keys, values, mask).reshape(batch, length, c.num_heads, c.head_dim)
        output = Einsum(
            c,
            "BTNH,NHD->BTD",
            (c.num_heads, c.head_dim, c.embed_dim),
            ("heads", "head_dim", "embed"),
            fan_in_normal(c.num_heads * c.head_dim, residual_scale(c)),
            name="output",
        )
        return output(attended), cache

    def _project(self, name: str, axis: str, num_heads: int) -> Einsum:
        c = self.config
        shape = (c.embed_dim, num_heads, c.head_dim)
        axes = ("embed", axis, "head_dim")
        return Einsum(c, "BTD,DNH->BTNH", shape, axes, fan_in_normal(c.embed_dim), name=name)
