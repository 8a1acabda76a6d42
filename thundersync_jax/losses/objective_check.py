"""Whether an objective is what it declares: checked with numbers when a run starts.

An objective that streams by trajectory or batch is only right if its advantages are affine in the
reward and its score does not read them; nothing in its gradient would show it. `make_objective`
calls `check_objective`; `advantages_of` is asked again whenever a group closes.
"""

from __future__ import annotations

import contextlib
import enum
import numbers
import reprlib
from collections.abc import Iterator

import numpy as np

from thundersync_jax.errors import UserError
from thundersync_jax.factory import describe_error
from thundersync_jax.losses.advantages import AffineAdvantage, affine_advantage
from thundersync_jax.losses.normalizers import Kind, Normalizer
from thundersync_jax.losses.objective import (
    Objective,
    ObjectiveError,
    Scope,
    Streams,
    Term,
    every_group,
    unscaled_weights,
)
from thundersync_jax.losses.score_check import NEVER_BY_TURNS, check_score, check_separable

_SIZES = range(1, 17)  # of a group, or of a step
_NUM_WEIGHED = 18  # tokens whose weights must not change as they grow in number
_MAX_LENGTH, _MAX_COEFFICIENT = 2**31 - 1, 1e30
_RELATIVE = 1e-9  # of the greatest advantage: float64 leaves 1e-15 of rewards near 1
_passed = set[Objective]()


def check_objective(objective: Objective) -> None:
    """Raises ObjectiveError, whatever the objective's own functions raise or return.

    What passed once is not tried again. Objectives are equal where their functions are.
    """
    with contextlib.suppress(TypeError):  # a user's function need not be hashable
        if objective in _passed:
            return
    _try(objective)
    with contextlib.suppress(TypeError):
        _passed.add(objective)


def _try(objective: Objective) -> None:
    try:
        _check_types(objective)
        _check_declaration(objective)
        for size in _SIZES:
            for seed in range(4):
                rng = np.random.default_rng((size, seed))
                _check_rewards(
                    objective,
                    rng.normal(1.0, 2.0, size) if seed else rng.integers(0, 2, size) * 1.0,
                )
        check_score(objective)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's code, whatever it raises
        raise ObjectiveError(
            f"objective {objective.name!r}: trying it raised {describe_error(error)}. "
            "docs/objectives.md says what its functions are given and what they return"
        ) from error


def _check_types(objective: Objective) -> None:
    for field, value, kind in _typed_fields(objective):
        if not isinstance(value, kind):
            members = f": one of {[str(k) for k in kind]}" if issubclass(kind, enum.Enum) else ""
            raise ObjectiveError(
                f"objective {objective.name!r}: {field} = {value!r}, expected a value of type "
                f"{kind.__name__}{members}"
            )


def _typed_fields(objective: Objective) -> Iterator[tuple[str, object, type]]:
    """Dataclasses check none."""
    yield "name", objective.name, str
    yield "streams", objective.streams, Streams
    yield "normalizer", objective.normalizer, Normalizer
    yield "normalizer.kind", objective.normalizer.kind, Kind
    yield "normalizer.length", objective.normalizer.length, int
    yield "terms", objective.terms, tuple
    for term in objective.terms:
        yield "terms", term, Term
        yield f"{term.name}: scope", term.scope, Scope
        yield f"{term.name}: normalizer", term.normalizer, Normalizer
        yield f"{term.name}: normalizer.length", term.normalizer.length, int
        yield f"{term.name}: coefficient", term.coefficient, numbers.Real


