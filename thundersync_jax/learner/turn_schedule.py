"""Which segments run next, on every replica at once. Pure host decisions, no jax.

Invariants:
  * A trajectory's turns stream in order and only while it holds a cache, which it takes with its
    first streamed turn and gives back when it is done. One that holds none when it is closed is
    differentiated as a whole. So every trajectory ends with caches of any number, 0 included.
  * Once it is closed: what later segments read and was not run yet is run forward, in order; then
    its segments are differentiated last to first, each once, with what its ledger holds. A segment
    that nothing scored reads is not replayed.
  * A turn without scores is run forward only when a scored one follows.
  * A segment that will be replayed keeps its residuals where a place for its shape is free when it
    runs, until it is done.
  * `StreamTurns.IDLE`: closed trajectories come first, turns stream when nothing else is due.
    ALWAYS: turns come first. NEVER: none streams.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

from thundersync_jax.learner.buckets import Example, bucket_of
from thundersync_jax.learner.turns import (
    CachePlace,
    ResidualPlace,
    Segment,
    SegmentStage,
    TurnSequence,
)


class StreamTurns(enum.Enum):
    IDLE = "idle"
    ALWAYS = "always"
    NEVER = "never"


class SegmentKind(enum.Enum):
    """Which program, and what it does for the trajectory."""

    FORWARD = "turn_forward"
    STREAM = "turn_stream"  # the score alone; its ledger still grows
    CLOSE = "turn_close"  # the score, with the ledger
    REPLAY = "turn_replay"  # the ledger alone
    REPLAY_KEPT = "turn_replay_kept"  # the same from kept residuals: a backward pass alone
    WHOLE = "turn_whole"  # every segment at once, without a cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentLane:
    """One segment of one trajectory, or, for WHOLE, all of them (`segment` None)."""

    sequence: TurnSequence
    segment: Segment | None
    example: Example


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentWork:
    """One call: on every replica up to K lanes of one kind and shape."""

    kind: SegmentKind
    prefix_bucket: int
    bucket: int
    replicas: tuple[tuple[SegmentLane, ...], ...]

    @property
    def lanes(self) -> list[SegmentLane]:
        return [lane for lanes in self.replicas for lane in lanes]

    @property
    def num_tokens(self) -> int:
        return sum(lane.example.num_positions for lane in self.lanes)


class TurnSchedule:
    """The trajectories of the current step and the free caches.

    Args:
      num_caches: of every replica.
      num_residuals: segments of every shape whose residuals a replica can keep.
      buckets, prefix_buckets: padded lengths of segments and of what they attend to.
      lanes_per_call: K by bucket.
    """

    def __init__(
        self,
        *,
        num_replicas: int,
        num_caches: int,
        buckets: Sequence[int],
        prefix_buckets: Sequence[int],
        lanes_per_call: Callable[[int], int],
        stream_turns: StreamTurns,
        num_residuals: int = 0,
    ) -> None:
        self._buckets = tuple(buckets)
        self._prefix_buckets = tuple(prefix_buckets)
        self._lanes_per_call = lanes_per_call
        self._stream_turns = stream_turns
        self._free = [set(range(num_caches)) for _ in range(num_replicas)]
        self._num_residuals = num_residuals
        self._kept: dict[ResidualPlace, Segment] = {}
        self._sequences: list[TurnSequence] = []

    def add(self, sequence: TurnSequence) -> None:
        self._sequences.append(sequence)

    def remove(self, sequence: TurnSequence) -> None:
        """Nothing of the trajectory runs any more."""
        self._release(sequence)
        self._sequences.remove(sequence)

    def clear(self) -> None:
        """Forgets the step; every cache is free again."""
        for sequence in self._sequences:
            self._release(sequence)
        self._sequences = []

    def next_work(self) -> SegmentWork | None:
        """The call that is due, its caches taken; None when nothing is ready."""
        match self._stream_turns:
            case StreamTurns.NEVER:
                return self.closing_work()
            case StreamTurns.IDLE:
                return self.closing_work() or self.growing_work()
            case StreamTurns.ALWAYS:
                return self.growing_work() or self.closing_work()

    def closing_work(self) -> SegmentWork | None:
        """The call that is due of closed trajectories."""
        self.settle()
        return self._best(self._closing(s) for s in self._sequences if s.is_closed)

    def growing_work(self, most: Sequence[int] | None = None) -> SegmentWork | None:
        """The call that is due of growing trajectories, their caches taken.

        Args:
          most: caches of every replica that may be taken; all that are free by default.
        """
        growing = (self._streaming(s) for s in self._sequences if not s.is_closed)
        return self._best(growing, most)

    def settle(self) -> None:
        """Marks the closed trajectories of which nothing is left as done; frees their caches."""
        for sequence in self._sequences:
            segments = sequence.to_run() if sequence.is_closed else []
            if segments and segments[-1].stage is SegmentStage.STREAMED:
                segments[-1].advance(SegmentStage.DONE)  # nothing reads it
                self._forget(segments[-1])
            if sequence.is_closed and all(s.stage is SegmentStage.DONE for s in segments):
                sequence.is_done = True
                self._release(sequence)

    def mark_done(self, work: SegmentWork) -> None:
        """Records that the call's results are in batch sum, caches and ledgers."""
        for lane in work.lanes:
            match work.kind:
                case SegmentKind.FORWARD:
                    _own(lane).advance(SegmentStage.FORWARDED)
                case SegmentKind.STREAM:
                    _own(lane).advance(SegmentStage.STREAMED)
                case SegmentKind.CLOSE | SegmentKind.REPLAY | SegmentKind.REPLAY_KEPT:
                    _own(lane).advance(SegmentStage.DONE)
                    self._forget(_own(lane))
                case SegmentKind.WHOLE:
                    for segment in lane.sequence.to_run():
                        segment.advance(SegmentStage.DONE)

    # -- what a trajectory needs next -----------------------------------------------------------

    def _closing(self, sequence: TurnSequence) -> tuple[SegmentKind, SegmentLane] | None:
        """The next call of a closed trajectory; None when that was all."""
        left = [s for s in sequence.to_run() if s.stage is not SegmentStage.DONE]
        if not left:
            return None
        if sequence.cache is None:
            whole = SegmentLane(sequence=sequence, segment=None, example=sequence.whole())
            return SegmentKind.WHOLE, whole
        unread = [s for s in left[:-1] if s.stage is SegmentStage.WAITING]
        if unread:
            return SegmentKind.FORWARD, _lane(sequence, unread[0])
        last = left[-1]
        if last.is_scored and last.stage is not SegmentStage.STREAMED:
            return SegmentKind.CLOSE, _lane(sequence, last)
        is_kept = last.residuals is not None
        return SegmentKind.REPLAY_KEPT if is_kept else SegmentKind.REPLAY, _lane(sequence, last)

    def _streaming(self, sequence: TurnSequence) -> tuple[SegmentKind, SegmentLane] | None:
        """The next turn of a growing trajectory, if it has or could have a cache."""
        waiting = [s for s in sequence.to_run() if s.stage is SegmentStage.WAITING]
        if not waiting or (sequence.cache is None and not any(self._free)):
            return None
        kind = SegmentKind.STREAM if waiting[0].is_scored else SegmentKind.FORWARD
        return kind, _lane(sequence, waiting[0])

    # -- which of them share a call -------------------------------------------------------------

    def _best(
        self,
        steps: Iterable[tuple[SegmentKind, SegmentLane] | None],
        most: Sequence[int] | None = None,
    ) -> SegmentWork | None:
        """The shape with most tokens; takes at most `most` caches of every replica."""
        shapes: dict[tuple[SegmentKind, int, int], list[SegmentLane]] = {}
        for kind, lane in filter(None, steps):
            shapes.setdefault((kind, *self._shape(lane.example)), []).append(lane)
        room = [len(free) for free in self._free]
        if most is not None:
            room = [min(*pair) for pair in zip(room, most, strict=True)]
        calls = [self._fill(*shape, lanes, list(room)) for shape, lanes in shapes.items()]
        best = max(
            (work for work in calls if work.lanes), key=lambda work: work.num_tokens, default=None
        )
        if best is not None and best.kind is not SegmentKind.WHOLE:
            for replica, lanes in enumerate(best.replicas):
                for lane in lanes:
                    self._take(lane.sequence, replica)
                    self._keep(best, lane, replica)
        return best

    def _shape(self, example: Example) -> tuple[int, int]:
        num_prefix = example.prefix_length
        prefix_bucket = bucket_of(num_prefix, self._prefix_buckets) if num_prefix else 0
        return prefix_bucket, bucket_of(example.num_positions, self._buckets)

    def _fill(
        self,
        kind: SegmentKind,
        prefix_bucket: int,
        bucket: int,
        lanes: Sequence[SegmentLane],
        room: list[int],
    ) -> SegmentWork:
        """Each lane on its trajectory's replica, or on that with fewest which can take it."""
        filled: list[list[SegmentLane]] = [[] for _ in self._free]
        capacity = self._lanes_per_call(bucket)
        for lane in lanes:
            cache = lane.sequence.cache
            is_new = cache is None and kind is not SegmentKind.WHOLE
            places = range(len(filled)) if cache is None else [cache.replica]
            options = [
                replica
                for replica in places
                if len(filled[replica]) < capacity and (room[replica] or not is_new)
            ]
            if options:
                replica = min(options, key=lambda r: len(filled[r]))
                room[replica] -= is_new
                filled[replica].append(lane)
        return SegmentWork(
            kind=kind,
            prefix_bucket=prefix_bucket,
            bucket=bucket,
            replicas=tuple(tuple(lanes) for lanes in filled),
        )

    def _take(self, sequence: TurnSequence, replica: int) -> None:
        if sequence.cache is None:
            index = min(self._free[replica])
            self._free[replica].discard(index)
            sequence.cache = CachePlace(replica=replica, index=index)

    def _keep(self, work: SegmentWork, lane: SegmentLane, replica: int) -> None:
        """Takes a place for the residuals of a segment that is run now and replayed later."""
        segment = _own(lane)
        is_unscored = work.kind is SegmentKind.FORWARD and not segment.is_scored
        if work.kind is not SegmentKind.STREAM and not is_unscored:
            return
        for index in range(self._num_residuals):
            place = ResidualPlace(
                replica=replica, shape=(work.prefix_bucket, work.bucket), index=index
            )
            if place not in self._kept:
                self._kept[place] = segment
                segment.residuals = place
                return

    def _forget(self, segment: Segment) -> None:
        if segment.residuals is not None:
            del self._kept[segment.residuals]
            segment.residuals = None

    def _release(self, sequence: TurnSequence) -> None:
        for segment in sequence.segments:
            self._forget(segment)
        if sequence.cache is not None:
            self._free[sequence.cache.replica].add(sequence.cache.index)
            sequence.cache = None


def _lane(sequence: TurnSequence, segment: Segment) -> SegmentLane:
    return SegmentLane(sequence=sequence, segment=segment, example=segment.example)


def _own(lane: SegmentLane) -> Segment:
    assert lane.segment is not None
    return lane.segment
