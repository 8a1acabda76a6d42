"""On-policy distillation: the declaration and the token weights that make its gradient a score's.

Ascends sum_t w_t sg(min(p_t / b_t, C)) log p_t sg(log q_t - log b_t), with p the learner, b the
sampler, q the teacher and w_t = 1 on action tokens: on-policy, the descent of KL(p | q) by its
one-sample estimate at every token (Agarwal et al. 2023, arXiv 2306.13649). The second factor is
final as soon as the teacher has scored a turn; nothing waits for a reward.
"""

from __future__ import annotations

import numpy as np

from thundersync_jax.losses import token_scores
from thundersync_jax.losses.advantages import as_graded
from thundersync_jax.losses.objective import Objective, Streams


def distillation(*, ratio_cap: float) -> Objective:
    """sg(min(p_t / b_t, C)) log p_t, whose token weights are `distillation_weights`: no advantage.

    Args:
      ratio_cap: C; 0 leaves the ratio out.
    """
    on_policy = token_scores.log_probability
    return Objective(
        name="opd",
        streams=Streams.TRAJECTORY,
        score=token_scores.TruncatedRatio(cap=ratio_cap) if ratio_cap else on_policy,
        advantages=as_graded,
        weighs_sampler=ratio_cap > 0,
    )


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
