"""The oracle: one ordinary batch gradient of the whole objective, with no streaming in it.

It pads every trajectory to one length, weights each by its advantage, and differentiates the mean
loss once. It shares the model and the per-trajectory score with the learner, and neither its sums
nor its shapes. Tests and `benchmark exactness` compare the streamed update against it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.learner.buckets import Example, LaneItem, Lanes, pad_lanes
from thundersync_jax.learner.streaming import ScoreSettings, score

Params = Any


def reference_gradient(
    settings: ScoreSettings,
    params: Params,
    examples: Sequence[Example],
    advantages: Sequence[float],
    denominator: float,
    *,
    row_multiple: int = 16,
) -> Params:
    """The descent gradient -(1/denominator) grad sum_i A_i S_i as one batch.

    Args:
      examples: trajectories that have a reward, in any order.
      advantages: A_i of each.
      denominator: action tokens, or trajectories, that arrived.
      row_multiple: rows are rounded up to it, so that batches of many sizes share a program; 1
        where time is measured.
    """
    longest = max(e.num_positions for e in examples)
    items = [LaneItem(examples=(example,)) for example in examples]
    lanes = pad_lanes([items], _round_up(len(examples), row_multiple), _round_up(longest, 32))
    lanes = jax.tree.map(lambda x: x[0], lanes.replace(num_lanes=None))
    dtype = jax.tree.leaves(params)[0].dtype
    weights = np.zeros(lanes.tokens.shape[0], jnp.promote_types(dtype, jnp.float32))
    weights[: len(examples)] = advantages
    return _batch_gradient(settings, params, lanes, weights, denominator)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@functools.partial(jax.jit, static_argnums=0)
def _batch_gradient(
    settings: ScoreSettings,
    params: Params,
    lanes: Lanes,
    advantages: np.ndarray,
    denominator: float,
) -> Params:
    def loss(params: Params) -> jax.Array:
        scores, _ = jax.vmap(functools.partial(score, settings, params, None))(lanes)
        return -jnp.sum(advantages * scores) / denominator

    return jax.grad(loss)(params)
