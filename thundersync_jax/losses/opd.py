"""On-policy distillation, as an objective of its own and as a term beside one of rewards.

Ascends sum_t w_t sg(min(p_t / b_t, C)) log p_t sg(log q_t - log b_t), with p the learner, b the
sampler, q the teacher and w_t = 1 on action tokens: on-policy, the descent of KL(p | q) by its
one-sample estimate at every token (Agarwal et al. 2023, arXiv 2306.13649). The second factor is
final as soon as the teacher has scored a turn; nothing waits for a reward.

Alone, by turns: `distillation`, with `distillation_weights` for weights of the tokens. Beside
rewards: `distillation_term`, whose q is the reference policy; on-policy its gradient is that of
- KL by the estimator k2 of `regularizers`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from thundersync_jax.losses import token_scores
from thundersync_jax.losses.advantages import as_graded
from thundersync_jax.losses.normalizers import Normalizer
from thundersync_jax.losses.objective import Objective, Scope, Streams, Term, Tokens


def distillation(*, ratio_cap: float) -> Objective:
    """sg(min(p_t / b_t, C)) log p_t, whose token weights are `distillation_weights`: no advantage.

    Args:
      ratio_cap: C; 0 leaves the ratio out.
    """
    return Objective(
        name="opd",
        streams=Streams.TRAJECTORY,
        score=_score(ratio_cap),
        advantages=as_graded,
        weighs_sampler=ratio_cap > 0,
    )


def distillation_term(
    coefficient: float,
    *,
    ratio_cap: float,
    normalizer: Normalizer,
    scope: Scope = Scope.CONTENT,
) -> Term:
    """+ coefficient times what `distillation` ascends, towards the reference policy."""
    return Term(
        name="distillation",
        value=TowardsReference(score=_score(ratio_cap)),
        coefficient=coefficient,
        normalizer=normalizer,
        scope=scope,
        needs_reference=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowardsReference:
    """score_t (log q_t - log b_t); q and b have no gradient."""

    score: Callable[[Tokens], jax.Array]

    def __call__(self, tokens: Tokens) -> jax.Array:
        assert tokens.reference_logprobs is not None
        return self.score(tokens) * (tokens.reference_logprobs - tokens.behavior_logprobs)


def _score(ratio_cap: float) -> Callable[[Tokens], jax.Array]:
    on_policy = token_scores.log_probability
    return token_scores.TruncatedRatio(cap=ratio_cap) if ratio_cap else on_policy


def distillation_weights(
    action_mask: np.ndarray, teacher_logprobs: np.ndarray, behavior_logprobs: np.ndarray
) -> np.ndarray:
    """w_t (log q_t - log b_t) in float64 [T], exactly 0 on observations.

    Args:
      action_mask: bool [T].
      teacher_logprobs, behavior_logprobs: [T], of the same tokens; observations' may be anything.
    """
    gain = np.asarray(teacher_logprobs, np.float64) - np.asarray(behavior_logprobs, np.float64)
    return np.where(action_mask, gain, 0.0)
