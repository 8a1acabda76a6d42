"""`KVCache`: the keys and values of a set of rows; the index in a row is the absolute position.

Writes outside a row are dropped, never clamped: clamped padding would overwrite a valid entry.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from thundersync_jax.model.presets import TransformerConfig


@flax.struct.dataclass
class KeysValues:
    """Keys and values of consecutive tokens, differentiable.

    Attributes:
      keys, values: [L, B, S, K, H] in the model's dtype, without L inside a layer; keys are
        rotated.
    """

    keys: jax.Array
    values: jax.Array


@flax.struct.dataclass
class KVCache:
    """Attributes:
    keys, values: [L, B, S, K, H] in the model's dtype; keys are rotated.
    """

    keys: jax.Array
    values: jax.Array

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def write(
        self,
        layer: jax.Array,
        rows: jax.Array | None,
        positions: jax.Array,
        keys: jax.Array,
        values: jax.Array,
    ) -> KVCache:
        """Stores keys and values [B, T, K, H] of `layer` at (rows [B], positions [B, T])."""
        if rows is None:
            rows = jnp.arange(self.num_rows)
        # A negative index would count from the end.
        inside = jnp.where(positions < 0, self.length, positions)
        at = (layer, rows[:, None], inside)
        return KVCache(
            keys=self.keys.at[at].set(keys, mode="drop"),
            values=self.values.at[at].set(values, mode="drop"),
        )

    def read(self, layer: jax.Array, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Keys and values of `layer` in `rows` [B], clipped into the cache, or in all:
        [B, S, K, H].
        """
        if rows is None:
            return self.keys[layer], self.values[layer]
        return _take_rows(self.keys, layer, rows), _take_rows(self.values, layer, rows)


def _take_rows(array: jax.Array, layer: jax.Array, rows: jax.Array) -> jax.Array:
    """`array[layer, rows]`, the rows clipped into the array."""
    return jax.lax.platform_dependent(array, layer, rows, cpu=_gathered, default=_sliced)


def _gathered(array: jax.Array, layer: jax.Array, rows: jax.Array) -> jax.Array:
    return array[layer, rows]


def _sliced(array: jax.Array, layer: jax.Array, rows: jax.Array) -> jax.Array:
    """TPU compilers copy the whole array for a gather of such long rows, and without the barrier
    also for slices of it, to have them in the layout that their user prefers.
    """
    size, zero = (1, 1, *array.shape[2:]), jnp.int32(0)
    layer, rows = layer.astype(jnp.int32), rows.astype(jnp.int32)
    slices = [jax.lax.dynamic_slice(array, (layer, row, zero, zero, zero), size) for row in rows]
    return jax.lax.optimization_barrier(jnp.concatenate(slices, axis=1)[0])


def init_cache(config: TransformerConfig, num_rows: int, length: int) -> KVCache:
    """An empty cache. Its owner knows how far each row is filled."""
    shape = (config.num_layers, num_rows, length, config.num_kv_heads, config.head_dim)
    return KVCache(keys=jnp.zeros(shape, config.dtype), values=jnp.zeros(shape, config.dtype))
