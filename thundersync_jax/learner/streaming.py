"""The streaming programs: pure functions over donated accumulators.

    accumulate    acc_b <- acc_b + C[b, k] g_k for every lane k and buffer b, with g_k = grad S_k
    close_group   batch <- batch + a G1 + b G2, and the pair is zero again
    apply_update  one division, one clip, one optimizer step, and the batch sum is zero again

`accumulate` serves every path: the stream path passes the pair (G1, G2) with coefficients (r_k - c,
1), the direct path passes the batch accumulator with the advantage. A coefficient of exactly 0
leaves its buffer alone, so a non-finite g stays out of it. Accumulators have at least float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from thundersync_jax.learner.buckets import Lanes
from thundersync_jax.losses.logprobs import token_logprobs
from thundersync_jax.losses.score import trajectory_score
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import forward, output_kernel

Params = Any  # a pytree of arrays; the model alone knows its structure


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """What a score depends on besides parameters and tokens; static in every program."""

    model: TransformerConfig
    temperature: float = 1.0
    tis_cap: float = 0.0
    logprob_chunk: int = 16384


class LaneStats(struct.PyTreeNode):
    """Per lane [K]: sum and maximum of |learner - sampler| over action tokens, and whether g was
    finite.
    """

    gap_sum: jax.Array
    gap_max: jax.Array
    is_finite: jax.Array


def zeros_like_params(params: Params) -> Params:
    """One accumulator: the parameters' shapes in at least float32."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def score(
    settings: ScoreSettings,
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    behavior_logprobs: jax.Array,
    num_positions: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """S of one padded trajectory, and (gap_sum, gap_max) of it.

    Args:
      tokens, targets: int32 [T].
      weights, behavior_logprobs: float32 [T].
      num_positions: int32 []; positions from here on are padding.
    """
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden = forward(
        settings.model, params, tokens[None], positions[None], (positions < num_positions)[None]
    )[0]
    logprobs = token_logprobs(
        hidden,
        output_kernel(settings.model, params),
        targets,
        temperature=settings.temperature,
        chunk=settings.logprob_chunk,
    )
    gap = jnp.where(weights == 0, 0.0, jnp.abs(jax.lax.stop_gradient(logprobs) - behavior_logprobs))
    value = trajectory_score(logprobs, behavior_logprobs, weights, settings.tis_cap)
    return value, (jnp.sum(gap).astype(jnp.float32), jnp.max(gap).astype(jnp.float32))


def fold(acc: Params, coefficient: jax.Array, grad: Params) -> Params:
    """acc + coefficient * grad, and exactly acc where the coefficient is 0."""
    return jax.tree.map(
        lambda a, g: jnp.where(
            coefficient == 0, a, a + coefficient.astype(a.dtype) * g.astype(a.dtype)
        ),
        acc,
        grad,
    )


def accumulate(
    settings: ScoreSettings,
    params: Params,
    buffers: tuple[Params, ...],
    coefficients: jax.Array,
    lanes: Lanes,
) -> tuple[tuple[Params, ...], LaneStats]:
    """Folds the score gradients of the filled lanes into every buffer.

    Args:
      buffers: accumulators, donated by the caller.
      coefficients: [len(buffers), K] in float32 (float64 for float64 parameters).
      lanes: padded examples; only the first `lanes.num_lanes` are run.
    """
    grad_of_score = jax.grad(functools.partial(score, settings), has_aux=True)
    num_lanes = lanes.tokens.shape[0]
    stats = LaneStats(
        gap_sum=jnp.zeros(num_lanes, jnp.float32),
        gap_max=jnp.zeros(num_lanes, jnp.float32),
        is_finite=jnp.ones(num_lanes, jnp.bool_),
    )

    def run_lane(
        lane: jax.Array, carry: tuple[tuple[Params, ...], LaneStats]
    ) -> tuple[tuple[Params, ...], LaneStats]:
        buffers, stats = carry
        grad, (gap_sum, gap_max) = grad_of_score(
            params,
            lanes.tokens[lane],
            lanes.targets[lane],
            lanes.weights[lane],
            lanes.behavior_logprobs[lane],
            lanes.num_positions[lane],
        )
        is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grad)]).all()
        stats = stats.replace(
            gap_sum=stats.gap_sum.at[lane].set(gap_sum),
            gap_max=stats.gap_max.at[lane].set(gap_max),
            is_finite=stats.is_finite.at[lane].set(is_finite),
        )
        folded = tuple(fold(acc, coefficients[b, lane], grad) for b, acc in enumerate(buffers))
        return folded, stats

    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (buffers, stats))


def close_group(
    batch: Params, reward_score_grad: Params, score_grad: Params, coefficients: jax.Array
) -> tuple[Params, Params, Params]:
    """batch + a G1 + b G2 with (a, b) = `coefficients` [2]; returns it and the zeroed pair."""
    batch = fold(fold(batch, coefficients[0], reward_score_grad), coefficients[1], score_grad)
    return (
        batch,
        jax.tree.map(jnp.zeros_like, reward_score_grad),
        jax.tree.map(jnp.zeros_like, score_grad),
    )


def apply_update(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    batch: Params,
    denominator: jax.Array,
) -> tuple[Params, optax.OptState, Params, jax.Array]:
    """Divides once, negates once, steps once; with a non-finite norm parameters and moments stay as
    they are.

    Args:
      batch: sum of A_i g_i, the ascent direction, in at least float32.
      denominator: scalar; action tokens or trajectories that arrived.

    Returns:
      (params, opt_state, zeroed batch, norm of the normalised gradient before clipping).
    """
    grads = jax.tree.map(lambda g: -g / denominator.astype(g.dtype), batch)
    norm = optax.tree.norm(grads)

    def step() -> tuple[Params, optax.OptState]:
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new_opt_state

    params, opt_state = jax.lax.cond(jnp.isfinite(norm), step, lambda: (params, opt_state))
    return params, opt_state, jax.tree.map(jnp.zeros_like, batch), norm
