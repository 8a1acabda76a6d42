"""What a step says of itself: sampler against learner, finiteness, counts; and its checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from thundersync_jax.errors import UserError
from thundersync_jax.learner.buckets import Example
from thundersync_jax.learner.groups import FINAL_PATHS, Group, Member, Path, Stage
from thundersync_jax.learner.replay_count import ReplayCount
from thundersync_jax.learner.turn_schedule import SegmentKind, SegmentLane
from thundersync_jax.learner.work import LaneWork
from thundersync_jax.losses.advantages import is_constant
from thundersync_jax.losses.objective import Objective
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.transport.messages import UpdateReport


class NonFiniteGradientError(UserError, ArithmeticError):
    """A gradient with inf or NaN; names its trajectories. Nothing was updated."""


class LogprobGapError(UserError, ArithmeticError):
    """Sampler and learner disagree by more than `learner.max_logprob_gap`; nothing was updated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """What a call said of one trajectory: |learner - sampler| summed and at most; finiteness."""

    gap_sum: float
    gap_max: float
    is_finite: bool

    def joined(self, other: Note) -> Note:
        """Of both."""
        return Note(
            gap_sum=self.gap_sum + other.gap_sum,
            gap_max=max(self.gap_max, other.gap_max),
            is_finite=self.is_finite and other.is_finite,
        )


def note_of(stats: np.ndarray, replica: int, lane: int) -> Note:
    """One lane of a call's statistics [R, STATISTICS, K]; see `streaming.accumulate`."""
    gap_sum, gap_max, is_finite = stats[replica, :, lane].tolist()
    return Note(gap_sum=gap_sum, gap_max=gap_max, is_finite=bool(is_finite))


def refuse_non_finite(names: Sequence[str]) -> None:
    """Raises NonFiniteGradientError if there are any."""
    if names:
        more = f"; and {len(names) - 8} more" if len(names) > 8 else ""
        raise NonFiniteGradientError(
            f"the score gradient is not finite for {'; '.join(names[:8])}{more}: look at its "
            "log-probabilities and the weights, and at advantages, token weights and scores of an "
            "objective of your own. Nothing was updated"
        )


def refuse_gap(name: str, gap: float, limit: float, remedy: str) -> None:
    """Raises LogprobGapError for a gap above the limit."""
    if gap > limit:
        raise LogprobGapError(
            f"{name}: sampler and learner differ by {gap:.3g} nats at one token, more than "
            f"learner.max_logprob_gap = {limit}. Check that both use the same weights, temperature "
            f"and dtype, or {remedy}. If many steps were replayed without a checkpoint, rounding "
            "has grown from step to step: raise learner.max_logprob_gap, save more often "
            "(checkpoint.every_steps), or use learner.reduction = 'exact', whose replays have the "
            "same bits"
        )


