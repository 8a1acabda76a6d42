"""`BaseLearner`: what the learners of rewards and of teachers do alike.

Owns the train state, the replicas' copy of the parameters, and the log of the calls that ran. The
subclass owns the schedule, which decides the next call, and the buffers, which run it; each hook of
this class says what it must do. One thread owns a learner: no method may be called from two threads
at a time.

    open_group, add_turn, add_trajectory, set_reward, set_failed     only enqueue
    work(max_steps)     runs what is ready, each call to its completion
    update()            refuses a step that is not complete, by name
"""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np

from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.groups import Group, LearnerError, Member, Stage
from thundersync_jax.learner.memory import MemoryPlan, check_programs
from thundersync_jax.learner.optimizer import learning_rate_schedule
from thundersync_jax.learner.program_names import Name
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_schedule import SegmentWork
from thundersync_jax.learner.work import Work
from thundersync_jax.learner.work_log import WorkLog
from thundersync_jax.model.trainable import fingerprint
from thundersync_jax.trajectory import TrajectoryError, check_reward
from thundersync_jax.transport.messages import UpdateReport, WorkItem

AnyWork = TypeVar("AnyWork", Work, SegmentWork)


class CallSchedule(Protocol[AnyWork]):
    """Which call is due."""

    def next_work(self) -> AnyWork | None:
        """The next call; None when nothing is ready."""

    def mark_done(self, work: AnyWork) -> None:
        """Its results are in the buffers."""


class StepBuffers(Protocol):
    """The donated sums of a step."""

    def totals(self) -> tuple[Params, ...]:
        """A copy of what the update divides."""

    def update(self, state: TrainState, denominators: Sequence[float]) -> jax.Array:
        """Steps once along the sums, which are zero then; returns the gradient's norm.

        Args:
          state: its arrays are donated and replaced.
          denominators: of every sum.
        """


class StepChecks(Protocol):
    """What calls said of the step."""

    has_gradient: bool

    def check_finite(self) -> None:
        """Raises NonFiniteGradientError."""

    def check_gap(self) -> None:
        """Raises LogprobGapError."""


