"""Log-probabilities of given tokens and entropies, without materialising [T, V] logits.

The log-sum-exp over the vocabulary is accumulated chunk by chunk; the backward pass recomputes each
chunk's logits (jax.checkpoint), so at most `chunk` logits per token exist at one time in either
direction.
"""

from __future__ import annotations

from typing import NamedTuple

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
    sums = _vocabulary_sums(hidden, kernel, targets, temperature, chunk, has_mean=False)
    return sums.chosen - sums.total


def token_logprobs_and_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = 16384,
) -> tuple[jax.Array, jax.Array]:
    """As `token_logprobs`, and the distribution's entropy in nats: log Z - sum_v p_v logit_v."""
    sums = _vocabulary_sums(hidden, kernel, targets, temperature, chunk, has_mean=True)
    assert sums.mean is not None
    return sums.chosen - sums.total, sums.total - sums.mean


class _Sums(NamedTuple):
    """Of a part of the vocabulary, for every token: log of the sum of exp(logit); the target's
    logit, 0 if it is elsewhere; the mean logit under the part's softmax, where wanted.
    """

    total: jax.Array
    chosen: jax.Array
    mean: jax.Array | None


def _vocabulary_sums(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    temperature: float,
    chunk: int,
    *,
    has_mean: bool,
) -> _Sums:
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    vocab_size = kernel.shape[1]

    def scaled_logits(columns: jax.Array) -> jax.Array:
        logits = jnp.tensordot(hidden, columns, axes=1, preferred_element_type=dtype)
        return logits.astype(dtype) / temperature

    if vocab_size <= chunk:
        # A sum instead of a gather: the vocabulary may be sharded.
        is_target = jnp.arange(vocab_size) == targets[..., None]
        return _reduce(scaled_logits(kernel), is_target, None, (-1,), has_mean=has_mean)

    # Every piece has its share of every device's columns: one cut from a whole kernel would lie on
    # some devices alone, and be sent to the others.
    shards = num_shards("vocab")
    share, width = vocab_size // shards, max(1, chunk // shards)
    kernel = constrain(kernel.reshape(-1, shards, share), ("embed", "vocab", None))

    @jax.checkpoint
    def add_chunk(carry: _Sums, first: jax.Array) -> tuple[_Sums, None]:
        # The last piece is moved back to stay inside; `is_new` leaves out what it repeats.
        start = jnp.minimum(first, share - width)
        columns = jax.lax.dynamic_slice_in_dim(kernel, start, width, axis=2)
        logits = scaled_logits(columns)  # [..., shards, width]
        offsets = start + jnp.arange(width)
        is_new = offsets >= first
        ids = jnp.arange(shards)[:, None] * share + offsets
        is_target = (ids == targets[..., None, None]) & is_new
        return _merge(carry, _reduce(logits, is_target, is_new, (-2, -1), has_mean=has_mean)), None

    nothing = jnp.zeros(targets.shape, dtype)
    start = _Sums(
        total=jnp.full(targets.shape, -jnp.inf, dtype),
        chosen=nothing,
        mean=nothing if has_mean else None,
    )
    return jax.lax.scan(add_chunk, start, jnp.arange(0, share, width))[0]


def _reduce(
    logits: jax.Array,
    is_target: jax.Array,
    is_new: jax.Array | None,
    axes: tuple[int, ...],
    *,
    has_mean: bool,
) -> _Sums:
    """The sums of the logits that are new; None: all are."""
    kept = logits if is_new is None else jnp.where(is_new, logits, -jnp.inf)
    total = jax.nn.logsumexp(kept, axis=axes)
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=axes)
    if not has_mean:
        return _Sums(total=total, chosen=chosen, mean=None)
    probabilities = jnp.exp(kept - jnp.expand_dims(total, axes))
    return _Sums(total=total, chosen=chosen, mean=jnp.sum(probabilities * logits, axis=axes))


def _merge(first: _Sums, second: _Sums) -> _Sums:
    total = jnp.logaddexp(first.total, second.total)
    mean = None
    if first.mean is not None and second.mean is not None:
        share = jnp.exp(second.total - total)  # of the probability; `first` may be empty
        mean = (1 - share) * first.mean + share * second.mean
    return _Sums(total=total, chosen=first.chosen + second.chosen, mean=mean)
