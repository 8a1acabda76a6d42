"""The state of one train step: events in, commands out. No clock, no I/O.

Invariants:
  * Every trajectory of a step gets exactly one of SetReward and SetFailed, unless the step is
    abandoned. A failure is never a reward of zero.
  * A group is opened once and dispatched whole; it closes with its last verdict, and then the next
    may open. While refills are left, one whose rewards tie adds another to the step.
  * Stream mode releases the learner when the step opens, barrier mode after the last verdict;
    nothing else differs.
  * The optimizer runs once a step, after the last verdict and the last program. An empty step
    publishes nothing and keeps its version; `max_empty_steps` of them in a row stop the run, and at
    once one that used all its refills and whose groups all tie.
  * No verdict waits for the learner, so every step ends.

Every change of state goes through `TRANSITIONS`; what it does not list raises StateError. The
coordinator drives a machine from the world, the simulator from a virtual clock, `journal.replay`
from a file.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping, Sequence
from typing import TypeVar, assert_never

from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.admission import is_tied, num_groups_to_open
from thundersync_jax.trajectory import TrajectoryKey


class StateError(RuntimeError):
    """An event that the present state does not allow: a bug in what produced it."""


class TrajectoryState(enum.Enum):
    WAITING = "waiting for its group to open"
    RUNNING = "running"
    FINAL = "waiting for its verifier"
    REWARDED = "rewarded"
    FAILED = "failed"


class GroupState(enum.Enum):
    WAITING = "waiting to open"
    OPEN = "open"
    CLOSED = "closed"


class StepState(enum.Enum):
    IDLE = "between steps"
    ROLLING_OUT = "waiting for verdicts"
    DRAINING = "waiting for the learner's programs"
    UPDATING = "waiting for the optimizer"
    PUBLISHING = "waiting for the engines to take the weights"
    STOPPED = "stopped"


class Trigger(enum.Enum):
    OPEN = "opening"
    TURN = "a finished turn"
    CONTENT = "final content"
    REWARD = "a reward"
    FAILURE = "a failure"
    LAST_VERDICT = "the last verdict"
    LEARNER_IDLE = "an idle learner"
    UPDATE = "an update"
    EMPTY_UPDATE = "an empty update"
    PUBLICATION = "a publication"
    STOP = "a stop"


State = TrajectoryState | GroupState | StepState
S = TypeVar("S", TrajectoryState, GroupState, StepState)

TRANSITIONS: Mapping[tuple[State, Trigger], State] = {
    (TrajectoryState.WAITING, Trigger.OPEN): TrajectoryState.RUNNING,
    (TrajectoryState.WAITING, Trigger.FAILURE): TrajectoryState.FAILED,
    (TrajectoryState.RUNNING, Trigger.TURN): TrajectoryState.RUNNING,
    (TrajectoryState.RUNNING, Trigger.CONTENT): TrajectoryState.FINAL,
    (TrajectoryState.RUNNING, Trigger.FAILURE): TrajectoryState.FAILED,
    (TrajectoryState.FINAL, Trigger.REWARD): TrajectoryState.REWARDED,
    (TrajectoryState.FINAL, Trigger.FAILURE): TrajectoryState.FAILED,
    (GroupState.WAITING, Trigger.OPEN): GroupState.OPEN,
    (GroupState.OPEN, Trigger.LAST_VERDICT): GroupState.CLOSED,
    (StepState.IDLE, Trigger.OPEN): StepState.ROLLING_OUT,
    (StepState.ROLLING_OUT, Trigger.LAST_VERDICT): StepState.DRAINING,
    (StepState.DRAINING, Trigger.LEARNER_IDLE): StepState.UPDATING,
    (StepState.UPDATING, Trigger.UPDATE): StepState.PUBLISHING,
    (StepState.UPDATING, Trigger.EMPTY_UPDATE): StepState.IDLE,
    (StepState.PUBLISHING, Trigger.PUBLICATION): StepState.IDLE,
    (StepState.IDLE, Trigger.STOP): StepState.STOPPED,
    (StepState.ROLLING_OUT, Trigger.STOP): StepState.STOPPED,
    (StepState.DRAINING, Trigger.STOP): StepState.STOPPED,
    (StepState.UPDATING, Trigger.STOP): StepState.STOPPED,
    (StepState.PUBLISHING, Trigger.STOP): StepState.STOPPED,
}


class StepMachine:
    """Runs steps one after the other. StateError leaves the machine as it was."""

    def __init__(self, started: ev.RunStarted) -> None:
        self._mode = started.mode
        self._max_open_groups = started.max_open_groups
        self._max_empty_steps = started.max_empty_steps
        self._policy_version = started.policy_version
        self._empty_steps = started.empty_steps
        self._state = StepState.IDLE
        self._step = -1
        self._trajectories: dict[TrajectoryKey, TrajectoryState] = {}
        self._groups: dict[int, GroupState] = {}
        self._members: dict[int, Sequence[TrajectoryKey]] = {}
        self._missing: dict[int, int] = {}
        self._rewards: dict[int, list[float]] = {}
        self._group_size = 0
        self._refills = self._refills_left = self._num_refilled = 0
        self._queue: collections.deque[int] = collections.deque()

    @property
    def state(self) -> StepState:
        return self._state

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def empty_steps(self) -> int:
        """Empty steps in a row, to be kept in a checkpoint."""
        return self._empty_steps

    def waiting_for(self) -> dict[TrajectoryKey, TrajectoryState]:
        """The trajectories of the step that have no verdict, in order, with their states."""
        ended = (TrajectoryState.REWARDED, TrajectoryState.FAILED)
        return {key: state for key, state in self._trajectories.items() if state not in ended}

    def apply(self, event: ev.Event) -> list[ev.Command]:
        """Takes one event; returns what to do, in order. Raises StateError."""
        match event:
            case ev.StepOpened():
                return self._open_step(event)
            case ev.TurnScored(key=key, turn=turn):
                self._move_trajectory(key, Trigger.TURN)
                return [ev.AddTurn(key=key, turn=turn)]
            case ev.ContentFinal(key=key):
                self._move_trajectory(key, Trigger.CONTENT)
                return [ev.AddTrajectory(key=key)]
            case ev.RewardKnown(key=key, reward=reward):
                self._move_trajectory(key, Trigger.REWARD)
                self._rewards[key.group].append(reward)
                return self._end(key, ev.SetReward(key=key, reward=reward))
            case ev.AttemptFailed(key=key, reason=reason):
                self._move_trajectory(key, Trigger.FAILURE)
                return self._end(key, ev.SetFailed(key=key, reason=reason))
            case ev.DeadlinePassed(timeout_s=timeout_s):
                return self._fail_missing(timeout_s)
            case ev.LearnerIdle():
                self._move_step(Trigger.LEARNER_IDLE)
                return [ev.Update()]
            case ev.Updated():
                return self._close_update(event)
            case ev.Published(policy_version=version):
                self._check_version("Published", version, self._policy_version)
                self._move_step(Trigger.PUBLICATION)
                return [ev.CloseStep(step=self._step)]
            case ev.Abandoned(reason=reason):
                return self._abandon(reason)
        assert_never(event)

    def _open_step(self, event: ev.StepOpened) -> list[ev.Command]:
        self._check_version("StepOpened", event.policy_version, self._policy_version)
        self._move_step(Trigger.OPEN)
        self._step = event.step
        self._group_size = event.group_size
        self._refills = self._refills_left = event.refills
        self._num_refilled = 0
        self._members, self._trajectories, self._groups = {}, {}, {}
        self._missing, self._rewards = {}, {}
        self._queue.clear()
        for _ in range(event.groups):
            self._add_group()
        return [*self._released_in(ev.Mode.STREAM), *self._open_groups()]

    def _add_group(self) -> None:
        group = len(self._groups)
        self._members[group] = [
            TrajectoryKey(step=self._step, group=group, index=index)
            for index in range(self._group_size)
        ]
        self._trajectories |= dict.fromkeys(self._members[group], TrajectoryState.WAITING)
        self._groups[group] = GroupState.WAITING
        self._missing[group] = self._group_size
        self._rewards[group] = []
        self._queue.append(group)

    def _open_groups(self) -> list[ev.Command]:
        num_open = sum(state is GroupState.OPEN for state in self._groups.values())
        num_to_open = num_groups_to_open(
            num_waiting=len(self._queue), num_open=num_open, max_open_groups=self._max_open_groups
        )
        commands: list[ev.Command] = []
        for group in [self._queue.popleft() for _ in range(num_to_open)]:
            commands.append(self._open_group(group))
            for key in self._members[group]:
                self._move_trajectory(key, Trigger.OPEN)
                commands.append(ev.Dispatch(key=key))
        return commands

    def _open_group(self, group: int) -> ev.Command:
        self._groups[group] = _next(f"group {group}", self._groups[group], Trigger.OPEN)
        return ev.OpenGroup(group=group)

    def _end(self, key: TrajectoryKey, command: ev.Command) -> list[ev.Command]:
        """The one terminal event of `key`, and what follows if it is its group's or step's last."""
        group = key.group
        self._missing[group] -= 1
        if self._missing[group]:
            return [command]
        self._groups[group] = _next(f"group {group}", self._groups[group], Trigger.LAST_VERDICT)
        if self._refills_left and is_tied(self._rewards[group]):
            self._refills_left -= 1
            self._num_refilled += 1
            self._add_group()
        if any(self._missing.values()):
            return [command, *self._open_groups()]
        self._move_step(Trigger.LAST_VERDICT)
        return [command, *self._released_in(ev.Mode.BARRIER)]

    def _fail_missing(self, timeout_s: float) -> list[ev.Command]:
        """Groups that still wait are opened for the learner's count; nothing is dispatched."""
        if self._state is not StepState.ROLLING_OUT:
            raise StateError(f"step {self._step} is {self._state.value}: no deadline is expected")
        self._queue.clear()
        self._refills_left = 0
        commands: list[ev.Command] = []
        for key, state in self.waiting_for().items():
            if self._groups[key.group] is GroupState.WAITING:
                commands.append(self._open_group(key.group))
            if state is not TrajectoryState.WAITING:
                commands.append(ev.CancelAttempt(key=key))
            reason = f"{key} was {state.value} at the step's deadline of {timeout_s:g} s"
            self._move_trajectory(key, Trigger.FAILURE)
            commands += self._end(key, ev.SetFailed(key=key, reason=reason))
        return commands

    def _close_update(self, event: ev.Updated) -> list[ev.Command]:
        expected = self._policy_version if event.is_empty else self._policy_version + 1
        self._check_version("Updated", event.policy_version, expected)
        self._move_step(Trigger.EMPTY_UPDATE if event.is_empty else Trigger.UPDATE)
        self._policy_version = event.policy_version
        self._empty_steps = self._empty_steps + 1 if event.is_empty else 0
        if not event.is_empty:
            return [ev.Publish(policy_version=event.policy_version)]
        commands: list[ev.Command] = [ev.CloseStep(step=self._step)]
        reason = self._why_empty()
        if reason is not None:
            self._move_step(Trigger.STOP)
            commands.append(ev.StopRun(reason=reason))
        return commands

    def _why_empty(self) -> str | None:
        """Why the run stops after a step without a gradient; None to go on."""
        is_tied_out = all(is_tied(rewards) for rewards in self._rewards.values())
        if is_tied_out and 0 < self._refills == self._num_refilled:
            rewards = [r for group in self._rewards.values() for r in group]
            mean = f", {sum(rewards) / len(rewards):.3g} in the mean" if rewards else ""
            return (
                f"step {self._step} had no gradient: the rewards of each of its "
                f"{len(self._groups)} groups tie, and {self._num_refilled} of them took the place "
                f"of others, the limit being run.max_refilled_groups = {self._refills}; "
                f"{len(rewards)} of {len(self._trajectories)} attempts have a reward{mean}. Take "
                "tasks that the policy solves sometimes, raise sampling.temperature or "
                "run.group_size, or raise the limit"
            )
        if self._empty_steps >= self._max_empty_steps:
            return f"{self._empty_steps} steps in a row, up to step {self._step}, had no gradient"
        return None

    def _abandon(self, reason: str) -> list[ev.Command]:
        self._move_step(Trigger.STOP)
        commands: list[ev.Command] = []
        for key, state in self.waiting_for().items():
            if state is not TrajectoryState.WAITING:
                commands.append(ev.CancelAttempt(key=key))
            self._move_trajectory(key, Trigger.FAILURE)
        return [*commands, ev.StopRun(reason=reason)]

    def _released_in(self, mode: ev.Mode) -> list[ev.Command]:
        return [ev.ReleaseLearner()] if self._mode is mode else []

    def _check_version(self, event: str, version: int, expected: int) -> None:
        if version != expected:
            raise StateError(
                f"{event} in step {self._step} names policy version {version}, expected {expected}"
            )

    def _move_step(self, trigger: Trigger) -> None:
        self._state = _next(f"step {self._step}", self._state, trigger)

    def _move_trajectory(self, key: TrajectoryKey, trigger: Trigger) -> None:
        if key not in self._trajectories:
            raise StateError(
                f"{key} is unknown: step {self._step} has {len(self._groups)} groups "
                f"and {len(self._trajectories)} trajectories"
            )
        self._trajectories[key] = _next(str(key), self._trajectories[key], trigger)


def _next(name: str, state: S, trigger: Trigger) -> S:
    """The state that `TRANSITIONS` gives; StateError names what was legal."""
    following = TRANSITIONS.get((state, trigger))
    if not isinstance(following, type(state)):
        legal = [t.value for s, t in TRANSITIONS if s is state]
        raise StateError(
            f"{name} is {state.value}: {trigger.value} is not expected; "
            f"expected {' or '.join(legal) or 'nothing more'}"
        )
    return following
