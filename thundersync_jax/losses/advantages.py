"""From rewards to advantages, and the two scalars with which streamed sums close.

Everything here runs on the host in float64, over rewards in index order, so that it does not depend
on arrival order. Failed attempts are absent: they have no reward. Equal rewards are an explicit
zero where a mean is subtracted: arithmetic would leave a residual.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

EPS = 1e-6


def standardized(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + EPS), population std: GRPO (arXiv 2402.03300), of a whole batch
    REINFORCE++ (arXiv 2501.03262).
    """
    if is_constant(rewards):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPS)


def centered(rewards: np.ndarray) -> np.ndarray:
    """r - mean: Dr. GRPO (arXiv 2503.20783)."""
    return np.zeros_like(rewards) if is_constant(rewards) else rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """r minus the mean of the others, which is n / (n - 1) (r - mean): RLOO (arXiv 2402.14740).

    A lone reward has no others, and no advantage.
    """
    count = rewards.size
    return centered(rewards) * (count / (count - 1)) if count > 1 else np.zeros_like(rewards)


def spread(advantages: np.ndarray) -> float:
    """std + EPS, population: REINFORCE++-baseline divides a step's centered rewards by it."""
    return float(advantages.std()) + EPS if advantages.size else 1.0


def as_graded(rewards: np.ndarray) -> np.ndarray:
    """The reward itself, without a baseline: REINFORCE (Williams 1992)."""
    return rewards


def is_constant(rewards: np.ndarray) -> bool:
    """min == max, decided on the rewards themselves; none at all are constant too."""
    return rewards.size == 0 or bool(rewards.min() == rewards.max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AffineAdvantage:
    """A(r) = slope (r - origin) + level, for the rewards that it was taken from.

    Attributes:
      origin: one of the rewards, so that nothing large cancels.
    """

    slope: float
    origin: float
    level: float

    def __call__(self, reward: Any) -> Any:
        """Of one reward, or of an array of them."""
        return self.slope * (reward - self.origin) + self.level

    def closing_coefficients(self, center: float) -> tuple[float, float]:
        """The weights of G1 = sum (r_i - center) g_i and G2 = sum g_i that give sum A_i g_i."""
        return self.slope, self(center)


def affine_advantage(rewards: np.ndarray, advantages: np.ndarray) -> AffineAdvantage:
    """The line through the advantages of the least and the greatest reward.

    Which objectives lie on such a line is checked when a run starts (`objective_check`).

    Args:
      rewards, advantages: float64 [n].
    """
    if rewards.size == 0:
        return AffineAdvantage(slope=0.0, origin=0.0, level=0.0)
    low, high = int(rewards.argmin()), int(rewards.argmax())
    spread = rewards[high] - rewards[low]
    slope = (advantages[high] - advantages[low]) / spread if spread else 0.0
    return AffineAdvantage(
        slope=float(slope), origin=float(rewards[low]), level=float(advantages[low])
    )
