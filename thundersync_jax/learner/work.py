"""Program calls as records: what `schedule.py` decides and the learner runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from thundersync_jax.learner.groups import Cohort, Group, Member, Path
from thundersync_jax.learner.turn_schedule import SegmentWork


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneWork:
    """One lane of a call: one gradient of one trajectory, or of several that are packed.

    Attributes:
      members: several only where one combination of their gradients is wanted: on the direct path,
        and of equal rewards.
      pair: index of the cohort's pair on the lane's replica; of paths that go through one.
      held: index of the held buffer on the lane's replica; AHEAD only.
    """

    group: Group
    members: tuple[Member, ...]
    path: Path
    pair: int | None = None
    held: int | None = None

    @property
    def member(self) -> Member:
        """The trajectory of a lane that is not packed."""
        (member,) = self.members
        return member

    @property
    def num_positions(self) -> int:
        return sum(m.example.num_positions for m in self.members if m.example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldWork:
    """One accumulate call: on every replica up to K lanes of one shape.

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
        """Indices of the pairs that the call adds to, besides the batch accumulator."""
        return _pairs(self.lanes)

    @property
    def kind(self) -> str:
        """The path that most of the lanes take, for the work log."""
        paths = [lane.path.value for lane in self.lanes]
        return max(paths, key=paths.count)

    @property
    def num_tokens(self) -> int:
        """Tokens whose verdict is known."""
        return sum(lane.num_positions for lane in self.lanes if lane.path is not Path.AHEAD)


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
        """Indices of the pairs that the call adds to, besides the batch accumulator."""
        return _pairs(lane for lane in self.replicas if lane is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptWork:
    """One prompt call: a group's prompt, forward or backward, on every replica that has one."""

    prefix_bucket: int
    is_backward: bool
    replicas: tuple[Group | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseWork:
    """One close_group call: pair `index` of every replica whose cohort is accumulated there."""

    index: int
    replicas: tuple[Cohort | None, ...]


Work = FoldWork | BindWork | PromptWork | CloseWork | SegmentWork


def _pairs(lanes: Iterable[LaneWork]) -> list[int]:
    return sorted({lane.pair for lane in lanes if lane.pair is not None})
