"""`TurnCaches` run the calls of turn replay; `TurnBuffers` are them and a distiller's batch sum.

Caches and sums are donated to the programs and replaced by their results, so nobody else may hold a
reference across a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.buckets import LaneItem, pad_lanes
from thundersync_jax.learner.cache_pages import CachePages
from thundersync_jax.learner.program_names import Turn
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.sums import Sum
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_programs import PART, TurnPrograms
from thundersync_jax.learner.turn_replay import TrajectoryCaches
from thundersync_jax.learner.turn_schedule import SegmentKind, SegmentLane, SegmentWork
from thundersync_jax.learner.turns import TurnSequence


class TurnCaches:
    """The trajectory caches of one step, on every replica; the sums of a call are its caller's."""

    def __init__(self, programs: TurnPrograms) -> None:
        self._programs = programs
        self._pages = None if programs.host_caches is None else CachePages(programs)
        self.clear()

    def clear(self) -> None:
        """Begins with zeros again. Caches of finished trajectories need none: see turn_replay."""
        self._caches: TrajectoryCaches | None = None  # freed before their successors are made
        self._caches = self._programs.zero_caches()
        if self._pages is not None:
            self._pages.clear()

    def run(
        self, params: Params, work: SegmentWork, sums: tuple[Sum, ...]
    ) -> tuple[tuple[Sum, ...], np.ndarray | None]:
        """Runs one call to its completion.

        Args:
          sums: donated; every lane reaches that of its trajectory.

        Returns:
          The sums, and what the call says of its lanes, [R, STATISTICS, K]; a forward call nothing.
        """
        programs = self._programs
        name = Turn(PART[work.kind], work.prefix_bucket, work.bucket)
        if self._pages is not None and work.kind is not SegmentKind.WHOLE:
            assert self._caches is not None
            self._caches = self._pages.reach(self._caches, work)
        lanes = pad_lanes(
            [[self._item(lane) for lane in lanes] for lanes in work.replicas],
            programs.lanes_per_call(work.bucket),
            work.bucket,
            programs.placement.scalar_dtype,
        )
        shape = num_replicas, num_lanes = lanes.tokens.shape[:2]
        coefficients = np.zeros((num_replicas, len(sums), num_lanes))
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                coefficients[replica, lane.sequence.buffer, at] = 1.0
        is_closed = np.full(shape, float(work.kind is SegmentKind.CLOSE))
        match work.kind:
            case SegmentKind.FORWARD:
                assert self._caches is not None
                self._caches = programs.forward(name, params, self._caches, lanes)
                jax.block_until_ready(self._caches)
                return sums, None
            case SegmentKind.REPLAY | SegmentKind.REPLAY_KEPT:
                assert self._caches is not None
                sums, self._caches, stats = programs.replay(
                    name, params, sums, self._caches, coefficients, lanes
                )
            case SegmentKind.WHOLE:
                sums, _, stats = programs.score(
                    name, params, sums, None, coefficients, is_closed, lanes
                )
            case SegmentKind.STREAM | SegmentKind.CLOSE:
                sums, self._caches, stats = programs.score(
                    name, params, sums, self._caches, coefficients, is_closed, lanes
                )
        return sums, np.asarray(stats)

    def _item(self, lane: SegmentLane) -> LaneItem:
        residuals = lane.segment and lane.segment.residuals
        return LaneItem(
            examples=(lane.example,),
            slot=self._slot(lane.sequence),
            adjoint_slot=residuals.index if residuals else self._programs.num_residuals,  # nowhere
        )

    def _slot(self, sequence: TurnSequence) -> int:
        """Where on the device a trajectory's cache lies; any, of one that has none."""
        if sequence.cache is None:
            return 0
        return sequence.cache.index if self._pages is None else self._pages.place(sequence)


class TurnBuffers:
    """Batch sum and trajectory caches of one step, on every replica."""

    def __init__(self, programs: TurnPrograms) -> None:
        self._programs = programs
        self._caches = TurnCaches(programs)
        self.batch: Any = programs.accumulator()  # a Sum

    def clear(self) -> None:
        """Begins with zeros again."""
        self.batch = None  # freed before its successor is made
        self.batch = self._programs.accumulator()
        self._caches.clear()

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
        (self.batch,), stats = self._caches.run(params, work, (self.batch,))
        return stats
