"""The reward-free score S of one trajectory, whose gradient is what streams.

S = sum over action tokens t of w_t sg(min(p_t / b_t, C)) log p_t, with p the learner, b the sampler
and C the cap of the truncated importance weight (off when 0: the data are on-policy and the ratio
is 1). Nothing here depends on rewards, so grad S is final as soon as the content is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def token_weights(action_mask: np.ndarray, normalizer: str) -> np.ndarray:
    """Weights w_t of the score: 1 per action token, or 1 / number of action tokens for
    "trajectory_mean".

    Args:
      action_mask: bool [T].
      normalizer: "token_mean" or "trajectory_mean".

    Returns:
      float32 [T], 0 on observations.
    """
    weights = action_mask.astype(np.float32)
    if normalizer == "trajectory_mean":
        weights /= max(float(weights.sum()), 1.0)
    return weights


def trajectory_score(
    logprobs: jax.Array, behavior_logprobs: jax.Array, weights: jax.Array, tis_cap: float
) -> jax.Array:
    """S of one trajectory.

    Args:
      logprobs: [T] learner log-probabilities, the only input with a gradient.
      behavior_logprobs: [T] of the sampler.
      weights: [T], 0 where the token is not an action or is padding.
      tis_cap: C; 0 leaves the importance weight out.

    Returns:
      Scalar in the dtype of `logprobs`.
    """
    if tis_cap > 0:
        ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - behavior_logprobs)
        weights = weights * jnp.minimum(ratio, tis_cap)
    # A masked position may hold any value, a non-finite one included: select before multiplying.
    terms = jnp.where(weights == 0, 0.0, weights * logprobs)
    return jnp.sum(terms)
