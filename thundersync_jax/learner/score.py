"""The sums of one lane as a function of the parameters: what every program differentiates.

Pure. Shared by the streaming programs and by the reference, which share nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from thundersync_jax.learner.buckets import Lanes
from thundersync_jax.losses.logprobs import token_logprobs, token_logprobs_and_entropy
from thundersync_jax.losses.objective import Objective, Tokens, lane_sums
from thundersync_jax.losses.objectives import grpo
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import forward, output_kernel

Params = Any  # a pytree of arrays; the model alone knows its structure


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """What a score depends on besides parameters and tokens; static in every program."""

    model: TransformerConfig
    objective: Objective = dataclasses.field(default_factory=grpo)
    temperature: float = 1.0
    logprob_chunk: int = 16384


def score(
    settings: ScoreSettings, params: Params, prefix: KeysValues | None, lane: Lanes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(S, *K) of one lane, sums over its trajectories, [num_sums]; and (gap_sum, gap_max) of it.

    Args:
      prefix: keys and values [L, P, K, H] of a shared prompt, or None.
      lane: one lane's arrays [T] and scalars.
    """
    before = None
    if prefix is not None:
        before = (jnp.arange(prefix.keys.shape[1]) < lane.prefix_length)[None]
        prefix = jax.tree.map(lambda x: x[:, None], prefix)  # a batch of one
    hidden = forward(
        settings.model,
        params,
        lane.tokens[None],
        lane.positions[None],
        _attention_ids(lane)[None],
        prefix,
        before,
    )[0]
    return sums_of(settings, params, hidden, lane)


def _attention_ids(lane: Lanes) -> jax.Array:
    """int32 [T]: equal for tokens that may see each other, 0 for padding: one for each segment of
    each trajectory, which begins where positions do not go on.
    """
    begins = jnp.diff(lane.positions, prepend=-1) != 1
    return jnp.where(lane.segment_ids > 0, 1 + jnp.cumsum(begins, dtype=jnp.int32), 0)


def sums_of(
    settings: ScoreSettings, params: Params, hidden: jax.Array, lane: Lanes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`score` from the hidden states [T, D] of one lane."""
    logprobs, entropy = _logprobs(settings, params, hidden, lane.targets)
    gap = jnp.abs(jax.lax.stop_gradient(logprobs) - lane.behavior_logprobs)
    gap = jnp.where(lane.action_mask, gap, 0.0).astype(jnp.float32)
    tokens = Tokens(
        logprobs=logprobs,
        behavior_logprobs=lane.behavior_logprobs,
        action_mask=lane.action_mask,
        segment_ids=lane.segment_ids,
        advantages=lane.advantages,
        reference_logprobs=lane.reference_logprobs,
        entropy=entropy,
    )
    sums = lane_sums(settings.objective, tokens, lane.weights, lane.term_weights)
    return sums, (jnp.sum(gap), jnp.max(gap))


def _logprobs(
    settings: ScoreSettings, params: Params, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities of the targets, and entropies where the objective needs them."""
    kernel = output_kernel(settings.model, params)
    options: Any = {"temperature": settings.temperature, "chunk": settings.logprob_chunk}
    if settings.objective.needs_entropy:
        return token_logprobs_and_entropy(hidden, kernel, targets, **options)
    return token_logprobs(hidden, kernel, targets, **options), None
