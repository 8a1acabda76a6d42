"""Host bookkeeping of one step: what stage every trajectory is at, and which call is due next.

Invariants:
  * A member moves EXPECTED -> CONTENT -> READY -> DONE, or to FAILED from either of the first two;
    nothing else. `_TRANSITIONS` is the only table, and a second terminal event is refused by name.
  * A group closes once all its members are terminal and everything that has a gradient has been
    folded.
  * A group streams only while it holds a buffer. With no buffer its members wait (hold) until the
    group's rewards are all known and then go direct. So every group closes with any number of
    buffers, 0 included.
  * No terminal event depends on anything here: this module never waits.

No jax: the learner runs what `next_work` returns and reports it with `mark_done`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import numpy as np

from thundersync_jax.learner.buckets import Example
from thundersync_jax.losses.advantages import GroupMoments, group_moments


class LearnerError(ValueError):
    """A call that the learner cannot accept: names the group and member, what was expected and what
    to do.
    """


class Stage(enum.Enum):
    EXPECTED = "waiting for content"
    CONTENT = "waiting for a reward"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


_TRANSITIONS = {
    Stage.EXPECTED: {Stage.CONTENT, Stage.FAILED},
    Stage.CONTENT: {Stage.READY, Stage.FAILED},
    Stage.READY: {Stage.DONE},
    Stage.DONE: set(),
    Stage.FAILED: set(),
}


class Path(enum.Enum):
    """How a trajectory's gradient reached the batch sum. The result is the same."""

    DIRECT = "direct"  # the group's rewards were all known: straight to the batch accumulator
    STREAM = "stream"  # the group was open: into its pair (G1, G2)


@dataclasses.dataclass
class Member:
    """One trajectory of a group."""

    index: int
    stage: Stage = Stage.EXPECTED
    example: Example | None = None
    num_action_tokens: int = 0
    bucket: int = 0
    reward: float | None = None
    failure: str | None = None
    path: Path | None = None
    was_held: bool = False

    @property
    def is_terminal(self) -> bool:
        return self.stage in (Stage.READY, Stage.DONE, Stage.FAILED)


