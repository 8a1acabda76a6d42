"""Turns of growing trajectories, ahead of their content: which run, and into which held buffer.

Invariants:
  * With its first turn a trajectory takes a cache and a held buffer of the same replica; a buffer
    is not taken as the last one while some final content could use it.
  * Once its content is final, what is left of it runs: the segments that did not, and the replays.
    One that took no cache by then is like any other trajectory.
  * Its turns are forgotten when they are complete, when the attempt failed, or when its group has
    no advantage. Only then may the schedule bind its held gradient, or drop it.

No jax: `schedule.py` asks when nothing else is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thundersync_jax.learner.groups import Group, Held, Member, Stage
from thundersync_jax.learner.turn_schedule import SegmentWork, TurnSchedule
from thundersync_jax.learner.turns import TurnSequence


class TurnsAhead:
    """The members whose turns may run.

    Args:
      turns: the caches; None where no turn is heard of.
      free_held: held buffers of every replica, which the schedule takes and gives back too.
    """

    def __init__(self, turns: TurnSchedule | None, free_held: Sequence[set[int]]) -> None:
        self._turns = turns
        self._free_held = free_held
        self._growing: dict[TurnSequence, tuple[Group, Member]] = {}

    def grow(self, group: Group, member: Member) -> None:
        """The member's turns may run from now on."""
        assert self._turns is not None and member.turns is not None
        self._growing[member.turns] = group, member
        self._turns.add(member.turns)

    def end(self, member: Member) -> None:
        """The member's content is final."""
        if member.turns is not None:
            member.is_by_turns = member.turns.is_closed = member.turns.cache is not None
            if not member.is_by_turns:
                self._forget(member.turns)

    def member_of(self, sequence: TurnSequence) -> Member:
        return self._growing[sequence][1]

    def clear(self) -> None:
        """Forgets the step; the held buffers are the schedule's to free."""
        for sequence in list(self._growing):
            self._forget(sequence)

    def settle(self) -> None:
        """Forgets the turns of which nothing more is wanted."""
        if self._turns is None:
            return
        self._turns.settle()
        for sequence, (group, member) in list(self._growing.items()):
            is_dropped = member.stage is Stage.FAILED or (group.is_complete and group.is_zero)
            if sequence.is_done or is_dropped:
                self._forget(sequence)

    def closing_work(self) -> SegmentWork | None:
        """The call that is due of trajectories whose content is final."""
        return None if self._turns is None else self._turns.closing_work()

    def growing_work(self, groups: Iterable[Group]) -> SegmentWork | None:
        """The call that is due of growing trajectories, its caches and held buffers taken."""
        if self._turns is None:
            return None
        members = [member for group in groups for member in group.members]
        is_wanted = any(m.stage is Stage.CONTENT and m.bucket and not m.held for m in members)
        most = [max(len(free) - is_wanted, 0) for free in self._free_held]
        work = self._turns.growing_work(most)
        if work is not None:
            for replica, lanes in enumerate(work.replicas):
                for lane in lanes:
                    self._take(lane.sequence, replica)
        return work

    def mark_done(self, work: SegmentWork) -> None:
        """Records that the call's results are in held buffers, caches and ledgers."""
        assert self._turns is not None
        self._turns.mark_done(work)

    def _take(self, sequence: TurnSequence, replica: int) -> None:
        member = self.member_of(sequence)
        if member.held is None:
            sequence.buffer = min(self._free_held[replica])
            self._free_held[replica].discard(sequence.buffer)
            member.held = Held(replica=replica, index=sequence.buffer)

    def _forget(self, sequence: TurnSequence) -> None:
        assert self._turns is not None
        self._turns.remove(sequence)
        _, member = self._growing.pop(sequence)
        member.turns = None
