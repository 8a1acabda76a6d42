"""Group moments of rewards and the scalar coefficients that follow from them.

Everything here runs on the host in float64, in index order, so that it does not depend on arrival
order. Failed attempts are absent: they have no reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMoments:
    """What closes a group: A_i = (r_i - mean) / scale.

    Attributes:
      mean: of the group's rewards.
      scale: population standard deviation + EPS for "grpo" (Shao et al. 2024, arXiv 2402.03300), 1
        for "dr_grpo" (Liu et al. 2025, arXiv 2503.20783).
      is_zero_variance: min == max, decided on the rewards themselves: every advantage is exactly 0.
        Arithmetic would leave a residual.
    """

    mean: float
    scale: float
    is_zero_variance: bool

    def advantage(self, reward: float) -> float:
        return 0.0 if self.is_zero_variance else (reward - self.mean) / self.scale

    def closing_coefficients(self, center: float) -> tuple[float, float]:
        """The weights of G1 = sum (r_i - center) g_i and G2 = sum g_i that give sum A_i g_i."""
        if self.is_zero_variance:
            return 0.0, 0.0
        return 1.0 / self.scale, -(self.mean - center) / self.scale


def group_moments(rewards: Sequence[float], kind: str) -> GroupMoments:
    """Moments of the rewards that a group got, in index order; a group without any is of zero
    variance.

    Args:
      rewards: finite; attempts that failed are left out.
      kind: "grpo" or "dr_grpo".
    """
    if kind not in ("grpo", "dr_grpo"):
        raise ValueError(f"unknown advantage {kind!r}: expected 'grpo' or 'dr_grpo'")
    values = np.asarray(rewards, np.float64)
    if values.size == 0:
        return GroupMoments(mean=0.0, scale=1.0, is_zero_variance=True)
    scale = float(values.std()) + EPS if kind == "grpo" else 1.0
    return GroupMoments(
        mean=float(values.mean()),
        scale=scale,
        is_zero_variance=bool(values.min() == values.max()),
    )
