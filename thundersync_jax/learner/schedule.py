"""Which program call is due next, on every replica at once. Pure host decisions, no jax.

Invariants:
  * A cohort (a group, or all of the step) streams on a replica only while it holds a pair there;
    where none is free its members wait (hold), at the latest until the cohort's rewards are all
    known: then they go direct. So do all members where the score reads its advantage. A group
    without a prompt slot runs its prompt in every member. So every group closes with pools of any
    size, 0 included.
  * What only owes reward-free terms (its attempt failed, its group has no advantage) runs for them.
  * A group may have partial sums on several replicas: each closes its own pair and its own share of
    the prompt.
  * Closing comes first, for it frees buffers; then held gradients whose verdict came; then the
    shape with most ready tokens. Prompts are loaded before they hold something up, and otherwise
    when nothing else is due. Gradients ahead of their verdicts come after: in lanes that would stay
    empty, or when nothing is ready.
  * Turns of growing trajectories come last: `turns_ahead.py`. What is left of one once its content
    is final comes before gradients ahead.

The same object drives the learner and the simulation of its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from thundersync_jax.learner.filling import Filling
from thundersync_jax.learner.groups import Cohort, Group, Held, Member, Path, Stage
from thundersync_jax.learner.packing import pack
from thundersync_jax.learner.prompt_schedule import PromptSchedule
from thundersync_jax.learner.turn_schedule import SegmentWork, TurnSchedule
from thundersync_jax.learner.turns_ahead import TurnsAhead
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, LaneWork, PromptWork, Work
from thundersync_jax.losses.objective import Objective, Streams

Ready = tuple[Group, tuple[Member, ...], Path]


class Schedule:
    """The groups of the current step and the free buffers.

    Attributes:
      turns: of growing trajectories; the learner says there what came.

    Args:
      num_pairs: pairs (G1, G2) of every replica.
      num_slots: prompt slots of every replica.
      num_held: gradients that every replica can hold ahead of their verdicts.
      pairs_per_call: pair indices that one call can reach.
      lanes_per_call: K by bucket.
      pack_buckets: buckets of lanes that several trajectories may share.
      paired: paths that go through the cohort's pair; a trajectory waits for a free one.
      turns: decides which turns run ahead of their content; None runs none.
      is_local: a group stays on one replica and waits there for a prompt slot, so that content
        alone decides which program computes its gradients.
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
        objective: Objective,
        pack_buckets: Sequence[int] = (),
        paired: Collection[Path] = (Path.STREAM,),
        is_local: bool = False,
        turns: TurnSchedule | None = None,
    ) -> None:
        self._num_replicas = num_replicas
        self._pairs_per_call = pairs_per_call
        self._lanes_per_call = lanes_per_call
        self._objective = objective
        self._pack_buckets = tuple(pack_buckets)
        self._paired = paired
        self._is_local = is_local
        self._free_pairs = [set(range(num_pairs)) for _ in range(num_replicas)]
        self._prompts = PromptSchedule(
            num_replicas=num_replicas, num_slots=num_slots, is_local=is_local
        )
        self._free_held = [set(range(num_held)) for _ in range(num_replicas)]
        self.turns = TurnsAhead(turns, self._free_held)
        self._groups: dict[int, Group] = {}
        self.begin()

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def get(self, group_id: int) -> Group | None:
        return self._groups.get(group_id)

    def open(self, group: Group) -> None:
        """Adds a group; reserves a prompt slot if it shares."""
        is_batch = self._objective.streams is Streams.BATCH
        cohort = self._step if is_batch else self._cohort()
        cohort.join(group)
        cohort.is_sealed = not is_batch
        self._prompts.open(group, self.groups)
        self._groups[group.group_id] = group

    def _cohort(self) -> Cohort:
        return Cohort(objective=self._objective, center=self._center)

    def seal(self) -> None:
        """No further group opens in this step: what compares all of it is final."""
        self._step.is_sealed = True

    def begin(self, center: float | None = None) -> None:
        """Begins a step and forgets the last one: every buffer is free.

        Args:
          center: c of every cohort's G1; None for the first of its rewards.
        """
        for cohort in dict.fromkeys(group.cohort for group in self.groups):
            for replica, pair in cohort.pairs.items():
                self._free_pairs[replica].add(pair)
        for group in self.groups:
            self._prompts.release(group)
            for member in group.members:
                if member.held is not None:
                    self._free_held[member.held.replica].add(member.held.index)
        self.turns.clear()
        self._groups = {}
        self._center = center
        self._step = self._cohort()

    def unfinished(self) -> list[str]:
        """The members that still need a verdict, by name."""
        return [name for group in self.groups for name in group.waiting()]

    def next_work(self) -> Work | None:
        """The call that is due, its buffers taken; None when nothing is ready."""
        self.turns.settle()
        closing = [g for g in self.groups if self._ready_to_close(g)]
        for group in self.groups:  # what has just closed left its slot
            self._prompts.reserve(group)
        cohorts = dict.fromkeys(group.cohort for group in closing)
        close = self._close([c for c in cohorts if c.pairs and c.is_accumulated])
        if close is not None:
            return close
        backward = self._prompts.work([g for g in closing if g.loaded], is_backward=True)
        if backward is not None:
            return backward
        binding = self._binding()
        if binding is not None:
            return binding
        best = max(self._folds(), key=lambda f: (f.num_tokens, len(f.lanes)), default=None)
        unloaded = [g for g in self.groups if self._prompts.is_due(g)]
        waiting = [g for g in unloaded if any(m.stage is Stage.READY for m in g.members)]
        if waiting or best is None or not best.num_tokens:
            ended = None if waiting else self.turns.closing_work()
            forward = ended or self._prompts.work(waiting or unloaded, is_backward=False)
            if forward is not None:
                return forward
        if best is None:
            return self.turns.growing_work(self.groups)
        spread = self._prompts.spread(best, self._free_pairs)
        if spread is None:
            self._take_buffers(best)
        return spread or best

    def mark_done(self, work: Work) -> None:
        """Records that the call's result is in the accumulators."""
        match work:
            case CloseWork(replicas=cohorts):
                for replica, cohort in enumerate(cohorts):
                    if cohort is not None:
                        self._free_pairs[replica].add(cohort.pairs.pop(replica))
                        for closed in cohort.groups:
                            self._settle(closed)
            case PromptWork():
                self._prompts.mark_done(work)
                for group in work.replicas if work.is_backward else ():
                    if group is not None:
                        self._settle(group)
            case BindWork(index=index, replicas=bound):
                for replica, lane in enumerate(bound):
                    if lane is not None:
                        lane.member.held = None
                        self._free_held[replica].add(index)
                        if lane.member.reward is not None:
                            lane.member.advance(Stage.DONE, lane.group.name(lane.member))
                            lane.member.path = Path.AHEAD
            case SegmentWork():
                self.turns.mark_done(work)
            case FoldWork():
                for lane in work.lanes:
                    for member in lane.members:
                        member.owes_terms = False
                        if lane.path is not Path.AHEAD and member.stage is not Stage.FAILED:
                            member.advance(Stage.DONE, lane.group.name(member))
                            is_terms = lane.path is Path.TERMS
                            member.path = Path.DIRECT if is_terms else lane.path

    # -- closing --------------------------------------------------------------------------------

    def _ready_to_close(self, group: Group) -> bool:
        """Finishes what has no gradient; whether the group's buffers are all that is left of it."""
        if group.is_closed or not group.is_complete:
            return False
        if any(m.held is not None for m in group.members):
            return False
        is_zero = group.is_zero
        for member in group.members:
            is_nothing = is_zero and not member.owes_terms
            if member.stage is Stage.READY and (is_nothing or member.bucket == 0):
                member.advance(Stage.DONE, group.name(member))  # coefficient or score exactly zero
                member.path = Path.DIRECT
        if not group.is_accumulated:
            return False
        if not group.has_gradient:
            self._prompts.release(group)  # nothing to differentiate through the prompt
        self._settle(group)
        return not group.is_closed

    def _close(self, cohorts: Sequence[Cohort]) -> CloseWork | None:
        """The pairs of one index, on every replica where that index closes."""
        found: dict[int, dict[int, Cohort]] = {}
        for cohort in cohorts:
            for replica, pair in cohort.pairs.items():
                found.setdefault(pair, {})[replica] = cohort
        if not found:
            return None
        index = max(found, key=lambda pair: len(found[pair]))
        replicas = tuple(found[index].get(r) for r in range(self._num_replicas))
        return CloseWork(index=index, replicas=replicas)

    def _settle(self, group: Group) -> None:
        """Closes a group that holds nothing any more."""
        self._prompts.release_unloaded(group)
        group.is_closed = not group.cohort.pairs and not group.slots

    # -- folding --------------------------------------------------------------------------------

    def _folds(self) -> Iterator[FoldWork]:
        """The best call of every shape that has something to run."""
        ready: dict[tuple[int, int], list[Ready]] = {}
        early: dict[tuple[int, int], list[tuple[Group, Member]]] = {}
        for group in self.groups:
            if group.is_closed or (group.prefix_bucket and not group.loaded):
                continue
            for bucket, members, path in self._ready(group):
                ready.setdefault((group.prefix_bucket, bucket), []).append((group, members, path))
            for member in group.members if self._objective.is_linear else ():
                if member.bucket and member.held is None and member.stage is Stage.CONTENT:
                    shape = (group.prefix_bucket, member.bucket)
                    early.setdefault(shape, []).append((group, member))
        for shape in dict.fromkeys((*ready, *early)):
            fold = self._fill(*shape, ready.get(shape, []), early.get(shape, []))
            if fold.lanes:
                yield fold

    def _ready(self, group: Group) -> Iterator[tuple[int, tuple[Member, ...], Path]]:
        """The group's lanes that can run now, as (bucket, members, path)."""
        is_complete = group.is_complete
        path = Path.DIRECT if is_complete else Path.STREAM
        is_zero = is_complete and group.is_zero
        for member in group.members:
            has_no_share = is_zero or member.stage is Stage.FAILED
            if has_no_share and member.is_terminal and member.owes_terms and member.held is None:
                yield member.bucket, (member,), Path.TERMS
        if is_zero or not (is_complete or self._objective.is_linear):
            return
        ready = [m for m in group.members if m.stage is Stage.READY and m.bucket and not m.held]
        for bucket, members in pack(ready, self._pack_buckets, is_direct=is_complete):
            yield bucket, members, path

    def _fill(
        self,
        prefix_bucket: int,
        bucket: int,
        ready: list[Ready],
        early: list[tuple[Group, Member]],
    ) -> FoldWork:
        """Direct work first, then the open groups with most ready, then what has no verdict."""
        filling = Filling(
            prefix_bucket,
            bucket,
            capacity=self._lanes_per_call(bucket),
            pairs_per_call=self._pairs_per_call,
            free_pairs=self._free_pairs,
            paired=self._paired,
            is_local=self._is_local,
        )
        counts: dict[int, int] = {}
        for group, _, _ in ready:
            counts[group.group_id] = counts.get(group.group_id, 0) + 1
        for group, members, path in sorted(
            ready, key=lambda r: (r[2] is Path.STREAM, -counts[r[0].group_id], r[0].group_id)
        ):
            if path in self._paired and not filling.has_pair(group):
                for member in members:
                    member.was_held = True
            else:
                filling.add(group, members, path)
        most = max(filling.most_lanes, 1)
        free_held = [set(free) for free in self._free_held]
        for group, member in early:
            filling.add_ahead(group, member, free_held, most)
        return filling.work()

    def _take_buffers(self, fold: FoldWork) -> None:
        for replica, lanes in enumerate(fold.replicas):
            for lane in lanes:
                if lane.pair is not None:
                    lane.group.cohort.pairs[replica] = lane.pair
                    self._free_pairs[replica].discard(lane.pair)
                if lane.held is not None:
                    lane.member.held = Held(replica=replica, index=lane.held)
                    self._free_held[replica].discard(lane.held)

    # -- gradients ahead of their verdicts ------------------------------------------------------

    def _binding(self) -> BindWork | None:
        """Held gradients whose verdict came: those of one index, on every replica that has one."""
        ready: dict[int, dict[int, LaneWork]] = {}
        for group in self.groups:
            for member in group.members:
                if member.held is not None and member.is_terminal and member.turns is None:
                    lane = self._bound(group, member, member.held)
                    if lane is not None:
                        ready.setdefault(member.held.index, {})[member.held.replica] = lane
        if not ready:
            return None
        index = max(ready, key=lambda i: len(ready[i]))
        chosen: list[LaneWork | None] = [None] * self._num_replicas
        reached: set[int] = set()
        for replica, lane in ready[index].items():
            if lane.pair is not None:
                if lane.pair not in reached and len(reached) == self._pairs_per_call:
                    continue
                reached.add(lane.pair)
                lane.group.cohort.pairs[replica] = lane.pair
                self._free_pairs[replica].discard(lane.pair)
            chosen[replica] = lane
        return BindWork(index=index, replicas=tuple(chosen))

    def _bound(self, group: Group, member: Member, held: Held) -> LaneWork | None:
        """Where a held gradient goes; None while it must wait for a pair on its replica."""
        path = Path.DIRECT if group.is_complete else Path.STREAM
        if member.reward is None or path not in self._paired:
            return LaneWork(group=group, members=(member,), path=Path.DIRECT)
        free = self._free_pairs[held.replica]
        pair = group.cohort.pairs.get(held.replica, min(free, default=None))
        if pair is None:
            member.was_held = True
            return None
        return LaneWork(group=group, members=(member,), path=path, pair=pair)
