"""The trajectories of one step on the host: what stage each is at, and where its group lives.

Invariants:
  * A member moves EXPECTED -> CONTENT -> READY -> DONE, or to FAILED from either of the first two;
    nothing else. `_TRANSITIONS` is the only table, and a second terminal event is refused by name.
  * A group closes once all its members are terminal and everything that has a gradient has been
    folded: first its pairs, then its prompt, each on every replica that holds one.
  * No terminal event depends on anything here: this module never waits.

No jax: `schedule.py` picks the next call from these records, the learner runs it.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from thundersync_jax.learner.buckets import Example
from thundersync_jax.losses.advantages import GroupMoments, group_moments


class LearnerError(ValueError):
    """A call that the learner cannot accept: who, what was expected, and what to do."""


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
    AHEAD = "ahead"  # its verdict was open: computed, held, and folded when the verdict came


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Where a gradient computed ahead of its verdict waits."""

    replica: int
    index: int


@dataclasses.dataclass(eq=False)
class Member:
    """One trajectory of a group."""

    index: int
    stage: Stage = Stage.EXPECTED
    example: Example | None = None
    num_action_tokens: int = 0
    bucket: int = 0  # 0: there is no gradient
    reward: float | None = None
    failure: str | None = None
    path: Path | None = None
    held: Held | None = None
    was_held: bool = False

    @property
    def is_terminal(self) -> bool:
        return self.stage in (Stage.READY, Stage.DONE, Stage.FAILED)

    def advance(self, stage: Stage, name: str) -> None:
        """Moves along `_TRANSITIONS`; LearnerError names the member otherwise."""
        if stage not in _TRANSITIONS[self.stage]:
            raise LearnerError(
                f"{name} is {self.stage.value}, so this call is out of order: a trajectory gets "
                "its content once (add_trajectory), and then exactly one of a reward (set_reward) "
                "and a failure (set_failed)"
            )
        self.stage = stage


@dataclasses.dataclass(eq=False)
class Group:
    """The trajectories of one task.

    Attributes:
      prefix_bucket: padded length of the shared prompt; 0 when every member runs it itself.
      home: the replica that holds the shared prompt first, or the only one of a group that stays on
        one.
      slots: replica -> prompt slot reserved there.
      loaded: replicas whose slot holds the prompt's keys and values.
      pairs: replica -> index of the group's pair (G1, G2) there, while it streams.
      center: c of G1 = sum (r_i - c) g_i; where none is given, the first reward that arrives. The
        sum is the same for every c, but only one near the rewards leaves no large terms that
        cancel.
    """

    group_id: int
    task_id: str
    prompt_ids: np.ndarray
    members: list[Member]
    prefix_bucket: int = 0
    home: int = 0
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    loaded: set[int] = dataclasses.field(default_factory=set)
    pairs: dict[int, int] = dataclasses.field(default_factory=dict)
    center: float | None = None
    is_closed: bool = False

    @property
    def prefix_ids(self) -> np.ndarray:
        """What is shared: the prompt without its last token, which begins every branch."""
        return self.prompt_ids[:-1]

    @property
    def is_complete(self) -> bool:
        """Every member is terminal: the moments are final."""
        return all(m.is_terminal for m in self.members)

    @property
    def is_accumulated(self) -> bool:
        """Nothing is left but the close."""
        return all(m.stage in (Stage.DONE, Stage.FAILED) for m in self.members)

    def set_reward(self, member: Member, reward: float) -> None:
        """Gives a member its verdict; raises LearnerError unless it waits for one."""
        member.advance(Stage.READY, self.name(member))
        if self.center is None:
            self.center = reward
        member.reward = reward

    def moments(self, kind: str) -> GroupMoments:
        """Moments over the members that have a reward, in index order."""
        return group_moments([m.reward for m in self.members if m.reward is not None], kind)

    def name(self, member: Member | None = None) -> str:
        suffix = "" if member is None else f" index {member.index}"
        return f"group {self.group_id} (task {self.task_id!r}){suffix}"

    def waiting(self) -> list[str]:
        """The members that keep the group open, by name."""
        return [
            f"{self.name(m)}: {m.stage.value}"
            for m in self.members
            if m.stage not in (Stage.DONE, Stage.FAILED)
        ]
