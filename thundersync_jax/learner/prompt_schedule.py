"""Which prompts are shared where: the slots of every replica, and the prompt call that is due.

Invariants:
  * A group shares its prompt at its home, the replica where it reserves a slot when one is free;
    other replicas may load it too, where that is sooner than waiting.
  * A slot is reserved, then loaded by a forward call, and free again after the backward call, or
    when the group has no gradient to differentiate through the prompt.
  * A group that finds no slot at all runs its prompt in every member; one that stays waits for one.

No jax: `schedule.py` asks, the learner runs what it says.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from thundersync_jax.learner.groups import Group
from thundersync_jax.learner.work import FoldWork, PromptWork


class PromptSchedule:
    """The free prompt slots.

    Args:
      num_slots: of every replica.
      is_local: a group stays at its home.
    """

    def __init__(self, *, num_replicas: int, num_slots: int, is_local: bool) -> None:
        self._num_replicas = num_replicas
        self._is_local = is_local
        self._free = [list(range(num_slots)) for _ in range(num_replicas)]

    def open(self, group: Group, others: Sequence[Group]) -> None:
        """Chooses a home: the replica with most free slots, or with fewest groups for one that
        stays; and reserves a slot there.
        """
        replicas = range(self._num_replicas)
        if self._is_local:
            homes = collections.Counter(g.home for g in others if not g.is_closed)
            group.home = min(replicas, key=lambda r: (homes[r], r))
        elif group.prefix_bucket:
            group.home = max(replicas, key=lambda r: (len(self._free[r]), -r))
            if not self._free[group.home]:
                group.prefix_bucket = 0
        self.reserve(group)

    def reserve(self, group: Group) -> None:
        """Gives a group that has yet to run its prompt a free slot at home."""
        is_waiting = bool(group.prefix_bucket) and not group.slots and not group.is_accumulated
        if is_waiting and self._free[group.home]:
            group.slots[group.home] = self._free[group.home].pop()

    def release(self, group: Group) -> None:
        """Takes back every slot of a group."""
        for replica, slot in group.slots.items():
            self._free[replica].append(slot)
        group.slots.clear()
        group.loaded.clear()

    def release_unloaded(self, group: Group) -> None:
        """Takes back the slots that hold nothing."""
        for replica in [r for r in group.slots if r not in group.loaded]:
            self._free[replica].append(group.slots.pop(replica))

    def is_due(self, group: Group) -> bool:
        """It has a slot at home which does not hold its prompt yet."""
        return group.home in group.slots and group.home not in group.loaded

    def work(self, groups: Sequence[Group], *, is_backward: bool) -> PromptWork | None:
        """One prompt a replica, all of the bucket of the first group."""
        if not groups:
            return None
        bucket = groups[0].prefix_bucket
        chosen: list[Group | None] = [None] * self._num_replicas
        for group in groups:
            for replica in sorted(group.loaded) if is_backward else [group.home]:
                if group.prefix_bucket == bucket and chosen[replica] is None:
                    chosen[replica] = group
        return PromptWork(prefix_bucket=bucket, is_backward=is_backward, replicas=tuple(chosen))

    def spread(self, best: FoldWork, free_pairs: Sequence[set[int]]) -> PromptWork | None:
        """Loads a busy group's prompt on idle replicas, where that is sooner than waiting."""
        loads = [len(lanes) for lanes in best.replicas]
        if self._is_local or not best.prefix_bucket or max(loads) - min(loads) < 2:
            return None
        saved = (max(loads) - -(-sum(loads) // len(loads))) * best.bucket
        if saved < best.prefix_bucket / 3:  # a forward pass is a third of a gradient
            return None
        busiest = best.replicas[loads.index(max(loads))][-1].group
        chosen: list[Group | None] = [None] * self._num_replicas
        for replica, load in enumerate(loads):
            has_pair = replica in busiest.cohort.pairs or free_pairs[replica]
            has_buffer = busiest.is_complete or has_pair
            is_idle = load == min(loads) and replica not in busiest.slots
            if is_idle and has_buffer and self._free[replica]:
                busiest.slots[replica] = self._free[replica].pop()
                chosen[replica] = busiest
        if not any(chosen):
            return None
        return PromptWork(
            prefix_bucket=best.prefix_bucket, is_backward=False, replicas=tuple(chosen)
        )

    def mark_done(self, work: PromptWork) -> None:
        """Records that the call's result is in the slots, or in the sums."""
        for replica, group in enumerate(work.replicas):
            if group is not None and work.is_backward:
                group.loaded.discard(replica)
                self._free[replica].append(group.slots.pop(replica))
            elif group is not None:
                group.loaded.add(replica)
