"""`Objective`: everything that the learner knows about what it maximises, as one declaration.

    J = 1/(D s) sum_i A_i S_i  +  sum_m 1/D_m sum_i coefficient_m K_mi
    S_i = sum_t w_t score_t      K_mi = sum_t w_mt value_mt      over action tokens t

A_i and s, a scale of the step that is 1 for most, come from the rewards, on the host; S_i and K_mi
come from the tokens, on the device. What streams follows from what each needs:

    TRAJECTORY   A is affine in the reward given its group's, and the score does not read it: grad S
                 is folded when the reward is known, and two scalars close the group
    GROUP        the score reads A (a clip picks its branch by its sign), or A is not affine:
                 members run when their group's rewards are known
    BATCH        as TRAJECTORY, with A affine given all rewards of the step: one pair for all groups

The terms K_m of scope CONTENT do not depend on verdicts: they are folded when their trajectory
runs, whatever its verdict, and divided by counts of their own. Those of scope GROUP are part of
the score: they count with their trajectory's reward, and not where a group has no advantage.

Pure: no state, no devices. `objectives.py` has the built-in ones; a user's own is a function that
returns one. The learner, the schedule and the reference read the declaration and nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from thundersync_jax.errors import UserError
from thundersync_jax.losses.normalizers import Normalizer

TOKEN_MEAN = Normalizer()


class ObjectiveError(UserError, ValueError):
    """An objective that is not what it declares: what was found, and what to declare."""


class Streams(enum.Enum):
    TRAJECTORY = "trajectory"
    GROUP = "group"
    BATCH = "batch"


class Scope(enum.Enum):
    """Which trajectories a reward-free term counts."""

    CONTENT = "content"  # whose content is final, whatever the verdict
    GROUP = "group"  # that have a reward, in groups that have an advantage


class Tokens(struct.PyTreeNode):
    """What scores and terms are functions of: one lane's targets, [T] each.

    Where `action_mask` is false every value is 0. A lane may hold several trajectories.

    Attributes:
      logprobs: of the learner, in at least float32; the only input with a gradient, beside entropy.
      behavior_logprobs: of the sampler.
      action_mask: bool.
      segment_ids: int32; 1, 2, ... for the trajectories of the lane, 0 for padding.
      advantages: A of the token's trajectory; None unless the objective streams by GROUP.
      reference_logprobs: of the reference policy; None unless a term needs them.
      entropy: of the learner's distribution at the token; None unless a term needs it.
    """

    logprobs: jax.Array
    behavior_logprobs: jax.Array
    action_mask: jax.Array
    segment_ids: jax.Array
    advantages: jax.Array | None = None
    reference_logprobs: jax.Array | None = None
    entropy: jax.Array | None = None

    def trajectory_mean(self, values: jax.Array) -> jax.Array:
        """[T]: at every token the mean of `values` over its trajectory's action tokens."""
        ids, count = self.segment_ids, self.segment_ids.shape[0] + 1
        chosen = jnp.where(self.action_mask, values, 0)
        sums = jax.ops.segment_sum(chosen, ids, count)
        lengths = jax.ops.segment_sum(self.action_mask.astype(values.dtype), ids, count)
        return (sums / jnp.maximum(lengths, 1))[ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A reward-free term.

    Attributes:
      value: tokens -> [T], finite where its inputs are 0.
      coefficient: of its normalised sum in what is maximised: negative for a penalty.
      normalizer: its own; of scope GROUP it has that of the objective.
    """

    name: str
    value: Callable[[Tokens], jax.Array]
    coefficient: float
    normalizer: Normalizer = TOKEN_MEAN
    scope: Scope = Scope.CONTENT
    needs_reference: bool = False
    needs_entropy: bool = False


def every_token(action_mask: np.ndarray) -> np.ndarray:
    """Weight 1 on every action token."""
    return action_mask.astype(np.float32)


def no_shaping(reward: float, num_tokens: int) -> float:
    return reward


def every_group(rewards: np.ndarray) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """See the module's docstring.

    Attributes:
      score: tokens -> [T], finite where its inputs are 0.
      advantages: float64 rewards [n] of a group (BATCH: of the step) in index order -> their A [n].
      token_weights: action mask [T] -> weights [T] of the score, at least 0, and 0 off the mask.
      shape_reward: (reward as graded, action tokens of the trajectory) -> the reward that counts.
      keeps_group: rewards as graded -> whether the group counts: in the gradient and in D.
      advantage_scale: A of the step's rewarded trajectories, group after group -> what all of them
        are divided by, above 0; None: 1. It is needed at the update alone, so that groups stream
        and close before it is known; the score must be positively homogeneous in A.
      weighs_sampler: the score has the ratio of learner to sampler: they may differ.
    """

    name: str
    streams: Streams
    score: Callable[[Tokens], jax.Array]
    advantages: Callable[[np.ndarray], np.ndarray]
    normalizer: Normalizer = TOKEN_MEAN
    terms: tuple[Term, ...] = ()
    token_weights: Callable[[np.ndarray], np.ndarray] = every_token
    shape_reward: Callable[[float, int], float] = no_shaping
    keeps_group: Callable[[np.ndarray], bool] = every_group
    advantage_scale: Callable[[np.ndarray], float] | None = None
    weighs_sampler: bool = False

    @property
    def is_linear(self) -> bool:
        """One score gradient serves every reward."""
        return self.streams is not Streams.GROUP

    @property
    def term_sums(self) -> tuple[tuple[Term, ...], ...]:
        """The terms of scope CONTENT by normalizer: each sum has a denominator of its own."""
        content = [term for term in self.terms if term.scope is Scope.CONTENT]
        found = dict.fromkeys(term.normalizer for term in content)
        return tuple(
            tuple(t for t in content if t.normalizer == normalizer) for normalizer in found
        )

    @property
    def group_terms(self) -> tuple[Term, ...]:
        return tuple(t for t in self.terms if t.scope is Scope.GROUP)

    @property
    def num_sums(self) -> int:
        """Sums with a denominator of their own: that of the score first."""
        return 1 + len(self.term_sums)

    @property
    def needs_reference(self) -> bool:
        return any(t.needs_reference for t in self.terms)

    @property
    def needs_entropy(self) -> bool:
        return any(t.needs_entropy for t in self.terms)


def lane_sums(
    objective: Objective, tokens: Tokens, weights: jax.Array, term_weights: jax.Array | None
) -> jax.Array:
    """S and every K of one lane: [num_sums], whose gradients are what is accumulated.

    Args:
      tokens: as computed; masked positions may hold any value, a non-finite one included.
      weights: [T] of the score; with a linear objective they may hold advantages.
      term_weights: [num_sums - 1, T]; None without terms.
    """
    tokens = _masked(tokens)
    score = objective.score(tokens)
    for term in objective.group_terms:
        score = score + term.coefficient * term.value(tokens)
    sums = [jnp.sum(weights * score)]
    for number, terms in enumerate(objective.term_sums):
        assert term_weights is not None
        values = sum(term.coefficient * term.value(tokens) for term in terms)
        sums.append(jnp.sum(term_weights[number] * values))
    return jnp.stack(sums)


def _masked(tokens: Tokens) -> Tokens:
    """Zeros off the mask, selected before anything is multiplied."""

    def select(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else jnp.where(tokens.action_mask, values, 0)

    logprobs, behavior = select(tokens.logprobs), select(tokens.behavior_logprobs)
    return tokens.replace(
        logprobs=logprobs,
        behavior_logprobs=behavior,
        advantages=select(tokens.advantages),
        reference_logprobs=select(tokens.reference_logprobs),
        entropy=select(tokens.entropy),
    )


def token_weights(objective: Objective, action_mask: np.ndarray) -> np.ndarray:
    """Weights of the score: float32 [T]. Raises ObjectiveError for what cannot be weights."""
    return unscaled_weights(objective, action_mask) * length_scale(objective, action_mask)


def length_scale(objective: Objective, action_mask: np.ndarray) -> np.float32:
    """The normaliser's factor of a whole trajectory's token weights."""
    return np.float32(objective.normalizer.token_scale(int(action_mask.sum())))


def unscaled_weights(objective: Objective, action_mask: np.ndarray) -> np.ndarray:
    """`token_weights` without what depends on the trajectory's length."""
    name = f"objective {objective.name!r}"
    expected = "finite, at least 0, and 0 off the action mask"
    weights = np.asarray(objective.token_weights(action_mask.copy()), np.float32)
    if weights.shape != action_mask.shape:
        raise ObjectiveError(
            f"{name}: token weights of {action_mask.shape[0]} tokens have shape {weights.shape}: "
            f"expected one a token, {expected}"
        )
    is_bad = ~np.isfinite(weights) | (weights < 0) | (~action_mask & (weights != 0))
    if np.any(is_bad):
        at = int(np.argmax(is_bad))
        kind = "an action" if action_mask[at] else "no action"
        raise ObjectiveError(
            f"{name}: token weights must be {expected}: that of token {at} of {weights.size}, "
            f"{kind}, is {weights[at]}"
        )
    return weights


def term_weights(objective: Objective, action_mask: np.ndarray) -> np.ndarray:
    """Weights of the terms: float32 [num_sums - 1, T]."""
    length = int(action_mask.sum())
    scales = [terms[0].normalizer.token_scale(length) for terms in objective.term_sums]
    return np.asarray(scales, np.float32)[:, None] * action_mask.astype(np.float32)
