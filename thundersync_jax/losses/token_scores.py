"""The policy's part of an objective: records with (tokens) -> [T] scores.

ratio_t = exp(log p_t - log b_t), p the learner, b the sampler; sg stops the gradient. Records
compare by value, so that two equal objectives are one static argument of a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from thundersync_jax.losses.objective import Tokens


def log_probability(tokens: Tokens) -> jax.Array:
    """log p_t: the policy gradient where the data are the policy's own.

    Every ratio p / p_old with p_old the learner's own probability at the same version is 1, with
    the gradient of log p: GRPO, PPO and DAPO step from there, and no clip binds.
    """
    return tokens.logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAdvantage:
    """A times a score that does not contain it."""

    score: Callable[[Tokens], jax.Array]

    def __call__(self, tokens: Tokens) -> jax.Array:
        assert tokens.advantages is not None
        return tokens.advantages.astype(tokens.logprobs.dtype) * self.score(tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedRatio:
    """sg(min(ratio_t, cap)) log p_t: truncated importance sampling (Ionides 2008; V-trace's rho,
    arXiv 1802.01561).
    """

    cap: float

    def __call__(self, tokens: Tokens) -> jax.Array:
        ratio = jnp.exp(jax.lax.stop_gradient(tokens.logprobs) - tokens.behavior_logprobs)
        return jnp.minimum(ratio, self.cap) * tokens.logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedWeight:
    """sg(clip(ratio_t, 1 - low, 1 + high)) log p_t: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4)."""

    low: float
    high: float

    def __call__(self, tokens: Tokens) -> jax.Array:
        ratio = jnp.exp(jax.lax.stop_gradient(tokens.logprobs) - tokens.behavior_logprobs)
        return jnp.clip(ratio, 1 - self.low, 1 + self.high) * tokens.logprobs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
    """min(ratio_t A, clip(ratio_t, 1 - low, 1 + high) A): PPO (arXiv 1707.06347, eq. 7); with
    low < high DAPO's clip-higher (arXiv 2503.14476). It contains A.
    """

    low: float
    high: float

    def __call__(self, tokens: Tokens) -> jax.Array:
        assert tokens.advantages is not None
        ratio = jnp.exp(tokens.logprobs - tokens.behavior_logprobs)
        return _pessimistic(ratio, tokens.advantages, self.low, self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceClippedSurrogate:
    """As `ClippedSurrogate`, with the trajectory's ratio exp(mean_t(log p_t - log b_t)) at each of
    its tokens: GSPO (arXiv 2507.18071, eq. 5 to 7). It contains A.
    """

    low: float
    high: float

    def __call__(self, tokens: Tokens) -> jax.Array:
        assert tokens.advantages is not None
        ratio = jnp.exp(tokens.trajectory_mean(tokens.logprobs - tokens.behavior_logprobs))
        return _pessimistic(ratio, tokens.advantages, self.low, self.high)


def _pessimistic(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    advantages = advantages.astype(ratio.dtype)
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    return jnp.minimum(ratio * advantages, clipped * advantages)
