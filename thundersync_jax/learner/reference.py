"""The oracle: one ordinary batch gradient of the whole objective, with no streaming in it.

It takes the same declaration as the learner, pads every trajectory to one length, weights each by
its advantage, and differentiates the mean loss once. It shares the model and the sums of one lane
with the learner, and neither its accumulation nor its shapes. Tests and `benchmark exactness`
compare the streamed update against it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.learner.buckets import Example, LaneItem, Lanes, make_example, pad_lanes
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.losses.normalizers import Counts
from thundersync_jax.losses.objective import Objective, Streams
from thundersync_jax.losses.objective_check import scale_of
from thundersync_jax.trajectory import TrajectoryTokens

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One trajectory of a batch: its tokens, or None if there are none; its reward, or None."""

    prompt_ids: np.ndarray
    tokens: TrajectoryTokens | None
    reward: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """A trajectory as the batch weights it: `weight` times (advantage) S, and its terms."""

    example: Example
    advantage: float
    weight: float


def objective_gradient(
    settings: ScoreSettings, params: Params, groups: Sequence[Sequence[Attempt]]
) -> Params:
    """The descent gradient of `settings.objective` on a whole batch of groups."""
    objective = settings.objective
    kept = [g for g in groups if objective.keeps_group(_rewards(g))]
    advantages = _advantages(objective, kept)
    rows = []
    for group in groups:
        is_kept = any(group is other for other in kept)
        num_tokens = _counts([group], is_rewarded=True).num_tokens
        values = advantages[id(group)] if is_kept else [0.0] * len(group)
        has_advantage = any(values)
        for attempt, advantage in zip(group, values, strict=True):
            if attempt.tokens is not None:
                is_counted = has_advantage and attempt.reward is not None
                scale = objective.normalizer.group_scale(num_tokens)
                example = make_example(attempt.prompt_ids, attempt.tokens, objective)
                weight = scale if is_counted else 0.0
                rows.append(_Row(example=example, advantage=advantage, weight=weight))
    rewarded, final = _counts(kept, is_rewarded=True), _counts(groups, is_rewarded=False)
    weighted = [
        value
        for group in kept
        for attempt, value in zip(group, advantages[id(group)], strict=True)
        if attempt.reward is not None
    ]
    scale = scale_of(objective, np.asarray(weighted, np.float64))
    denominators = [scale * objective.normalizer.denominator(rewarded)]
    denominators += [terms[0].normalizer.denominator(final) for terms in objective.term_sums]
    return _gradient(settings, params, rows, denominators, row_multiple=16)


def reference_gradient(
    settings: ScoreSettings,
    params: Params,
    examples: Sequence[Example],
    advantages: Sequence[float],
    denominator: float,
    *,
    row_multiple: int = 16,
) -> Params:
    """The descent gradient -(1/denominator) grad sum_i A_i S_i as one batch, without terms.

    Args:
      examples: trajectories that have a reward, in any order.
      advantages: A_i of each.
      denominator: action tokens, or trajectories, that arrived.
      row_multiple: rows are rounded up to it, so that batches of many sizes share a program; 1
        where time is measured.
    """
    rows = [
        _Row(example=example, advantage=advantage, weight=1.0)
        for example, advantage in zip(examples, advantages, strict=True)
    ]
    return _gradient(settings, params, rows, [denominator], row_multiple=row_multiple)


def _rewards(group: Sequence[Attempt]) -> np.ndarray:
    return np.asarray([a.reward for a in group if a.reward is not None], np.float64)


def _advantages(objective: Objective, kept: Sequence[Sequence[Attempt]]) -> dict[int, list[float]]:
    """Of every attempt of every kept group, 0 without a reward; by the group's identity."""
    is_batch = objective.streams is Streams.BATCH
    found: dict[int, list[float]] = {}
    for cohort in [kept] if is_batch else [[group] for group in kept]:
        attempts = [(group, a) for group in cohort for a in group]
        shaped = [
            objective.shape_reward(a.reward, a.tokens.num_action_tokens if a.tokens else 0)
            for _, a in attempts
            if a.reward is not None
        ]
        rewards = np.asarray(shaped, np.float64)
        values = iter(objective.advantages(rewards).tolist() if shaped else [])
        for group, attempt in attempts:
            value = 0.0 if attempt.reward is None else next(values)
            found.setdefault(id(group), []).append(value)
    return found


def _counts(groups: Sequence[Sequence[Attempt]], *, is_rewarded: bool) -> Counts:
    """Trajectories that have a reward, or whose content is final."""
    chosen = [
        [a.tokens for a in group if a.tokens and (not is_rewarded or a.reward is not None)]
        for group in groups
    ]
    return Counts(
        num_tokens=sum(tokens.num_action_tokens for group in chosen for tokens in group),
        num_trajectories=sum(len(group) for group in chosen),
        num_groups=sum(bool(group) for group in chosen),
    )


def _gradient(
    settings: ScoreSettings,
    params: Params,
    rows: Sequence[_Row],
    denominators: Sequence[float],
    *,
    row_multiple: int,
) -> Params:
    longest = max(row.example.num_positions for row in rows)
    items = [LaneItem(examples=(r.example,), advantages=(r.advantage,)) for r in rows]
    dtype = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)
    lanes = pad_lanes(
        [items],
        _round_up(len(rows), row_multiple),
        _round_up(longest, 32),
        dtype,
        objective=settings.objective,
    )
    lanes = jax.tree.map(lambda x: x[0], lanes.replace(num_lanes=None))
    weights = np.zeros((lanes.tokens.shape[0], settings.objective.num_sums), dtype)
    weights[: len(rows), 1:] = 1.0
    for at, row in enumerate(rows):
        weights[at, 0] = row.weight * (row.advantage if settings.objective.is_linear else 1.0)
    counts = np.asarray([count or 1.0 for count in denominators], dtype)
    return _batch_gradient(settings, params, lanes, weights, counts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@functools.partial(jax.jit, static_argnums=0)
def _batch_gradient(
    settings: ScoreSettings,
    params: Params,
    lanes: Lanes,
    weights: np.ndarray,
    denominators: np.ndarray,
) -> Params:
    def loss(params: Params) -> jax.Array:
        sums, _ = jax.vmap(functools.partial(score, settings, params, None))(lanes)
        return -jnp.sum(weights * sums / denominators)

    return jax.grad(loss)(params)
