"""Draws one token per row, with the log-probability of the distribution it was drawn from.

Pure functions. A draw depends on (logits, the row's parameters, its seed, the token's position) and
on nothing else: not on the slot, the batch, or how many steps one program runs.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class SamplingRows:
    """How each row samples.

    Attributes:
      temperature: float32 [B]; 0 is greedy.
      top_k: int32 [B]; 0 is off.
      top_p: float32 [B]; 1 is off. Applied after top_k, to the renormalised rest.
      seed: uint32 [B].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


def sample(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples one token per row.

    Args:
      logits: [B, V], float32 or float64.
      positions: int32 [B], the position in its row that the token will have.

    Returns:
      Tokens int32 [B]; log-probabilities float32 [B] under the tempered, truncated distribution. A
      greedy row reports those of temperature 1.
    """
    is_greedy = rows.temperature == 0
    scaled = logits / jnp.where(is_greedy, 1.0, rows.temperature)[:, None].astype(logits.dtype)
    # A sort of the vocabulary costs more than the rest of the step: only when a row asks for it.
    scaled = jax.lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1)),
        lambda: truncate(scaled, rows.top_k, rows.top_p),
        lambda: scaled,
    )
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, positions, logits.shape[1])
    noise = jnp.where(is_greedy[:, None], 0.0, noise).astype(logprobs.dtype)
    tokens = jnp.argmax(logprobs + noise, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen.astype(jnp.float32)


def truncate(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Sets logits outside the row's top_k and nucleus to -inf; ties with the last kept are kept."""
    descending = -jnp.sort(-logits, axis=-1)
    vocab = logits.shape[-1]
    within_k = jnp.arange(vocab) < jnp.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = jax.nn.softmax(jnp.where(within_k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A rounded sum reaches 1 before the tail does: 1 must mean off.
    within_p = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    last = jnp.min(jnp.where(within_k & within_p, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= last, logits, -jnp.inf)


def _gumbel(seed: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
