"""Whether an objective's score and terms are functions of tokens as the learner computes them.

They are compiled for lanes of any length that hold any number of trajectories and padding, so the
slopes of a trajectory must be those that it has alone. `objective_check.py` calls the checks when a
run starts; they raise ObjectiveError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.factory import describe_error
from thundersync_jax.losses.objective import (
    Objective,
    ObjectiveError,
    Tokens,
    lane_sums,
    term_weights,
    token_weights,
)

NEVER_BY_TURNS = "Set learner.stream_turns = 'never'"

_LENGTHS = (6, 64)  # of a trajectory
_CUTS = (2, 3)  # behind the first turn, and behind what answers it
_SHARED = (6, 5)  # of trajectories that share a lane
_PADDING = 3

# Tokens, weights of the score [T], weights of the terms [num_sums - 1, T].
_Lane = tuple[Tokens, jax.Array, jax.Array]


def check_score(objective: Objective) -> None:
    """Shapes and slopes on some tokens; the advantages are withheld where it streams."""
    for length in _LENGTHS:
        _check_values(objective, _lane(objective, [length])[0])
    if objective.advantage_scale is not None and not objective.is_linear:
        _check_doubles(objective)
    _check_alone(objective)
    _check_learns(objective)


def check_separable(objective: Objective) -> None:
    """The score of a token must not read those of other turns."""
    length = _LENGTHS[0]
    lane = _lane(objective, [length])

    def slopes(begin: int, end: int) -> np.ndarray:
        return _slopes(objective, jax.tree.map(lambda x: x[..., begin:end], lane))[0]

    whole = slopes(0, length)
    for cut in _CUTS:
        parts = np.concatenate([slopes(0, cut), slopes(cut, length)])
        if not _are_close(parts, whole):
            raise ObjectiveError(
                f"objective {objective.name!r}: a token's score reads tokens of other turns: cut "
                f"after {cut} of {length} tokens the slopes of the score are {parts.tolist()}, and "
                f"{whole.tolist()} together. {NEVER_BY_TURNS}"
            )


def _check_values(objective: Objective, tokens: Tokens) -> None:
    name, length = f"objective {objective.name!r}", tokens.logprobs.size
    parts = {"score": objective.score, **{t.name: t.value for t in objective.terms}}
    for part, function in parts.items():
        try:
            values, again = jnp.asarray(function(tokens)), jnp.asarray(function(tokens))
        except (Exception, SystemExit) as error:  # a user's code, whatever it raises
            raise ObjectiveError(
                f"{name}, which declares streams = {objective.streams.value!r}: {part} raised "
                f"{describe_error(error)}. Tokens.advantages is there with Streams.GROUP alone, "
                "and reference_logprobs and entropy where a term says that it needs them"
            ) from error
        if values.shape != (length,) or not jnp.issubdtype(values.dtype, jnp.floating):
            raise ObjectiveError(
                f"{name}: {part} of {length} tokens is {values.dtype} of shape {values.shape}, "
                "expected one real number a token"
            )
        if not np.array_equal(values, again, equal_nan=True):
            raise ObjectiveError(
                f"{name}: {part} is not the same when it is asked for again: it is compiled once, "
                "so it must depend on its tokens alone"
            )


def _check_doubles(objective: Objective) -> None:
    tokens = _lane(objective, [_LENGTHS[0]])[0]
    assert tokens.advantages is not None
    double = objective.score(tokens.replace(advantages=2 * tokens.advantages))
    if not np.allclose(double, 2 * objective.score(tokens)):
        raise ObjectiveError(
            f"objective {objective.name!r}: score does not double with its advantages, so dividing "
            "the sum is not dividing them by advantage_scale: leave it None"
        )


def _check_alone(objective: Objective) -> None:
    """What shares a trajectory's lane, others or padding, must not change its slopes."""
    shared = _slopes(objective, _lane(objective, _SHARED, _PADDING))
    begin = 0
    for number, length in enumerate(_SHARED):
        found = shared[:, begin : begin + length]
        alone = _slopes(objective, _lane(objective, [length], first=number))
        if not _are_close(found, alone):
            raise ObjectiveError(
                f"objective {objective.name!r}: the slopes of a trajectory of {length} tokens are "
                f"{alone.tolist()} (of the score, then of terms), and {found.tolist()} where it "
                f"shares a lane with another and {_PADDING} positions of padding. A score must "
                "read its own trajectory alone, as Tokens.trajectory_mean does: Tokens.segment_ids "
                "are 1, 2, ... for those of a lane, and 0 for padding"
            )
        begin += length


