"""Log-probabilities of given tokens, without materialising [T, V] logits.

The log-sum-exp over the vocabulary is accumulated chunk by chunk; the backward pass recomputes each
chunk's logits (jax.checkpoint), so at most `chunk` logits per token exist at one time in either
direction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from thundersync_jax.sharding import constrain, num_shards


def token_logprobs(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = 16384,
) -> jax.Array:
    """Returns log softmax(hidden @ kernel / temperature) at `targets`.

    Args:
      hidden: [..., D] any float dtype.
      kernel: [D, V], on a mesh as ("embed", "vocab").
      targets: int32 [...], in [0, V).
      temperature: the sampler's temperature, positive.
      chunk: vocabulary entries per piece.

    Returns:
      [...] in float32, or float64 for float64 inputs.
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    vocab_size = kernel.shape[1]

    def scaled_logits(columns: jax.Array) -> jax.Array:
        logits = jnp.tensordot(hidden, columns, axes=1, preferred_element_type=dtype)
        return logits.astype(dtype) / temperature

    if vocab_size <= chunk:
        logits = scaled_logits(kernel)
        # A sum instead of a gather: the vocabulary may be sharded.
        is_target = jnp.arange(vocab_size) == targets[..., None]
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    # Every piece has its share of every device's columns: one cut from a whole kernel would lie on
    # some devices alone, and be sent to the others.
    shards = num_shards("vocab")
    share, width = vocab_size // shards, max(1, chunk // shards)
    kernel = constrain(kernel.reshape(-1, shards, share), ("embed", "vocab", None))

    @jax.checkpoint
    def add_chunk(
        carry: tuple[jax.Array, jax.Array], first: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total, chosen = carry
        # The last piece is moved back to stay inside; `is_new` leaves out what it repeats.
        start = jnp.minimum(first, share - width)
        columns = jax.lax.dynamic_slice_in_dim(kernel, start, width, axis=2)
        logits = scaled_logits(columns)  # [..., shards, width]
        offsets = start + jnp.arange(width)
        is_new = offsets >= first
        piece = jax.nn.logsumexp(jnp.where(is_new, logits, -jnp.inf), axis=(-2, -1))
        ids = jnp.arange(shards)[:, None] * share + offsets
        is_target = (ids == targets[..., None, None]) & is_new
        chosen = chosen + jnp.sum(jnp.where(is_target, logits, 0.0), axis=(-2, -1))
        return (jnp.logaddexp(total, piece), chosen), None

    start = jnp.full(targets.shape, -jnp.inf, dtype), jnp.zeros(targets.shape, dtype)
    (total, chosen), _ = jax.lax.scan(add_chunk, start, jnp.arange(0, share, width))
    return chosen - total
