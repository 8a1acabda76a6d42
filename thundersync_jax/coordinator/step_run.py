"""One train step in flight: attempts in tasks, the learner in its thread, every event in the
journal.

Invariants:
  * Nothing here decides: an event goes to the journal, then to the machine, and its commands are
    carried out.
  * An attempt that raises or cancels itself fails; a cancelled attempt is not heard any more.
  * An error of the machine or the journal is stored and raised by `drive`.

Who calls it: `Coordinator.run_step`, which makes one a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, assert_never

from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.group_tracker import StateError, StepMachine, StepState
from thundersync_jax.coordinator.journal import Journal
from thundersync_jax.coordinator.learner_thread import LearnerThread
from thundersync_jax.trajectory import (
    Rollout,
    ScoredTurn,
    Task,
    TrajectoryKey,
    TrajectoryRecord,
    Verdict,
)
from thundersync_jax.transport.messages import UpdateReport

ATTEMPT_END_TIMEOUT_S = 30.0
POSTPONED_S = 0.005  # between two looks whether decode has left the devices

_log = logging.getLogger(__name__)


class AttemptPort(Protocol):
    """Attempts `task` once; calls `on_content` at most once, and before it returns a reward."""

    def __call__(
        self,
        key: TrajectoryKey,
        task: Task,
        prompt_ids: tuple[int, ...],
        on_content: Callable[[Rollout], None],
    ) -> Awaitable[Verdict]: ...


PublishPort = Callable[[int], Awaitable[None]]
CommitPort = Callable[[Sequence[TrajectoryRecord]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """One finished step; times are seconds of the coordinator's clock.

    Attributes:
      records: of every trajectory of the groups that opened, in order of their keys.
      rollout_s: the last final content, None without any.
      last_reward_s: the last verdict.
      published_s: when the engines had the new weights, None for an empty step.
      max_loop_lag_s: how late the event loop was at worst: long means that something blocked it.
      decode_stall_s: seconds of the learner's calls that began while rows decoded.
    """

    step: int
    records: tuple[TrajectoryRecord, ...]
    report: UpdateReport
    opened_s: float
    rollout_s: float | None
    last_reward_s: float
    updated_s: float
    published_s: float | None
    max_loop_lag_s: float
    decode_stall_s: float


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A trajectory while its step runs."""

    task: Task
    prompt_ids: tuple[int, ...]
    attempt: asyncio.Task[None] | None = None
    is_heard: bool = True
    turns: list[ScoredTurn] = dataclasses.field(default_factory=list)
    rollout: Rollout | None = None
    verdict: Verdict | None = None
    dispatched_s: float | None = None
    content_s: float | None = None
    terminal_s: float = 0.0


