"""What happens to a train step (events) and what is to be done about it (commands).

Frozen records of JSON values, so that an event can be written to the journal before it is acted on.
The coordinator and the simulator produce events from the world or from a virtual clock;
`StepMachine` turns them into commands.
"""

from __future__ import annotations

import dataclasses
import enum

from thundersync_jax.trajectory import TrajectoryKey, check_reward


class Mode(enum.Enum):
    STREAM = "stream"
    BARRIER = "barrier"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A machine begins, fresh or after a restart: what it is made from. The first line of its
    journal.

    Attributes:
      max_open_groups: groups that may have a trajectory without a verdict at one time.
      max_empty_steps: this many empty steps in a row stop the run.
      policy_version: of the weights that the first step samples with.
      empty_steps: empty steps in a row before the start, restored from a checkpoint.
    """

    mode: Mode
    max_open_groups: int
    max_empty_steps: int
    policy_version: int = 0
    empty_steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOpened:
    """A step begins: `groups` tasks of `group_size` trajectories, sampled by `policy_version`.

    Attributes:
      refills: groups that may be opened besides, each in place of one whose rewards tied.
    """

    step: int
    policy_version: int
    groups: int
    group_size: int
    refills: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.group_size < 1 or self.refills < 0:
            raise ValueError(
                f"step {self.step} needs at least one group of at least one trajectory, "
                f"got {self.groups} groups of {self.group_size} and {self.refills} refills"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnScored:
    """The trajectory's turn number `turn`, counted from 0, is finished, and scored where a teacher
    scores turns.
    """

    key: TrajectoryKey
    turn: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentFinal:
    """The trajectory's tokens will not change any more; its verifier may still run."""

    key: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardKnown:
    """Terminal: the trajectory has a finite reward."""

    key: TrajectoryKey
    reward: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", check_reward(self.reward))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptFailed:
    """Terminal: the trajectory has no reward, for a reason that names what broke."""

    key: TrajectoryKey
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """Terminal for every trajectory that has no verdict `timeout_s` after the step opened."""

    timeout_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerIdle:
    """The learner has run everything the step gave it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Updated:
    """The optimizer ran; or nothing had a gradient (`is_empty`) and the version is unchanged."""

    policy_version: int
    is_empty: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The engines serve `policy_version`."""

    policy_version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Abandoned:
    """The step is given up; nothing of it is trained on."""

    reason: str


Event = (
    StepOpened
    | TurnScored
    | ContentFinal
    | RewardKnown
    | AttemptFailed
    | DeadlinePassed
    | LearnerIdle
    | Updated
    | Published
    | Abandoned
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseLearner:
    """From now on the learner may run programs of this step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenGroup:
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Start the attempt."""

    key: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class CancelAttempt:
    """Stop the attempt; nothing that it says from now on counts."""

    key: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddTurn:
    """Give the learner one finished turn of the trajectory."""

    key: TrajectoryKey
    turn: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddTrajectory:
    """Give the learner the trajectory's tokens."""

    key: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetReward:
    key: TrajectoryKey
    reward: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetFailed:
    key: TrajectoryKey
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """Run the optimizer; every group of the step is closed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Publish:
    """Give the engines the new weights."""

    policy_version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseStep:
    """The step is over; the next may open."""

    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRun:
    """No further step may open."""

    reason: str


Command = (
    ReleaseLearner
    | OpenGroup
    | Dispatch
    | CancelAttempt
    | AddTurn
    | AddTrajectory
    | SetReward
    | SetFailed
    | Update
    | Publish
    | CloseStep
    | StopRun
)
