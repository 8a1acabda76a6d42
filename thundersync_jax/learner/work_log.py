"""`WorkLog`: the learner's calls that completed, and how long the next of a kind will take.

A call's time is that of its program, times the lanes that it runs. The mean follows changes, such
as another program on the same cores, within a few calls.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

from thundersync_jax.learner.turn_schedule import SegmentWork
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, PromptWork, Work
from thundersync_jax.transport.messages import WorkItem

NEW_SHARE = 0.3  # of the newest call in the mean


class WorkLog:
    """Filled by the learner after every call."""

    def __init__(self) -> None:
        self._items: list[WorkItem] = []
        self._lane_s: dict[Hashable, float] = {}

    def add(self, path: str, bucket: int, num_trajectories: int, started_s: float) -> None:
        """A call that ends now."""
        item = WorkItem(
            path=path,
            bucket=bucket,
            num_trajectories=num_trajectories,
            started_s=started_s,
            ended_s=time.monotonic(),
        )
        self._items.append(item)

    def add_work(self, work: Work, kind: str, bucket: int, count: int, started_s: float) -> None:
        """A call of the schedule that ends now, to predict others by."""
        self.add(kind, bucket, count, started_s)
        newest = (time.monotonic() - started_s) / _num_lanes(work)
        known = self._lane_s.get(_shape(work), newest)
        self._lane_s[_shape(work)] = known + NEW_SHARE * (newest - known)

    def predict_s(self, work: Work) -> float:
        """Seconds of a call; 0 for one of a shape that never ran, so that it is tried."""
        return self._lane_s.get(_shape(work), 0.0) * _num_lanes(work)

    def take(self) -> list[WorkItem]:
        """What completed since the last take."""
        items, self._items = self._items, []
        return items


def _shape(work: Work) -> Hashable:
    match work:
        case FoldWork(prefix_bucket=prefix_bucket, bucket=bucket):
            return prefix_bucket, bucket
        case PromptWork(prefix_bucket=prefix_bucket, is_backward=is_backward):
            return prefix_bucket, is_backward, "prompt"
        case SegmentWork(kind=kind, prefix_bucket=prefix_bucket, bucket=bucket):
            return kind, prefix_bucket, bucket
        case BindWork() | CloseWork():
            return type(work).__name__


def _num_lanes(work: Work) -> int:
    """Lanes that run one after the other."""
    if not isinstance(work, FoldWork | SegmentWork):
        return 1
    return max(len(lanes) for lanes in work.replicas)
