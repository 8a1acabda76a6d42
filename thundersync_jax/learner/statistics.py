"""What a step says of itself: sampler against learner, finiteness, counts; and its checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from thundersync_jax.config_sections import LearnerSection
from thundersync_jax.learner.groups import Group, Member, Path, Stage
from thundersync_jax.learner.work import LaneWork
from thundersync_jax.transport.messages import UpdateReport


class NonFiniteGradientError(ArithmeticError):
    """A gradient with inf or NaN; names its trajectories. Nothing was updated."""


class LogprobGapError(ArithmeticError):
    """Sampler and learner disagree by more than `learner.max_logprob_gap`; nothing was updated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What a call said of one trajectory: |learner - sampler| summed and at most; finiteness."""

    gap_sum: float
    gap_max: float
    is_finite: bool


def note_of(stats: np.ndarray, replica: int, lane: int) -> Note:
    """One lane of a call's statistics [R, STATISTICS, K]; see `streaming.accumulate`."""
    gap_sum, gap_max, is_finite = stats[replica, :, lane].tolist()
    return Note(gap_sum=gap_sum, gap_max=gap_max, is_finite=bool(is_finite))


class StepStatistics:
    """Collects notes of the trajectories that were folded in one step."""

    def __init__(self, config: LearnerSection) -> None:
        self._config = config
        self._gap_sum = 0.0
        self._gap_max = -math.inf
        self._gap_tokens = 0
        self._gap_name = ""
        self._non_finite: list[tuple[Group, str]] = []
        self._held: dict[Member, Note] = {}
        self.has_gradient = False

    def add(self, lane: LaneWork, note: Note) -> None:
        """Counts a folded lane; a gradient ahead of its verdict waits for `release`."""
        if lane.path is Path.AHEAD:
            self._held[lane.member] = note
            return
        name = ", ".join(lane.group.name(member) for member in lane.members)
        self.has_gradient |= lane.path is Path.DIRECT  # which a group of equal rewards never takes
        self._gap_sum += note.gap_sum
        self._gap_tokens += sum(member.num_action_tokens for member in lane.members)
        if note.gap_max > self._gap_max:
            self._gap_max, self._gap_name = note.gap_max, name
        if not note.is_finite:
            self._non_finite.append((lane.group, name))

    def release(self, lane: LaneWork) -> None:
        """The verdict of a held gradient came: it counts, or is forgotten where it has no weight:
        the attempt failed, or all rewards of its group are equal.
        """
        note = self._held.pop(lane.member)
        has_weight = lane.path is Path.STREAM or not self._is_zero(lane.group)
        if lane.member.reward is not None and has_weight:
            self.add(lane, note)

    def check_finite(self) -> None:
        """Raises NonFiniteGradientError; a group of equal rewards adds nothing, whatever it is."""
        names = [name for group, name in self._non_finite if not self._is_zero(group)]
        if names:
            raise NonFiniteGradientError(
                "the score gradient is not finite for " + "; ".join(names[:8])
            )

    def _is_zero(self, group: Group) -> bool:
        return group.moments(self._config.advantage).is_zero_variance

    def check_gap(self) -> None:
        """Raises LogprobGapError when the data are not on-policy and nothing weights that."""
        limit = self._config.max_logprob_gap
        if self._config.tis_cap == 0 and self._gap_max > limit:
            raise LogprobGapError(
                f"{self._gap_name}: sampler and learner differ by {self._gap_max:.3g} nats at one "
                f"token, more than learner.max_logprob_gap = {limit}. Check that both use the same "
                "weights, temperature and dtype, or set learner.tis_cap to weight the difference"
            )

    def report(
        self,
        groups: Sequence[Group],
        *,
        policy_version: int,
        is_empty: bool,
        grad_norm: float,
        learning_rate: float,
    ) -> UpdateReport:
        """The step's report, once its update is done."""
        members = [m for g in groups for m in g.members]
        rewards = [m.reward for m in members if m.reward is not None]
        kind = self._config.advantage
        return UpdateReport(
            policy_version=policy_version,
            is_empty=is_empty,
            reward_mean=float(np.mean(rewards)) if rewards else math.nan,
            num_groups=len(groups),
            num_trajectories=len(members),
            num_failed=sum(m.stage is Stage.FAILED for m in members),
            zero_variance_groups=sum(g.moments(kind).is_zero_variance for g in groups),
            action_tokens=sum(m.num_action_tokens for m in members if m.reward is not None),
            grad_norm=grad_norm,
            logprob_gap_mean=self._gap_sum / self._gap_tokens if self._gap_tokens else math.nan,
            logprob_gap_max=self._gap_max if self._gap_tokens else math.nan,
            learning_rate=learning_rate,
            paths={path.value: sum(m.path is path for m in members) for path in Path},
            num_held=sum(m.was_held for m in members),
        )