def _check_learns(objective: Objective) -> None:
    """Something must have a slope, and with the rewards of a group another one."""
    tokens, weights, others = lane = _lane(objective, [_LENGTHS[0]])
    slopes = _slopes(objective, lane)
    if not slopes.any():
        raise ObjectiveError(
            f"objective {objective.name!r}: no sum of it has a slope in any log-probability or "
            f"entropy of {_LENGTHS[0]} tokens, so nothing would be learned: expected a score of "
            "Tokens.logprobs, without stop_gradient around all of it, and token weights above 0"
        )
    if objective.is_linear:
        return
    assert tokens.advantages is not None
    against = tokens.replace(advantages=-tokens.advantages)
    opposite = _slopes(objective, (against, weights, others))
    if _are_close(opposite, slopes):
        raise ObjectiveError(
            f"objective {objective.name!r} declares streams = 'group', and its score has the same "
            "slopes with advantages of the opposite sign: rewards would be ignored. Multiply it by "
            "Tokens.advantages, as losses.token_scores.WithAdvantage does"
        )


def _lane(
    objective: Objective, lengths: Sequence[int], padding: int = 0, *, first: int = 0
) -> _Lane:
    """Trajectories number `first` and so on, always with the same values, then padding."""
    masks = [np.arange(length) % 3 != 2 for length in lengths]  # turns of two tokens
    rngs = [np.random.default_rng(first + i) for i in range(len(masks))]

    def row(parts: Sequence[np.ndarray]) -> Any:
        end = np.zeros((*parts[0].shape[:-1], padding), parts[0].dtype)
        return np.concatenate([*parts, end], axis=-1)

    def noise(low: float, high: float) -> Any:
        parts = [r.uniform(low, high, n) for r, n in zip(rngs, lengths, strict=True)]
        return row([part.astype(np.float32) for part in parts])

    logprobs = noise(-3, -0.1)
    advantages = [np.full(m.size, 0.5 ** (first + i), np.float32) for i, m in enumerate(masks)]
    tokens = Tokens(
        logprobs=logprobs,
        behavior_logprobs=logprobs + noise(-0.3, 0.3),
        action_mask=row(masks),
        segment_ids=row([np.full(m.size, i, np.int32) for i, m in enumerate(masks, start=1)]),
        advantages=None if objective.is_linear else row(advantages),
        reference_logprobs=logprobs + noise(-0.3, 0.3) if objective.needs_reference else None,
        entropy=noise(0.5, 1.5) if objective.needs_entropy else None,
    )
    weights = row([token_weights(objective, mask) for mask in masks])
    others = row([term_weights(objective, mask) for mask in masks])
    return jax.device_put((tokens, weights, others))


def _slopes(objective: Objective, lane: _Lane) -> np.ndarray:
    """Of every sum, by log-probability and then by entropy: [rows, T]. Raises unless finite."""
    tokens, weights, others = lane

    def sums(logprobs: jax.Array, entropy: jax.Array | None) -> jax.Array:
        moved = tokens.replace(logprobs=logprobs, entropy=entropy)
        return lane_sums(objective, moved, weights, others)

    slopes = jax.jit(jax.jacobian(sums, argnums=(0, 1)))(tokens.logprobs, tokens.entropy)
    found = np.concatenate([np.asarray(x) for x in jax.tree.leaves(slopes)])
    if not np.all(np.isfinite(found)):
        raise ObjectiveError(
            f"objective {objective.name!r}: the gradient of its sums is not finite: "
            f"{found.tolist()}. Scores and terms must be finite where their inputs are 0, as they "
            "are off the action mask"
        )
    return found


def _are_close(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(found, expected, rtol=1e-5, atol=1e-7)
