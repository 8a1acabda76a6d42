"""Runs train steps: owns the machine, the journal and the learner's thread from start to close.

Invariants:
  * One step at a time. Its deadline fails the trajectories without a verdict by name; the rest
    trains.
  * An exception of the learner, of `publish`, of the journal or of the machine ends the step: its
    attempts are cancelled and waited for, the machine stops, and the exception is raised to the
    caller of `run_step`.
  * The learner is called on its own thread only, also by others (`call_learner`); the loop never
    blocks on it.

Who calls it: `train.py`, from one asyncio loop, one `run_step` after the other until `stop_reason`
is set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thundersync_jax.config_sections import RunSection
from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.decode_priority import DecodePriority
from thundersync_jax.coordinator.group_tracker import (
    StateError,
    StepMachine,
    StepState,
    TrajectoryState,
)
from thundersync_jax.coordinator.journal import Journal
from thundersync_jax.coordinator.learner_thread import LearnerPort, LearnerThread
from thundersync_jax.coordinator.loop_lag import LoopLag
from thundersync_jax.coordinator.step_run import (
    AttemptPort,
    CommitPort,
    PublishPort,
    StepResult,
    StepRun,
)
from thundersync_jax.coordinator.watchdog import Watchdog
from thundersync_jax.trajectory import ScoredTurn, Task, TrajectoryKey

T = TypeVar("T")

_NAMED = 6  # trajectories in a warning; more are counted

_log = logging.getLogger(__name__)


class StepAbandoned(RuntimeError):
    """`Coordinator.abandon` ended the step. Drop what the learner holds of it."""


class Coordinator:
    """Runs steps until there is a reason to stop.

    Args:
      attempts: runs one attempt; `RolloutRunner.run`.
      commit: makes a step's trajectories durable, after the last verdict and before the update;
        runs in another thread.
      publish: gives the engines the weights of a version; awaited.
      priority: of decode over the learner's calls, where they share devices.
      clock: seconds; `time.monotonic` is the clock of the learner's and the engines' time stamps.
      policy_version, empty_steps: restored from a checkpoint.
    """

    def __init__(
        self,
        *,
        run: RunSection,
        learner: LearnerPort,
        attempts: AttemptPort,
        publish: PublishPort,
        commit: CommitPort,
        journal: Journal,
        priority: DecodePriority,
        clock: Callable[[], float] = time.monotonic,
        policy_version: int = 0,
        empty_steps: int = 0,
    ) -> None:
        self._run = run
        self._learner = LearnerThread(learner, priority)
        self._attempts = attempts
        self._publish = publish
        self._commit = commit
        self._journal = journal
        self._clock = clock
        self._started = ev.RunStarted(
            mode=ev.Mode(run.mode),
            max_open_groups=run.max_open_groups,
            max_empty_steps=run.max_empty_steps,
            policy_version=policy_version,
            empty_steps=empty_steps,
        )
        self._machine = StepMachine(self._started)
        self._step_run: StepRun | None = None
        self._driver: asyncio.Task[None] | None = None
        self._abandon_reason: str | None = None
        self._stop_reason: str | None = None

    def start(self) -> None:
        """Begins this machine's part of the journal, which is open."""
        self._journal.append(self._started)

    async def close(self) -> None:
        """Waits for the learner's call in progress. The journal is the caller's to close."""
        await asyncio.to_thread(self._learner.close)

    @property
    def stop_reason(self) -> str | None:
        """Why no further step should be run, or None."""
        return self._stop_reason

    @property
    def policy_version(self) -> int:
        return self._machine.policy_version

    @property
    def empty_steps(self) -> int:
        """Empty steps in a row, for the checkpoint."""
        return self._machine.empty_steps

    def waiting_for(self) -> dict[TrajectoryKey, TrajectoryState]:
        """The trajectories of the running step that have no verdict, with their states."""
        return self._machine.waiting_for()

    def describe_wait(self) -> str:
        """What the running step waits for, with the first trajectories by name."""
        waiting = [f"{key} ({state.value})" for key, state in self.waiting_for().items()]
        named = "; ".join(waiting[:_NAMED])
        more = f"; and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        return f"the step is {self._machine.state.value}{': ' if named else ''}{named}{more}"

    def request_stop(self, reason: str) -> None:
        """Lets the running step finish; `stop_reason` tells the caller to run no other."""
        self._stop_reason = self._stop_reason or reason

    def abandon(self, reason: str) -> None:
        """Ends the running step now: `run_step` cancels its attempts and raises StepAbandoned."""
        self.request_stop(reason)
        if self._step_run is None or self._driver is None or self._abandon_reason is not None:
            return
        self._abandon_reason = reason
        self._step_run.apply(ev.Abandoned(reason=reason))
        self._driver.cancel()

    def hear_turn(self, key: TrajectoryKey, turn: ScoredTurn) -> None:
        """A turn is finished, and scored if it must be; one of a past step is of no interest."""
        if self._step_run is not None:
            self._step_run.hear_turn(key, turn)

    async def call_learner(self, function: Callable[..., T], *args: Any) -> T:
        """Runs `function` on the learner's thread, for instance to save a checkpoint."""
        return await self._learner.call(function, *args)

    async def run_step(
        self, step: int, tasks: Sequence[Task], prompts: Sequence[tuple[int, ...]]
    ) -> StepResult:
        """Runs one group for each task and prompt, trains on them and publishes the weights.

        The last `run.max_refilled_groups` of them are spare: for groups in place of tied ones.
        """
        if self._step_run is not None:
            raise StateError(f"step {step} cannot run beside another: await that one first")
        self._learner.begin_step()
        step_run = self._step_run = StepRun(
            step=step,
            tasks=tasks,
            prompts=prompts,
            group_size=self._run.group_size,
            machine=self._machine,
            journal=self._journal,
            learner=self._learner,
            attempts=self._attempts,
            publish=self._publish,
            commit=self._commit,
            clock=self._clock,
        )
        step_run.apply(self._opening(step, len(tasks)))
        loop_lag = LoopLag()
        loop_lag.start()
        watchdog = Watchdog(
            self._run.watchdog_s,
            num_events=lambda: self._journal.num_entries,
            describe=self.describe_wait,
            warn=_log.warning,
        )
        watchdog.start()
        deadline = asyncio.get_running_loop().call_later(
            self._run.step_timeout_s, self._pass_deadline, step_run
        )
        self._driver = asyncio.create_task(step_run.drive(), name=f"step {step}")
        try:
            await self._driver
            await asyncio.to_thread(self._journal.sync)
        except BaseException as error:
            if self._abandon_reason is not None:
                raise StepAbandoned(f"step {step}: {self._abandon_reason}") from None
            step_run.apply(ev.Abandoned(reason=f"{type(error).__name__}: {error}"))
            raise
        finally:
            deadline.cancel()
            watchdog.stop()
            max_loop_lag_s = loop_lag.stop()
            self._step_run = self._driver = None
            if step_run.stop_reason is not None:
                self.request_stop(step_run.stop_reason)
            await step_run.end_attempts()
        return step_run.result(max_loop_lag_s)

    def _opening(self, step: int, num_tasks: int) -> ev.StepOpened:
        refills = self._run.max_refilled_groups
        return ev.StepOpened(
            step=step,
            policy_version=self._machine.policy_version,
            groups=num_tasks - refills,
            group_size=self._run.group_size,
            refills=refills,
        )

    def _pass_deadline(self, step_run: StepRun) -> None:
        if self._machine.state is StepState.ROLLING_OUT:
            step_run.apply(ev.DeadlinePassed(timeout_s=self._run.step_timeout_s))