@dataclasses.dataclass
class Group:
    """The trajectories of one task. `buffer` indexes the pool while the group streams."""

    group_id: int
    task_id: str
    prompt_ids: np.ndarray
    members: list[Member]
    buffer: int | None = None
    is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        """Every member is terminal: the moments are final."""
        return all(m.is_terminal for m in self.members)

    def moments(self, kind: str) -> GroupMoments:
        """Moments over the members that have a reward, in index order."""
        return group_moments([m.reward for m in self.members if m.reward is not None], kind)

    def name(self, member: Member | None = None) -> str:
        suffix = "" if member is None else f" index {member.index}"
        return f"group {self.group_id} (task {self.task_id!r}){suffix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldWork:
    """One accumulate call: up to K trajectories of one bucket on one path."""

    path: Path
    bucket: int
    members: tuple[tuple[Group, Member], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseWork:
    """One close_group call: the group's pair goes into the batch accumulator."""

    group: Group


class GroupLedger:
    """The groups of the current step and the free buffers of the pool."""

    def __init__(self, pool_size: int, num_lanes: int, advantage: str) -> None:
        self._num_lanes = num_lanes
        self._advantage = advantage
        self._free_buffers = list(range(pool_size))
        self._groups: dict[int, Group] = {}

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def open(self, group_id: int, task_id: str, prompt_ids: np.ndarray, group_size: int) -> None:
        members = [Member(index=i) for i in range(group_size)]
        self._groups[group_id] = Group(group_id, task_id, prompt_ids, members)

    def clear(self) -> None:
        """Forgets the step; every buffer is free again."""
        self._free_buffers += [g.buffer for g in self.groups if g.buffer is not None]
        self._groups = {}

    def find(self, group_id: int, index: int) -> tuple[Group, Member]:
        """The member, or LearnerError when there is none."""
        group = self._groups.get(group_id)
        if group is None:
            known = sorted(self._groups)
            raise LearnerError(f"group {group_id!r} is not open; open groups: {known}")
        if not 0 <= index < len(group.members):
            raise LearnerError(
                f"{group.name()} has indices 0 to {len(group.members) - 1}, got {index}"
            )
        return group, group.members[index]

    def advance(self, group: Group, member: Member, stage: Stage) -> None:
        """Moves a member along `_TRANSITIONS`."""
        if stage not in _TRANSITIONS[member.stage]:
            raise LearnerError(
                f"{group.name(member)} is {member.stage.value!r} and cannot become "
                f"{stage.value!r}: a trajectory "
                "gets its content once, and then exactly one of a reward or a failure"
            )
        member.stage = stage

    def next_work(self) -> FoldWork | CloseWork | None:
        """The call that is due: closing first, for it frees a buffer; then the shape with most
        ready tokens.
        """
        for group in self._groups.values():
            if self._settle(group) and group.buffer is not None:
                return CloseWork(group=group)
        best = max(self._candidates(), key=_num_tokens, default=None)
        if best is not None and best.path is Path.STREAM:
            group = best.members[0][0]
            if group.buffer is None:
                group.buffer = self._free_buffers.pop()
        return best

    def mark_done(self, work: FoldWork | CloseWork) -> None:
        """Records that the call's result is in the accumulators."""
        if isinstance(work, CloseWork):
            assert work.group.buffer is not None
            self._free_buffers.append(work.group.buffer)
            work.group.buffer = None
            work.group.is_closed = True
            return
        for group, member in work.members:
            self.advance(group, member, Stage.DONE)
            member.path = work.path

    def unfinished(self) -> list[str]:
        """What keeps open groups open, by name."""
        return [
            f"{group.name(member)}: {member.stage.value}"
            for group in self._groups.values()
            if not group.is_closed
            for member in group.members
            if member.stage not in (Stage.DONE, Stage.FAILED)
        ]

    def _settle(self, group: Group) -> bool:
        """True when only the close is left. A group without a pair closes here."""
        if group.is_closed or not group.is_complete:
            return False
        is_zero = group.moments(self._advantage).is_zero_variance
        for member in group.members:
            has_gradient = member.example is not None and member.example.num_positions > 0
            if member.stage is Stage.READY and (is_zero or not has_gradient):
                self.advance(group, member, Stage.DONE)  # a coefficient or score of exactly zero
                member.path = Path.DIRECT
        if any(m.stage is Stage.READY for m in group.members):
            return False
        group.is_closed = group.buffer is None
        return not group.is_closed

    def _candidates(self) -> Iterator[FoldWork]:
        """Every call that could run now, the direct ones first."""
        direct: dict[int, list[tuple[Group, Member]]] = {}
        stream: dict[tuple[int, int], list[tuple[Group, Member]]] = {}
        for group in self._groups.values():
            is_complete = group.is_complete
            for member in group.members:
                if member.stage is not Stage.READY or member.bucket == 0:
                    continue
                if is_complete:
                    direct.setdefault(member.bucket, []).append((group, member))
                elif group.buffer is not None or self._free_buffers:
                    stream.setdefault((group.group_id, member.bucket), []).append((group, member))
                else:
                    member.was_held = True
        for bucket, members in direct.items():
            yield self._fold(Path.DIRECT, bucket, members)
        for (_, bucket), members in stream.items():
            yield self._fold(Path.STREAM, bucket, members)

    def _fold(self, path: Path, bucket: int, members: list[tuple[Group, Member]]) -> FoldWork:
        return FoldWork(path=path, bucket=bucket, members=tuple(members[: self._num_lanes]))


def _num_tokens(work: FoldWork) -> int:
    return sum(m.example.num_positions for _, m in work.members if m.example is not None)
