"""What a step of distillation says of itself: sampler against learner and teacher; its checks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from thundersync_jax.learner.groups import Group, Stage
from thundersync_jax.learner.replay_count import ReplayCount
from thundersync_jax.learner.statistics import Note, refuse_gap, refuse_non_finite
from thundersync_jax.learner.turn_schedule import SegmentKind, SegmentLane
from thundersync_jax.learner.turns import TurnSequence
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.transport.messages import UpdateReport

_SCORED = (SegmentKind.STREAM, SegmentKind.CLOSE, SegmentKind.WHOLE)


class DistillationStatistics:
    """Collects what calls said of the segments of one step.

    Args:
      max_logprob_gap: the most that sampler and learner may differ by; inf where a weight corrects
        the difference.
    """

    def __init__(self, max_logprob_gap: float, model: TransformerConfig) -> None:
        self._max_logprob_gap = max_logprob_gap
        self._notes: list[tuple[TurnSequence, Note]] = []
        self._by_turns: set[TurnSequence] = set()
        self._replayed = ReplayCount(model)
        self.has_gradient = False

    def add(self, kind: SegmentKind, lane: SegmentLane, note: Note | None) -> None:
        """Counts a lane that was run; a forward call has nothing to note."""
        self._replayed.add(kind, lane)
        if kind is not SegmentKind.WHOLE:
            self._by_turns.add(lane.sequence)
        self.has_gradient |= kind in _SCORED
        if note is not None:
            self._notes.append((lane.sequence, note))

    def check_finite(self) -> None:
        """Raises NonFiniteGradientError."""
        found = [sequence.name for sequence, note in self._notes if not note.is_finite]
        refuse_non_finite(list(dict.fromkeys(found)))

    def check_gap(self) -> None:
        """Raises LogprobGapError when the data are not on-policy and nothing weights that."""
        if not self._notes:
            return
        sequence, note = max(self._notes, key=lambda found: found[1].gap_max)
        remedy = "set opd.ratio_cap to weight the difference"
        refuse_gap(sequence.name, note.gap_max, self._max_logprob_gap, remedy)

    def report(
        self,
        groups: Sequence[Group],
        sequences: Sequence[TurnSequence],
        *,
        policy_version: int,
        is_empty: bool,
        grad_norm: float,
        learning_rate: float,
    ) -> UpdateReport:
        """The step's report, once its update is done."""
        members = [m for g in groups for m in g.members]
        rewards = [m.reward for m in members if m.reward is not None]
        num_tokens = sum(s.num_scored_tokens for s in sequences)
        gap_sum = sum(note.gap_sum for _, note in self._notes)
        trained = [s for s in sequences if s.num_scored_tokens]
        by_turns = sum(s in self._by_turns for s in trained)
        return UpdateReport(
            policy_version=policy_version,
            is_empty=is_empty,
            reward_mean=float(np.mean(rewards)) if rewards else math.nan,
            num_groups=len(groups),
            num_trajectories=len(members),
            num_failed=sum(m.stage is Stage.FAILED for m in members),
            zero_variance_groups=0,
            action_tokens=num_tokens,
            grad_norm=grad_norm,
            logprob_gap_mean=gap_sum / num_tokens if num_tokens else math.nan,
            logprob_gap_max=max((note.gap_max for _, note in self._notes), default=math.nan),
            learning_rate=learning_rate,
            paths={"turns": by_turns, "whole": len(trained) - by_turns},
            num_held=0,
            num_by_turns=by_turns,
            teacher_kl_mean=(
                sum(s.teacher_kl for s in sequences) / num_tokens if num_tokens else math.nan
            ),
            replayed_tokens=self._replayed.num_tokens,
            replayed_flops=self._replayed.num_flops,
        )