class StepStatistics:
    """Collects what calls said of the trajectories that were folded in one step.

    A group without an advantage adds nothing to the gradient but its terms, whether its members
    were folded before the last reward or never: without terms they are not counted.
    """

    def __init__(
        self, objective: Objective, max_logprob_gap: float, model: TransformerConfig
    ) -> None:
        self._objective = objective
        self._max_logprob_gap = max_logprob_gap
        self._notes: list[tuple[LaneWork, Note]] = []
        self._terms: list[tuple[LaneWork, Note]] = []
        self._held: dict[Member, Note] = {}
        self._replayed = ReplayCount(model)
        self.has_gradient = False

    def add(self, lane: LaneWork, note: Note) -> None:
        """Counts a folded lane; a gradient ahead of its verdict waits for `release`."""
        if self._objective.term_sums:
            self._terms.append((lane, note))
            self.has_gradient = True
        if lane.path is Path.AHEAD:
            self._held[lane.member] = note
        elif lane.path is not Path.TERMS:
            self.has_gradient |= lane.path is Path.DIRECT and not lane.group.is_zero
            self._notes.append((lane, note))

    def add_turn(
        self, member: Member, kind: SegmentKind, lane: SegmentLane, note: Note | None
    ) -> None:
        """Counts a turn of a held gradient; a forward call has nothing to note."""
        self._replayed.add(kind, lane)
        if note is not None:
            known = self._held.get(member)
            self._held[member] = note if known is None else known.joined(note)

    def release(self, lane: LaneWork) -> None:
        """The verdict of a held gradient came: it counts, or is forgotten if the attempt failed."""
        note = self._held.pop(lane.member, None)  # None: dropped before anything was scored
        if lane.member.reward is not None and note is not None:
            self.has_gradient |= lane.path is Path.DIRECT and not lane.group.is_zero
            self._notes.append((lane, note))

    def check_finite(self) -> None:
        """Raises NonFiniteGradientError."""
        refuse_non_finite([_name(lane) for lane, note in self._counted() if not note.is_finite])

    def check_gap(self) -> None:
        """Raises LogprobGapError when the data are not on-policy and nothing weights that."""
        counted = self._counted()
        if self._objective.weighs_sampler or not counted:
            return
        lane, note = max(counted, key=lambda found: found[1].gap_max)
        remedy = "weigh the difference, as learner.objective_options.tis_cap = 2 does"
        refuse_gap(_name(lane), note.gap_max, self._max_logprob_gap, remedy)

    def _counted(self) -> list[tuple[LaneWork, Note]]:
        if self._terms:
            return self._terms
        groups = {lane.group for lane, _ in self._notes}
        zero = {group for group in groups if group.is_zero}
        return [(lane, note) for lane, note in self._notes if lane.group not in zero]

    def report(
        self,
        groups: Sequence[Group],
        *,
        policy_version: int,
        is_empty: bool,
        grad_norm: float,
        learning_rate: float,
        num_promotions: int = 0,
    ) -> UpdateReport:
        """The step's report, once its update is done."""
        members = [m for g in groups for m in g.members]
        rewards = [m.graded for m in members if m.graded is not None]
        counted = self._counted()
        num_tokens = sum(m.num_action_tokens for lane, _ in counted for m in lane.members)
        gap_sum = sum(note.gap_sum for _, note in counted)
        return UpdateReport(
            policy_version=policy_version,
            is_empty=is_empty,
            reward_mean=float(np.mean(rewards)) if rewards else math.nan,
            num_groups=len(groups),
            num_trajectories=len(members),
            num_failed=sum(m.stage is Stage.FAILED for m in members),
            zero_variance_groups=sum(is_constant(g.graded) for g in groups),
            action_tokens=sum(m.num_action_tokens for m in members if m.reward is not None),
            grad_norm=grad_norm,
            logprob_gap_mean=gap_sum / num_tokens if num_tokens else math.nan,
            logprob_gap_max=max((note.gap_max for _, note in counted), default=math.nan),
            learning_rate=learning_rate,
            paths={path.value: sum(m.path is path for m in members) for path in FINAL_PATHS},
            num_held=sum(m.was_held for m in members),
            num_by_turns=sum(m.is_by_turns and m.reward is not None for m in members),
            replayed_tokens=self._replayed.num_tokens,
            replayed_flops=self._replayed.num_flops,
            reference_kl_k3_mean=_reference_kl_k3([m.example for m in members if m.example]),
            num_promotions=num_promotions,
        )


def _reference_kl_k3(examples: Sequence[Example]) -> float:
    """Of the sampler b against the reference q, over action tokens in float64; NaN without any."""
    gains = [
        (e.reference_logprobs.astype(np.float64) - e.behavior_logprobs)[e.action_mask]
        for e in examples
        if e.reference_logprobs is not None
    ]
    gain = np.concatenate([np.zeros(0), *gains])  # log q - log b
    return float(np.mean(np.expm1(gain) - gain)) if gain.size else math.nan


def _name(lane: LaneWork) -> str:
    names = ", ".join(lane.group.name(member) for member in lane.members)
    return names if len(lane.members) == 1 else f"one of {names}, which share a lane"
