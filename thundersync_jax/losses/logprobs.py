"""Log-probabilities of given tokens, without materialising [T, V] logits.

The log-sum-exp over the vocabulary is accumulated chunk by chunk; the backward pass recomputes each
chunk's logits (jax.checkpoint), so at most `chunk` logits per token exist at one time in either
direction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
      kernel: [D, V].
      targets: int32 [...], in [0, V).
      temperature: the sampler's temperature, positive.
      chunk: vocabulary entries per piece.

    Returns:
      [...] in float32, or float64 for float64 inputs.
    """
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    vocab_size = kernel.shape[1]

    def scaled_logits(columns: jax.Array) -> jax.Array:
        logits = jnp.einsum("...d,dv->...v", hidden, columns, preferred_element_type=dtype)
        return logits.astype(dtype) / temperature

    if vocab_size <= chunk:
        logits = scaled_logits(kernel)
        # A sum instead of a gather: the vocabulary may be sharded.
        is_target = jnp.arange(vocab_size) == targets[..., None]
        chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    num_chunks = -(-vocab_size // chunk)

    @jax.checkpoint
    def add_chunk(
        carry: tuple[jax.Array, jax.Array], first: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total, chosen = carry
        # The last chunk is moved back to stay inside the vocabulary; `is_new` leaves out what it
        # repeats.
        start = jnp.minimum(first, vocab_size - chunk)
        logits = scaled_logits(jax.lax.dynamic_slice_in_dim(kernel, start, chunk, axis=1))
        ids = start + jnp.arange(chunk)
        is_new = ids >= first
        piece = jax.nn.logsumexp(jnp.where(is_new, logits, -jnp.inf), axis=-1)
        is_target = (ids == targets[..., None]) & is_new
        chosen = chosen + jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
        return (jnp.logaddexp(total, piece), chosen), None

    total = jnp.full(targets.shape, -jnp.inf, dtype)
    firsts = jnp.arange(num_chunks) * chunk
    (total, chosen), _ = jax.lax.scan(add_chunk, (total, jnp.zeros(targets.shape, dtype)), firsts)
    return chosen - total