class BaseLearner(abc.ABC, Generic[AnyWork]):
    """See the module's docstring.

    Attributes:
      state: at the start of the step; only `update` and `load` change it.
      params: the replicas' copy of all parameters, the frozen ones among them.
      memory: what is kept on a device.
    """

    _programs: Programs
    _schedule: CallSchedule[AnyWork]
    _buffers: StepBuffers
    _statistics: StepChecks

    def __init__(
        self,
        programs: Programs,
        memory: MemoryPlan,
        optimizer: OptimizerSection,
        params: Params,
    ) -> None:
        """Takes `params` over; the subclass makes its schedule and buffers, then begins a step."""
        self._programs = programs
        self.memory = memory
        self._rates = learning_rate_schedule(optimizer)
        master, self._frozen = programs.place(params)
        self.state = TrainState(
            params=master,
            opt_state=programs.init_opt_state(master),
            base=fingerprint(self._frozen),
        )
        self.params: Params = programs.gather(master, self._frozen)
        self._log = WorkLog()
        self._next_group_id = 0
        self._postponed: AnyWork | None = None
        self._failure: NonFiniteGradientError | None = None

    # -- what the caller enqueues ---------------------------------------------------------------

    def set_reward(self, group: int, index: int, reward: float) -> None:
        """Gives a trajectory its verdict. Raises LearnerError, TrajectoryError or ObjectiveError;
        then nothing has changed.
        """
        found, member = self._find(group, index)
        try:
            value = check_reward(reward)
        except TrajectoryError as error:
            raise TrajectoryError(f"{found.name(member)}: {error}") from None
        found.set_reward(member, value)

    def set_failed(self, group: int, index: int, reason: str) -> None:
        """Ends a trajectory without a reward: it leaves its group's moments too."""
        found, member = self._find(group, index)
        member.advance(Stage.FAILED, found.name(member))
        member.failure = reason

    # -- what the learner runs ------------------------------------------------------------------

    def warm_up(self) -> int:
        """Compiles every program ahead of time; returns how many there are."""
        self._rates(0)
        self._programs.warm_up(self._program_names())
        self.memory = check_programs(self.memory, self._programs.temporaries())
        return self._programs.num_programs

    @property
    def has_postponed(self) -> bool:
        """Whether the last `work` left a ready call because it would have taken too long."""
        return self._postponed is not None

    def work(self, max_steps: int | None = None, *, max_call_s: float = math.inf) -> int:
        """Runs up to `max_steps` ready program calls, each to completion; returns how many ran.

        Args:
          max_call_s: a call that would take longer, judged by those before it, is postponed: it
            comes first in the next `work`.
        """
        done = 0
        while max_steps is None or done < max_steps:
            work = self._postponed or self._schedule.next_work()
            self._postponed = None
            if work is None:
                break
            if self._log.predict_s(work) > max_call_s:
                self._postponed = work
                break
            started_s = time.monotonic()
            ran = self._run(work)
            self._schedule.mark_done(work)
            self._log.add_work(work, *ran, started_s)
            done += 1
        return done

    def gradient(self) -> Params:
        """A copy of the normalized descent gradient in what trains, before the clip, that `update`
        would now step along.
        """
        self._finish()
        counts = self._denominators()

        def descent(*sums: np.ndarray) -> np.ndarray:
            parts = [g / count for g, count in zip(sums, counts, strict=True)]
            return -np.sum(parts, axis=0)

        return jax.tree.map(descent, *self._buffers.totals())

    def update(self) -> UpdateReport:
        """Runs what is left, then normalizes, clips and steps once; the next step starts empty.

        A step without any gradient changes no parameter, moment, schedule or version.

        Raises:
          LearnerError: a trajectory has not ended.
          NonFiniteGradientError, LogprobGapError: nothing was updated; `abandon` starts the step
            again.
        """
        self._finish()
        self._statistics.check_gap()
        is_empty = not self._statistics.has_gradient
        rate = 0.0 if is_empty else float(self._rates(self.state.policy_version))
        norm = 0.0 if is_empty else self._step()
        report = self._report(is_empty=is_empty, grad_norm=norm, learning_rate=rate)
        self._begin_step()
        return report

    def load(self, state: TrainState) -> None:
        """Goes on from a restored state; the step in progress is dropped."""
        self.params, self.state = None, state
        self.abandon()
        self.params = self._programs.gather(state.params, self._frozen)

    def abandon(self) -> None:
        """Drops the step: every group and partial sum is gone, the train state is as before it."""
        self._clear_buffers()
        self._log.take()
        self._begin_step()

    def take_work_log(self) -> list[WorkItem]:
        """The program calls that completed since the last take."""
        return self._log.take()

    # -- what the subclass knows ----------------------------------------------------------------

    @abc.abstractmethod
    def _program_names(self) -> Iterable[Name]:
        """Every program that a run can need."""

    @abc.abstractmethod
    def _groups(self) -> Sequence[Group]:
        """Those of the step."""

    @abc.abstractmethod
    def _run(self, work: AnyWork) -> tuple[str, int, int]:
        """Runs one call to its completion; (kind, bucket, trajectories) for the log."""

    @abc.abstractmethod
    def _denominators(self) -> list[float]:
        """Of every sum; 1 where nothing arrived, for its sum is 0."""

    @abc.abstractmethod
    def _check_ended(self) -> None:
        """Raises LearnerError naming what has not ended; then nothing more can come."""

    @abc.abstractmethod
    def _left(self) -> list[str]:
        """What is not in the sums although nothing more is due, by name: nothing, ever."""

    @abc.abstractmethod
    def _report(self, *, is_empty: bool, grad_norm: float, learning_rate: float) -> UpdateReport:
        """The step's report, once its update is done."""

    @abc.abstractmethod
    def _clear_buffers(self) -> None:
        """Zeros again."""

    def _begin_step(self) -> None:
        """Starts an empty step on buffers that are zero."""
        self._failure = None
        self._postponed = None

    # -- internals ------------------------------------------------------------------------------

    def _find(self, group_id: int, index: int) -> tuple[Group, Member]:
        groups = {group.group_id: group for group in self._groups()}
        if group_id not in groups:
            raise LearnerError(f"group {group_id!r} is not open; open groups: {sorted(groups)}")
        group = groups[group_id]
        if not 0 <= index < len(group.members):
            last = len(group.members) - 1
            raise LearnerError(f"{group.name()} has indices 0 to {last}, got {index}")
        return group, group.members[index]

    def _finish(self) -> None:
        """Runs what is left of the step; raises unless its gradient is complete and finite."""
        if self._failure is not None:
            raise self._failure
        self.work()
        self._check_ended()
        self.work()
        if left := self._left():
            raise AssertionError(
                f"the schedule has no call for {', '.join(left)}: the gradient would lack it. This "
                "is a fault of ThunderSync-JAX: report it"
            )
        self._statistics.check_finite()

    def _step(self) -> float:
        """Updates the state; the gradient's norm."""
        started_s = time.monotonic()
        norm = self._buffers.update(self.state, self._denominators())
        self.params = None  # freed before its successor is made
        self.params = self._programs.gather(self.state.params, self._frozen)
        value = float(norm)  # blocks until the update is complete
        if not math.isfinite(value):
            self._failure = NonFiniteGradientError(
                f"the batch gradient has norm {value} although every part of it is finite: a sum, "
                "or the sum of its squares, is beyond float32. Nothing was updated. Scale the "
                "rewards down, or the objective's advantages, token weights or coefficients"
            )
            raise self._failure
        self._log.add("update", 0, 0, started_s)
        self.state.policy_version += 1
        return value