class StepRun:
    """Carries out the commands of one step. Used from one asyncio loop."""

    def __init__(
        self,
        *,
        step: int,
        tasks: Sequence[Task],
        prompts: Sequence[tuple[int, ...]],
        group_size: int,
        machine: StepMachine,
        journal: Journal,
        learner: LearnerThread,
        attempts: AttemptPort,
        publish: PublishPort,
        commit: CommitPort,
        clock: Callable[[], float],
    ) -> None:
        self._step = step
        self._group_size = group_size
        self._machine = machine
        self._journal = journal
        self._learner = learner
        self._attempts = attempts
        self._publish = publish
        self._commit = commit
        self._clock = clock
        self._live = {
            TrajectoryKey(step=step, group=group, index=index): _Live(
                task=task, prompt_ids=tuple(prompt)
            )
            for group, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
            for index in range(group_size)
        }
        self._opened: set[int] = set()
        self._wake = asyncio.Event()
        self._is_released = False
        self._due: ev.Update | ev.Publish | ev.CloseStep | None = None
        self._error: Exception | None = None
        self._opened_s = clock()
        self._report: UpdateReport | None = None
        self._updated_s = 0.0
        self._published_s: float | None = None
        self.stop_reason: str | None = None

    def apply(self, event: ev.Event) -> None:
        """Writes the event, moves the machine, carries out its commands; errors reach `drive`."""
        try:
            self._journal.append(event)
            for command in self._machine.apply(event):
                self._carry_out(command)
        except Exception as error:  # called by timers and tasks; `drive` raises it to the owner
            self._error = self._error or error
        self._wake.set()

    def hear_turn(self, key: TrajectoryKey, turn: ScoredTurn) -> None:
        """The next turn of an attempt is finished, and scored if it must be."""
        live = self._live.get(key)
        if live is not None and live.is_heard:
            live.turns.append(turn)
            self.apply(ev.TurnScored(key=key, turn=len(live.turns) - 1))

    async def drive(self) -> None:
        """Runs the step to its end, given its StepOpened; raises what went wrong."""
        while self._error is None:
            match self._due:
                case None:
                    await self._serve_learner()
                case ev.Update():
                    await asyncio.to_thread(self._commit, self._records())
                    self._report = await self._learner.update()
                    self._updated_s = self._clock()
                    self.apply(
                        ev.Updated(
                            policy_version=self._report.policy_version,
                            is_empty=self._report.is_empty,
                        )
                    )
                case ev.Publish(policy_version=version):
                    await self._publish(version)
                    self._published_s = self._clock()
                    self.apply(ev.Published(policy_version=version))
                case ev.CloseStep():
                    return
        raise self._error

    async def end_attempts(self) -> None:
        """Cancels the attempts that still run and waits for them; names those that will not end."""
        attempts = {}
        for key, live in self._live.items():
            if live.attempt is not None and not live.attempt.done():
                self._cancel(live)
                attempts[live.attempt] = key
        if not attempts:
            return
        _, late = await asyncio.wait(attempts, timeout=ATTEMPT_END_TIMEOUT_S)
        if late:
            names = ", ".join(str(attempts[attempt]) for attempt in late)
            _log.error(
                "%g s after they were cancelled these still run: %s", ATTEMPT_END_TIMEOUT_S, names
            )

    def result(self, max_loop_lag_s: float) -> StepResult:
        """What happened; only after `drive` returned."""
        if self._report is None:
            raise StateError(f"step {self._step} has no result before its update")
        records = self._records()
        return StepResult(
            step=self._step,
            records=records,
            report=self._report,
            opened_s=self._opened_s,
            rollout_s=max((r.content_s for r in records if r.content_s is not None), default=None),
            last_reward_s=max(r.terminal_s for r in records),
            updated_s=self._updated_s,
            published_s=self._published_s,
            max_loop_lag_s=max_loop_lag_s,
            decode_stall_s=self._learner.take_stall_s(),
        )

    async def _serve_learner(self) -> None:
        """Delivers what is queued and runs one program; without either, waits for an event."""
        self._wake.clear()
        if await self._learner.work(self._is_released) or self._learner.has_queue:
            return
        if self._learner.has_postponed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POSTPONED_S)
        elif self._machine.state is StepState.DRAINING:
            self.apply(ev.LearnerIdle())
        else:
            await self._wake.wait()  # at the latest the step's deadline is an event

    async def _attempt(self, key: TrajectoryKey) -> None:
        """The outermost frame of one attempt."""
        live = self._live[key]
        on_content = functools.partial(self._hear_content, key)
        try:
            verdict = await self._attempts(key, live.task, live.prompt_ids, on_content)
        except asyncio.CancelledError:
            if not live.is_heard:
                raise
            verdict = Verdict(failure=f"the attempt {key} cancelled itself")
        except Exception as error:
            _log.exception("the attempt %s raised", key)
            verdict = Verdict(failure=f"the attempt {key} raised {type(error).__name__}: {error}")
        if not live.is_heard:
            return
        if verdict.reward is not None:
            self.apply(ev.RewardKnown(key=key, reward=verdict.reward))
        else:
            self.apply(ev.AttemptFailed(key=key, reason=str(verdict.failure)))

    def _hear_content(self, key: TrajectoryKey, rollout: Rollout) -> None:
        live = self._live[key]
        if live.is_heard:
            live.rollout = rollout
            self.apply(ev.ContentFinal(key=key))

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.ReleaseLearner():
                self._is_released = True
            case ev.OpenGroup(group=group):
                self._opened.add(group)
                first = self._live[TrajectoryKey(step=self._step, group=group, index=0)]
                self._learner.open_group(
                    group, first.task.task_id, first.prompt_ids, self._group_size
                )
            case ev.Dispatch(key=key):
                live = self._live[key]
                live.dispatched_s = self._clock()
                live.attempt = asyncio.create_task(self._attempt(key), name=f"attempt {key}")
            case ev.CancelAttempt(key=key):
                self._cancel(self._live[key])
            case ev.AddTurn(key=key, turn=turn):
                self._learner.add_turn(key, self._live[key].turns[turn])
            case ev.AddTrajectory(key=key):
                self._add_trajectory(key)
            case ev.SetReward(key=key, reward=reward):
                self._end(key, Verdict(reward=reward))
                self._learner.set_reward(key, reward)
            case ev.SetFailed(key=key, reason=reason):
                self._end(key, Verdict(failure=reason))
                self._learner.set_failed(key, reason)
            case ev.Update() | ev.Publish() | ev.CloseStep():
                self._due = command
            case ev.StopRun(reason=reason):
                self.stop_reason = reason
            case _:
                assert_never(command)

    def _cancel(self, live: _Live) -> None:
        """Cancels once: a second time would interrupt the attempt's clearing up."""
        if live.is_heard and live.attempt is not None:
            live.is_heard = False
            live.attempt.cancel()

    def _add_trajectory(self, key: TrajectoryKey) -> None:
        live = self._live[key]
        if live.rollout is None or live.rollout.key != key:
            raise StateError(f"the attempt {key} reported the content of {live.rollout}")
        live.content_s = self._clock()
        self._learner.add_trajectory(key, live.rollout.tokens)

    def _end(self, key: TrajectoryKey, verdict: Verdict) -> None:
        live = self._live[key]
        live.verdict = verdict
        live.terminal_s = self._clock()

    def _records(self) -> tuple[TrajectoryRecord, ...]:
        """Of the groups that opened: spare ones may not have."""
        return tuple(
            self._record(key, live) for key, live in self._live.items() if key.group in self._opened
        )

    def _record(self, key: TrajectoryKey, live: _Live) -> TrajectoryRecord:
        if live.verdict is None:
            raise StateError(f"step {self._step} closed without a verdict for {key}")
        return TrajectoryRecord(
            key=key,
            task_id=live.task.task_id,
            prompt_ids=live.prompt_ids,
            rollout=live.rollout,
            verdict=live.verdict,
            dispatched_s=live.dispatched_s,
            content_s=live.content_s,
            terminal_s=live.terminal_s,
            scored_turns=tuple(t for t in live.turns if t.teacher_logprobs is not None),
        )
