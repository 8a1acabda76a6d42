"""Program calls as records: what `schedule.py` decides and the learner runs."""

from __future__ import annotations

import dataclasses

from thundersync_jax.learner.groups import Group, Member, Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneWork:
    """One trajectory in one lane."""

    group: Group
    member: Member
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldWork:
    """One accumulate call: on every replica up to K trajectories of one shape.

    Attributes:
      replicas: the lanes of every replica.
    """

    prefix_bucket: int
    bucket: int
    replicas: tuple[tuple[LaneWork, ...], ...]

    @property
    def lanes(self) -> list[LaneWork]:
        return [lane for lanes in self.replicas for lane in lanes]

    @property
    def pairs(self) -> list[int]:
        """Pool pairs that the call adds to, besides the batch accumulator."""
        streaming = {w.group.pair for w in self.lanes if w.path is Path.STREAM}
        return sorted(pair for pair in streaming if pair is not None)

    @property
    def num_tokens(self) -> int:
        return sum(w.member.example.num_positions for w in self.lanes if w.member.example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AheadWork:
    """One accumulate call into held buffer `index`: at most one trajectory a replica."""

    prefix_bucket: int
    bucket: int
    index: int
    replicas: tuple[tuple[Group, Member] | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BindWork:
    """One bind call: the verdicts of held buffer `index` came, or it is dropped.

    Attributes:
      replicas: what lies there; a member without a reward is dropped.
    """

    index: int
    replicas: tuple[LaneWork | None, ...]

    @property
    def pairs(self) -> list[int]:
        """Pool pairs that the call adds to, besides the batch accumulator."""
        lanes = [w for w in self.replicas if w is not None and w.path is Path.STREAM]
        return sorted({w.group.pair for w in lanes if w.group.pair is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptWork:
    """One prompt call: a group's prompt, forward or backward, on every replica that has one."""

    prefix_bucket: int
    is_backward: bool
    replicas: tuple[Group | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseWork:
    """One close_group call: the group's pair goes into the batch accumulator."""

    group: Group


Work = FoldWork | AheadWork | BindWork | PromptWork | CloseWork