def _check_rewards(objective: Objective, rewards: np.ndarray) -> None:
    """What is made of a group's rewards, as graded."""
    name = f"objective {objective.name!r}"
    given = rewards.tolist()
    found, _ = advantages_of(objective, rewards)
    again, _ = advantages_of(objective, rewards)
    _check_same(f"{name}: advantages({given})", found.tolist(), again.tolist())
    scales = [scale_of(objective, found) for _ in range(2)]
    _check_same(f"{name}: advantage_scale({found.tolist()})", *scales)
    for num_tokens in (0, 1, 1000):
        shaped, again_shaped = (
            objective.shape_reward(float(rewards[0]), num_tokens) for _ in range(2)
        )
        if not isinstance(shaped, float | int) or not np.isfinite(shaped):
            raise ObjectiveError(
                f"{name}: shape_reward({rewards[0]}, {num_tokens}) is {shaped!r}: expected a "
                "finite number"
            )
        _check_same(f"{name}: shape_reward({rewards[0]}, {num_tokens})", shaped, again_shaped)
    keeps, again_keeps = (objective.keeps_group(rewards.copy()) for _ in range(2))
    if not isinstance(keeps, bool | np.bool_):
        raise ObjectiveError(f"{name}: keeps_group({given}) is {keeps!r}: expected True or False")
    _check_same(f"{name}: keeps_group({given})", keeps, again_keeps)


def _check_same(call: str, found: object, again: object) -> None:
    if found != again:
        raise ObjectiveError(
            f"{call} is {found} and then {again}: expected the same whenever it is asked for"
        )


def check_turns(objective: Objective) -> None:
    """Raises ObjectiveError unless a turn's gradient is final before the next turn is known."""
    name = f"objective {objective.name!r}"
    if not objective.is_linear:
        raise ObjectiveError(
            f"{name}: streams = 'group' needs every reward of a group before any of its gradients, "
            f"so no turn can run while its trajectory grows. {NEVER_BY_TURNS}"
        )
    if objective.term_sums:
        terms = ", ".join(t.name for sums in objective.term_sums for t in sums)
        raise ObjectiveError(
            f"{name}: its reward-free terms ({terms}) count once the content is final, also of "
            "attempts that fail, and the held gradient of a turn has the score alone. "
            f"{NEVER_BY_TURNS}"
        )
    for seed in range(4):
        mask = np.random.default_rng(seed).uniform(size=_NUM_WEIGHED) < 0.6
        whole = unscaled_weights(objective, mask)
        for cut in range(1, mask.size):
            check_final_weights(objective, unscaled_weights(objective, mask[:cut]), whole)
    check_separable(objective)


def check_final_weights(objective: Objective, given: np.ndarray, whole: np.ndarray) -> None:
    """Raises ObjectiveError if later turns changed the weights that earlier tokens were given."""
    cut = given.size
    changed = np.flatnonzero(given != whole[:cut])
    if changed.size:
        at = int(changed[0])
        raise ObjectiveError(
            f"objective {objective.name!r}: later turns change the weights of earlier tokens, as "
            f"discounted future credit does: that of token {at} is {given[at]} when {cut} are "
            f"known, and {whole[at]} with {whole.size - cut} more. {NEVER_BY_TURNS}"
        )


