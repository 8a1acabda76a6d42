"""`Filling`: the lanes of one call, from what is ready and the buffers that are free.

A group may use several replicas; on each it streams into the pair of its cohort there. Nothing is
taken until the schedule has chosen this call among others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from thundersync_jax.learner.groups import Cohort, Group, Member, Path
from thundersync_jax.learner.work import FoldWork, LaneWork


class Filling:
    """One call of shape (prefix_bucket, bucket) that is being put together.

    Args:
      capacity: lanes of every replica.
      pairs_per_call: pair indices that one call can reach.
      free_pairs: free pair indices of every replica; read only.
      paired: paths that need one.
      is_local: a group runs at its home only.
    """

    def __init__(
        self,
        prefix_bucket: int,
        bucket: int,
        *,
        capacity: int,
        pairs_per_call: int,
        free_pairs: Sequence[set[int]],
        paired: Collection[Path],
        is_local: bool,
    ) -> None:
        self._shape = (prefix_bucket, bucket)
        self._capacity = capacity
        self._pairs_per_call = pairs_per_call
        self._paired = paired
        self._is_local = is_local
        self._free = [set(free) for free in free_pairs]
        self._lanes: list[list[LaneWork]] = [[] for _ in free_pairs]
        self._taken: dict[tuple[Cohort, int], int] = {}
        self._reached: set[int] = set()

    @property
    def most_lanes(self) -> int:
        return max(len(lanes) for lanes in self._lanes)

    def work(self) -> FoldWork:
        prefix_bucket, bucket = self._shape
        lanes = tuple(tuple(lanes) for lanes in self._lanes)
        return FoldWork(prefix_bucket=prefix_bucket, bucket=bucket, replicas=lanes)

    def add(self, group: Group, members: tuple[Member, ...], path: Path) -> None:
        """Puts work that is not AHEAD on the replica with fewest lanes, if any can take it."""
        options = []
        for replica in self._replicas(group):
            is_paired = path in self._paired
            pair = self._pair(group, replica) if is_paired else None
            has_buffer = pair is not None or not is_paired
            if has_buffer and len(self._lanes[replica]) < self._capacity:
                is_new = pair is not None and self._owned(group, replica) is None
                options.append((len(self._lanes[replica]), is_new, replica, pair))
        if not options:
            return
        _, is_new, replica, pair = min(options, key=lambda option: option[:3])
        if pair is not None:
            self._reached.add(pair)
            if is_new:
                self._taken[group.cohort, replica] = pair
                self._free[replica].discard(pair)
        lane = LaneWork(group=group, members=members, path=path, pair=pair)
        self._lanes[replica].append(lane)

    def add_ahead(self, group: Group, member: Member, free_held: list[set[int]], most: int) -> None:
        """Puts AHEAD work on a replica with less than `most` lanes and a free held buffer."""
        for replica in self._replicas(group):
            if len(self._lanes[replica]) < most and free_held[replica]:
                held = free_held[replica].pop()
                lane = LaneWork(group=group, members=(member,), path=Path.AHEAD, held=held)
                self._lanes[replica].append(lane)
                return

    def has_pair(self, group: Group) -> bool:
        """The group has a pair on some replica that may run it, or could have one."""
        return any(
            self._owned(group, replica) is not None or self._free[replica]
            for replica in self._replicas(group)
        )

    def _replicas(self, group: Group) -> Iterable[int]:
        if self._is_local:
            return [group.home]
        return sorted(group.loaded) if group.prefix_bucket else range(len(self._lanes))

    def _owned(self, group: Group, replica: int) -> int | None:
        return group.cohort.pairs.get(replica, self._taken.get((group.cohort, replica)))

    def _pair(self, group: Group, replica: int) -> int | None:
        """The pair that the group has there or may take, within reach of this call."""
        owned = self._owned(group, replica)
        indices = sorted(self._free[replica]) if owned is None else [owned]
        is_full = len(self._reached) == self._pairs_per_call
        in_reach = [i for i in indices if i in self._reached or not is_full]
        return min(in_reach, key=lambda i: i not in self._reached, default=None)
