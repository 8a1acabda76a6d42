"""Which program call is due next, on every replica at once. Pure host decisions, no jax.

Invariants:
  * A group streams only while it holds a pair; without one its members wait (hold) until the
    group's rewards are all known and then go direct. A group without a prompt slot runs its prompt
    in every member. So every group closes with pools of any size, 0 included.
  * A group may have partial sums on several replicas: its pair has the same index on all of them,
    and each replica that ran a branch closes its own share of the prompt.
  * Closing comes first, for it frees buffers; then held gradients whose verdict came; then the
    shape with most ready tokens. Prompts are loaded before they hold something up, and otherwise
    when nothing else is due. Gradients ahead of their verdicts come last of all.

The same object drives the learner and the simulation of its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from thundersync_jax.learner.groups import Group, Held, Member, Path, Stage
from thundersync_jax.learner.work import (
    AheadWork,
    BindWork,
    CloseWork,
    FoldWork,
    LaneWork,
    PromptWork,
    Work,
)


class Schedule:
    """The groups of the current step and the free buffers.

    Args:
      num_pairs: pairs (G1, G2) of the pool.
      num_slots: prompt slots of every replica.
      num_held: gradients that every replica can hold ahead of their verdicts.
      pairs_per_call: pairs that one accumulate call can reach.
      lanes_per_call: K by bucket.
    """

    def __init__(
        self,
        *,
        num_replicas: int,
        num_pairs: int,
        num_slots: int,
        num_held: int,
        pairs_per_call: int,
        lanes_per_call: Callable[[int], int],
        advantage: str,
    ) -> None:
        self._num_replicas = num_replicas
        self._pairs_per_call = pairs_per_call
        self._lanes_per_call = lanes_per_call
        self._advantage = advantage
        self._free_pairs = list(range(num_pairs))
        self._free_slots = [list(range(num_slots)) for _ in range(num_replicas)]
        self._free_held = [set(range(num_held)) for _ in range(num_replicas)]
        self._groups: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def get(self, group_id: int) -> Group | None:
        return self._groups.get(group_id)

    def open(self, group: Group) -> None:
        """Adds a group; reserves a prompt slot at the replica with most free ones, if it shares."""
        self._groups[group.group_id] = group
        if group.prefix_bucket:
            home = max(range(self._num_replicas), key=lambda r: (len(self._free_slots[r]), -r))
            if self._free_slots[home]:
                group.home = home
                group.slots[home] = self._free_slots[home].pop()
            else:
                group.prefix_bucket = 0

    def clear(self) -> None:
        """Forgets the step; every buffer is free again."""
        for group in self.groups:
            self._release_slots(group)
            if group.pair is not None:
                self._free_pairs.append(group.pair)
            for member in group.members:
                if member.held is not None:
                    self._free_held[member.held.replica].add(member.held.index)
        self._groups = {}

    def unfinished(self) -> list[str]:
        """What keeps open groups open, by name."""
        return [name for group in self.groups if not group.is_closed for name in group.waiting()]

    def next_work(self) -> Work | None:
        """The call that is due, or None when nothing is ready."""
        closing = [g for g in self.groups if self._is_closing(g)]
        for group in closing:
            if group.pair is not None:
                return CloseWork(group=group)
        backward = self._prompts([g for g in closing if g.loaded], is_backward=True)
        if backward is not None:
            return backward
        binding = self._binding()
        if binding is not None:
            return binding
        folds = [fold for fold in self._folds() if fold.lanes]
        best = max(folds, key=lambda fold: fold.num_tokens, default=None)
        unloaded = [g for g in self.groups if self._needs_prompt(g)]
        waiting = [g for g in unloaded if any(m.stage is Stage.READY for m in g.members)]
        if waiting or best is None:
            forward = self._prompts(waiting or unloaded, is_backward=False)
            if forward is not None:
                return forward
        if best is None:
            return self._ahead()
        spread = self._spread(best)
        if spread is None:
            self._take_pairs(best)
        return spread or best

    def mark_done(self, work: Work) -> None:
        """Records that the call's result is in the accumulators."""
        match work:
            case CloseWork(group=group):
                assert group.pair is not None
                self._free_pairs.append(group.pair)
                group.pair = None
                self._settle(group)
            case PromptWork(replicas=replicas, is_backward=is_backward):
                for replica, prompt in enumerate(replicas):
                    if prompt is not None and is_backward:
                        prompt.loaded.discard(replica)
                        self._free_slots[replica].append(prompt.slots.pop(replica))
                        self._settle(prompt)
                    elif prompt is not None:
                        prompt.loaded.add(replica)
            case AheadWork(index=index, replicas=chosen):
                for replica, pick in enumerate(chosen):
                    if pick is not None:
                        pick[1].held = Held(replica=replica, index=index)
                        self._free_held[replica].discard(index)
            case BindWork(index=index, replicas=bound):
                for replica, lane in enumerate(bound):
                    if lane is not None:
                        lane.member.held = None
                        self._free_held[replica].add(index)
                        if lane.member.reward is not None:
                            lane.member.advance(Stage.DONE, lane.group.name(lane.member))
                            lane.member.path = Path.AHEAD
            case FoldWork():
                for lane in work.lanes:
                    lane.member.advance(Stage.DONE, lane.group.name(lane.member))
                    lane.member.path = lane.path

    # -- closing --------------------------------------------------------------------------------

    def _is_closing(self, group: Group) -> bool:
        """Complete, and every gradient is folded; what has none is finished here."""
        if group.is_closed or not group.is_complete:
            return False
        if any(m.held is not None for m in group.members):
            return False
        is_zero = group.moments(self._advantage).is_zero_variance
        for member in group.members:
            if member.stage is Stage.READY and (is_zero or member.bucket == 0):
                member.advance(Stage.DONE, group.name(member))  # coefficient or score exactly zero
                member.path = Path.DIRECT
        if not group.is_accumulated:
            return False
        if is_zero or all(m.bucket == 0 for m in group.members):
            self._release_slots(group)  # nothing to differentiate through the prompt
        self._settle(group)
        return not group.is_closed

    def _settle(self, group: Group) -> None:
        """Closes a group that holds nothing any more."""
        unused = [r for r in group.slots if r not in group.loaded]
        for replica in unused:
            self._free_slots[replica].append(group.slots.pop(replica))
        group.is_closed = group.pair is None and not group.slots

    def _release_slots(self, group: Group) -> None:
        for replica, slot in group.slots.items():
            self._free_slots[replica].append(slot)
        group.slots.clear()
        group.loaded.clear()

    # -- prompts --------------------------------------------------------------------------------

    def _needs_prompt(self, group: Group) -> bool:
        return bool(group.prefix_bucket) and not group.is_closed and group.home not in group.loaded

    def _prompts(self, groups: Sequence[Group], *, is_backward: bool) -> PromptWork | None:
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

    def _spread(self, best: FoldWork) -> PromptWork | None:
        """Loads a busy group's prompt on idle replicas, where that is sooner than waiting."""
        loads = [len(lanes) for lanes in best.replicas]
        if not best.prefix_bucket or max(loads) - min(loads) < 2:
            return None
        saved = (max(loads) - -(-sum(loads) // len(loads))) * best.bucket
        if saved < best.prefix_bucket / 3:  # a forward pass is a third of a gradient
            return None
        busiest = best.replicas[loads.index(max(loads))][-1].group
        chosen: list[Group | None] = [None] * self._num_replicas
        for replica, load in enumerate(loads):
            if load == min(loads) and replica not in busiest.slots and self._free_slots[replica]:
                busiest.slots[replica] = self._free_slots[replica].pop()
                chosen[replica] = busiest
        if not any(chosen):
            return None
        return PromptWork(
            prefix_bucket=best.prefix_bucket, is_backward=False, replicas=tuple(chosen)
        )

    # -- folding --------------------------------------------------------------------------------

    def _folds(self) -> Iterator[FoldWork]:
        """The best call of every shape that has ready members."""
        shapes: dict[tuple[int, int], list[LaneWork]] = {}
        for group in self.groups:
            if group.is_closed or (group.prefix_bucket and not group.loaded):
                continue
            path = Path.DIRECT if group.is_complete else Path.STREAM
            for member in group.members:
                if member.stage is Stage.READY and member.bucket and member.held is None:
                    shape = (group.prefix_bucket, member.bucket)
                    shapes.setdefault(shape, []).append(
                        LaneWork(group=group, member=member, path=path)
                    )
        for (prefix_bucket, bucket), ready in shapes.items():
            yield self._fill(prefix_bucket, bucket, ready)

    def _fill(self, prefix_bucket: int, bucket: int, ready: list[LaneWork]) -> FoldWork:
        """Fills the lanes: direct work first, then the open groups with most members ready."""
        capacity = self._lanes_per_call(bucket)
        replicas: list[list[LaneWork]] = [[] for _ in range(self._num_replicas)]
        counts: dict[int, int] = {}
        for lane in ready:
            counts[lane.group.group_id] = counts.get(lane.group.group_id, 0) + 1
        ready = sorted(
            ready,
            key=lambda w: (w.path is Path.STREAM, -counts[w.group.group_id], w.group.group_id),
        )
        streaming: list[Group] = []
        num_new = 0
        for lane in ready:
            group = lane.group
            if lane.path is Path.STREAM and group not in streaming:
                is_new = group.pair is None
                if len(streaming) == self._pairs_per_call:
                    continue
                if is_new and num_new == len(self._free_pairs):
                    lane.member.was_held = True
                    continue
                num_new += is_new
                streaming.append(group)
            allowed = group.loaded if group.prefix_bucket else range(self._num_replicas)
            replica = min(allowed, key=lambda r: len(replicas[r]))
            if len(replicas[replica]) < capacity:
                replicas[replica].append(lane)
        return FoldWork(
            prefix_bucket=prefix_bucket,
            bucket=bucket,
            replicas=tuple(tuple(lanes) for lanes in replicas),
        )

    def _binding(self) -> BindWork | None:
        """Held gradients whose verdict came: those of one index, on every replica that has one."""
        ready: dict[int, dict[int, LaneWork]] = {}
        streaming: set[int] = set()
        for group in self.groups:
            path = Path.DIRECT if group.is_complete else Path.STREAM
            for member in group.members:
                if member.held is None or not member.is_terminal:
                    continue
                if path is Path.STREAM and member.reward is not None:
                    if group.pair is None and not self._free_pairs:
                        continue
                    if group.group_id not in streaming and len(streaming) == self._pairs_per_call:
                        continue
                    streaming.add(group.group_id)
                    group.pair = self._free_pairs.pop() if group.pair is None else group.pair
                lane = LaneWork(group=group, member=member, path=path)
                ready.setdefault(member.held.index, {})[member.held.replica] = lane
        if not ready:
            return None
        index = max(ready, key=lambda i: len(ready[i]))
        replicas = tuple(ready[index].get(r) for r in range(self._num_replicas))
        return BindWork(index=index, replicas=replicas)

    def _ahead(self) -> AheadWork | None:
        """Final contents without a verdict: one shape, one held index, at most one a replica."""
        shapes: dict[tuple[int, int], list[tuple[Group, Member]]] = {}
        for group in self.groups:
            if group.prefix_bucket and not group.loaded:
                continue
            for member in group.members:
                if member.stage is Stage.CONTENT and member.bucket and member.held is None:
                    shape = (group.prefix_bucket, member.bucket)
                    shapes.setdefault(shape, []).append((group, member))
        indices = set().union(*self._free_held)
        if not shapes or not indices:
            return None
        prefix_bucket, bucket = max(shapes, key=lambda shape: len(shapes[shape]))
        index = max(indices, key=lambda i: sum(i in free for free in self._free_held))
        chosen: list[tuple[Group, Member] | None] = [None] * self._num_replicas
        for group, member in shapes[prefix_bucket, bucket]:
            allowed = group.loaded if group.prefix_bucket else range(self._num_replicas)
            free = [r for r in allowed if chosen[r] is None and index in self._free_held[r]]
            if free:
                chosen[free[0]] = (group, member)
        if not any(chosen):
            return None
        return AheadWork(
            prefix_bucket=prefix_bucket, bucket=bucket, index=index, replicas=tuple(chosen)
        )

    def _take_pairs(self, work: FoldWork) -> None:
        for lane in work.lanes:
            if lane.path is Path.STREAM and lane.group.pair is None:
                lane.group.pair = self._free_pairs.pop()