def _check_declaration(objective: Objective) -> None:
    name = f"objective {objective.name!r}"
    lengths = [n.length for n in (objective.normalizer, *(t.normalizer for t in objective.terms))]
    if wrong := [length for length in lengths if not 1 <= length <= _MAX_LENGTH]:
        raise ObjectiveError(
            f"{name}: a normalizer has length = {reprlib.repr(wrong[0])}: expected a number of "
            f"tokens from 1 to {_MAX_LENGTH}, by which its sum is divided"
        )
    for term in objective.terms:
        if not abs(term.coefficient) <= _MAX_COEFFICIENT:
            raise ObjectiveError(
                f"{name}: {term.name}: coefficient = {term.coefficient}: expected a finite number "
                f"of at most {_MAX_COEFFICIENT:g} in size, whose products float32 holds"
            )
    if objective.group_terms and objective.is_linear:
        raise ObjectiveError(
            f"{name}: terms of scope GROUP ({', '.join(t.name for t in objective.group_terms)}) "
            f"count with their group, which streams = {objective.streams.value!r} does not wait "
            "for: give them scope CONTENT, or declare Streams.GROUP"
        )
    is_scaled = objective.advantage_scale is not None
    if is_scaled and objective.streams is Streams.BATCH:
        raise ObjectiveError(
            f"{name}: streams = 'batch' takes advantages of all rewards of the step, so "
            "advantage_scale has nothing to add: leave it None"
        )
    if is_scaled and objective.group_terms:
        raise ObjectiveError(
            f"{name}: terms of scope GROUP ({', '.join(t.name for t in objective.group_terms)}) "
            "share the score's sum, which is divided by advantage_scale: give them scope CONTENT"
        )
    for terms in objective.term_sums:
        if terms[0].normalizer.kind is Kind.GROUP_TOKEN_MEAN:
            raise ObjectiveError(
                f"{name}: {', '.join(t.name for t in terms)} of scope CONTENT cannot be normalised "
                "by 'group_token_mean': a group's tokens are not known when its trajectories run. "
                "Use 'token_mean' (option terms_normalizer)"
            )
    is_batch = objective.streams is Streams.BATCH
    if is_batch and objective.normalizer.kind is Kind.GROUP_TOKEN_MEAN:
        raise ObjectiveError(
            f"{name}: streams = 'batch' has one pair for all groups, so 'group_token_mean' has no "
            "group to divide by: use 'token_mean'"
        )
    if is_batch and objective.keeps_group is not every_group:
        raise ObjectiveError(
            f"{name}: streams = 'batch' folds a trajectory before its group is complete, so no "
            "group can be dropped: keep every group (drop_equal_groups = False)"
        )


def advantages_of(
    objective: Objective, rewards: np.ndarray
) -> tuple[np.ndarray, AffineAdvantage | None]:
    """The advantages of rewards in index order, and the line they lie on where they stream.

    Args:
      rewards: float64 [n]; none have no advantage.

    Raises:
      ObjectiveError: not one finite number each, or not affine although declared so.
    """
    if not rewards.size:
        return np.zeros(0), affine_advantage(rewards, rewards)
    name = f"objective {objective.name!r}"
    values = np.asarray(objective.advantages(rewards.copy()))
    found = values.astype(np.float64) if values.dtype.kind in "fiu" else np.full(0, np.nan)
    if found.shape != rewards.shape or not np.all(np.isfinite(found)):
        raise ObjectiveError(
            f"{name}: the rewards {rewards.tolist()} have the advantages {values.tolist()}: "
            "expected one finite number each"
        )
    if not objective.is_linear:
        return found, None
    line = affine_advantage(rewards, found)
    error = np.abs(line(rewards) - found).max()
    # Rounding of rewards that are far from zero in relation to their spread.
    rounding = 64 * np.finfo(np.float64).eps * np.abs(rewards).max() * abs(line.slope)
    if error > _RELATIVE * np.abs(found).max() + rounding:
        if values.dtype.kind == "f" and values.dtype != np.float64:
            raise ObjectiveError(
                f"{name}: its advantages are {values.dtype}, whose rounding hides whether they are "
                "affine in the reward: compute them in float64, as the rewards come"
            )
        raise ObjectiveError(
            f"{name} declares streams = {objective.streams.value!r}, but its advantages are not "
            f"affine in the reward: {rewards.tolist()} have {found.tolist()}, {error:.3g} off the "
            "line through the least and the greatest. Declare Streams.GROUP, and multiply the "
            "score by Tokens.advantages (losses.token_scores.WithAdvantage): its members then run "
            "when their group's rewards are known"
        )
    return found, line


def scale_of(objective: Objective, advantages: np.ndarray) -> float:
    """What a step's advantages are divided by. Raises ObjectiveError.

    Args:
      advantages: float64 [n] of the trajectories with a reward, in groups that the objective keeps.
    """
    if objective.advantage_scale is None:
        return 1.0
    scale = float(objective.advantage_scale(advantages.copy()))
    if not 0 < scale < np.inf:
        raise ObjectiveError(
            f"objective {objective.name!r}: advantage_scale of {advantages.tolist()} is {scale}: "
            "expected a finite number above 0"
        )
    return scale
