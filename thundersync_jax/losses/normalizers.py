"""What a sum over tokens is divided by. Every normalisation is one named option.

With x_it the token t's term of trajectory i, |o_i| its action tokens and n the trajectories:

    token_mean         sum_i sum_t x_it / sum_i |o_i|            DAPO's, over the batch
    trajectory_mean    1/n sum_i 1/|o_i| sum_t x_it              GRPO (arXiv 2402.03300)
    group_token_mean   1/#groups sum_g (sum_i sum_t x_it / sum_i |o_i|), i in g
                                                                 DAPO (arXiv 2503.14476, eq. 8)
    constant           1/(n L) sum_i sum_t x_it                  Dr. GRPO (arXiv 2503.20783)
    trajectory_sum     1/n sum_i sum_t x_it                      RLOO (arXiv 2402.14740, eq. 8)
    sum                sum_i sum_t x_it                          nothing is divided

Each is a weight per token, known with the content; a factor per group, known with its verdicts; and
one denominator, known at the update. So sums and counts are kept apart and divided once.
"""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    TOKEN_MEAN = "token_mean"
    TRAJECTORY_MEAN = "trajectory_mean"
    GROUP_TOKEN_MEAN = "group_token_mean"
    CONSTANT = "constant"
    TRAJECTORY_SUM = "trajectory_sum"
    SUM = "sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What arrived.

    Attributes:
      num_tokens: action tokens.
      num_groups: groups with at least one of the trajectories.
    """

    num_tokens: int
    num_trajectories: int
    num_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalizer:
    """One of the normalisations above.

    Attributes:
      length: L of `constant`, in tokens.
    """

    kind: Kind = Kind.TOKEN_MEAN
    length: int = 1

    def token_scale(self, num_tokens: int) -> float:
        """Factor of the token weights of a trajectory with so many action tokens."""
        is_mean = self.kind is Kind.TRAJECTORY_MEAN
        return 1.0 / max(num_tokens, 1) if is_mean else 1.0

    def group_scale(self, num_tokens: int) -> float:
        """Factor of a group whose rewarded trajectories have so many action tokens."""
        is_mean = self.kind is Kind.GROUP_TOKEN_MEAN
        return 1.0 / max(num_tokens, 1) if is_mean else 1.0

    def denominator(self, counts: Counts) -> float:
        """What the sum is divided by at the update; 0 when nothing arrived."""
        match self.kind:
            case Kind.TOKEN_MEAN:
                return float(counts.num_tokens)
            case Kind.TRAJECTORY_MEAN | Kind.TRAJECTORY_SUM:
                return float(counts.num_trajectories)
            case Kind.GROUP_TOKEN_MEAN:
                return float(counts.num_groups)
            case Kind.CONSTANT:
                return float(counts.num_trajectories * self.length)
            case Kind.SUM:
                return float(counts.num_trajectories > 0)
