"""`TurnBuffers`: batch sum and trajectory caches of a distiller; runs the calls on them.

All of it is donated to the programs and replaced by their results, so nobody else may hold a
reference across a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.buckets import LaneItem, pad_lanes
from thundersync_jax.learner.distillation_programs import PART, DistillationPrograms
from thundersync_jax.learner.program_names import Turn
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_replay import TrajectoryCaches
from thundersync_jax.learner.turn_schedule import SegmentKind, SegmentLane, SegmentWork


class TurnBuffers:
    """Device buffers of one step, on every replica."""

    def __init__(self, programs: DistillationPrograms) -> None:
        self._programs = programs
        self.clear()

    def clear(self) -> None:
        """Begins with zeros again. Caches of finished trajectories need none: see turn_replay."""
        # Freed before their successors are made.
        self.batch: Any = None  # a Sum
        self._caches: TrajectoryCaches | None = None
        self.batch = self._programs.accumulator()
        self._caches = self._programs.zero_caches()

    def totals(self) -> tuple[Params, ...]:
        """A copy of what the update divides."""
        return (jax.device_get(self.batch.total()),)

    def update(self, state: TrainState, denominators: Sequence[float]) -> jax.Array:
        """Steps once along the batch sum, which is zero then; returns the gradient's norm.

        Args:
          state: its arrays are donated and replaced.
          denominators: that of the batch sum.
        """
        state.params, state.opt_state, (self.batch,), norm = self._programs.update(
            state.params, state.opt_state, (self.batch,), denominators
        )
        return norm

    def run(self, params: Params, work: SegmentWork) -> np.ndarray | None:
        """Runs one call to its completion; what it says of its lanes, [R, STATISTICS, K]."""
        programs = self._programs
        name = Turn(PART[work.kind], work.prefix_bucket, work.bucket)
        lanes = pad_lanes(
            [[_item(lane) for lane in lanes] for lanes in work.replicas],
            programs.lanes_per_call(work.bucket),
            work.bucket,
            programs.placement.scalar_dtype,
        )
        match work.kind:
            case SegmentKind.FORWARD:
                assert self._caches is not None
                self._caches = programs.forward(name, params, self._caches, lanes)
                jax.block_until_ready(self._caches)
                return None
            case SegmentKind.REPLAY:
                assert self._caches is not None
                self.batch, self._caches, stats = programs.replay(
                    name, params, self.batch, self._caches, lanes
                )
            case SegmentKind.WHOLE:
                nothing_owed = np.zeros(lanes.tokens.shape[:2])
                self.batch, _, stats = programs.score(
                    name, params, self.batch, None, nothing_owed, lanes
                )
            case SegmentKind.STREAM | SegmentKind.CLOSE:
                has_ledger = work.kind is SegmentKind.CLOSE
                ledger_weights = np.full(lanes.tokens.shape[:2], float(has_ledger))
                self.batch, self._caches, stats = programs.score(
                    name, params, self.batch, self._caches, ledger_weights, lanes
                )
        return np.asarray(stats)


def _item(lane: SegmentLane) -> LaneItem:
    cache = lane.sequence.cache
    return LaneItem(examples=(lane.example,), slot=0 if cache is None else cache.index)
