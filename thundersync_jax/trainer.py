"""`Trainer`: runs the train steps of one work directory, from where it stands to the last.

A step: roll out and stream (coordinator), commit the trajectories' file, update, publish, metrics
line, checkpoint when due. A resumed run loads the newest checkpoint, replays the committed steps
after it (gradients, no rollouts) and goes on: every committed trajectory is trained on exactly
once, whenever the process was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import jax

from thundersync_jax.coordinator.coordinator import Coordinator, StepAbandoned
from thundersync_jax.coordinator.decode_priority import DecodePriority
from thundersync_jax.coordinator.journal import Journal
from thundersync_jax.coordinator.step_run import StepResult
from thundersync_jax.envs.task_cursor import TaskCursor
from thundersync_jax.errors import UserError
from thundersync_jax.frozen_policy import load_weights
from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
from thundersync_jax.learner.compilation import CompileCounter
from thundersync_jax.learner.statistics import LogprobGapError, NonFiniteGradientError
from thundersync_jax.losses.objective import ObjectiveError
from thundersync_jax.metrics import JsonlWriter, read_jsonl
from thundersync_jax.replay import replay_step
from thundersync_jax.runtime import Runtime
from thundersync_jax.step_metrics import replayed_line, step_line
from thundersync_jax.trajectory import ScoredTurn, TrajectoryKey, TrajectoryRecord, Verdict
from thundersync_jax.trajectory_log import read_step, step_path, write_step
from thundersync_jax.transport.messages import WorkItem
from thundersync_jax.viewing.progress import Progress
from thundersync_jax.viewing.timeline import Timeline

TRAINING, EVALUATION = 0, 1  # purposes of draws


class RefusedStepError(UserError):
    """A committed step without an update: why, where it is, and how the run goes on."""


class Trainer:
    """Owns the loop. `run` starts the parts and closes them again."""

    def __init__(self, runtime: Runtime, progress: Progress) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._progress = progress
        workdir = runtime.workdir
        self._checkpoints = Checkpointer(
            workdir.checkpoints, keep_last=self._config.checkpoint.keep_last
        )
        self._cursor = TaskCursor(runtime.train_tasks, seed=self._config.run.seed)
        self._metrics = JsonlWriter(workdir.metrics)
        self._evaluations = JsonlWriter(workdir.evaluation)
        self._timeline = Timeline(workdir.timeline)
        self._compiles = CompileCounter()
        self._position = RunPosition()
        self._last_reward = -math.inf
        self._coordinator: Coordinator | None = None
        self.is_interrupted = False
        self._is_profiling = False

    def interrupt(self) -> None:
        """First call: finish the running step and stop. Second call: abandon it."""
        self.is_interrupted = True
        if self._coordinator is None:
            raise KeyboardInterrupt
        if self._coordinator.stop_reason is None:
            self._coordinator.request_stop("interrupted")
            self._progress.message("interrupted: finishing the step; once more abandons it")
        else:
            self._coordinator.abandon("interrupted twice")

    async def run(self) -> str | None:
        """Runs to the last step. Returns why it stopped before, or was to stop there; or None."""
        async with self._started() as coordinator:
            while self._position.num_steps < self._config.run.num_steps:
                if coordinator.stop_reason is not None:
                    break
                try:
                    await self._step(coordinator)
                except StepAbandoned as error:
                    self._progress.message(f"{error}; the same command resumes at this step")
                    return str(error)
            await self._save()
            is_done = self._position.num_steps >= self._config.run.num_steps
            reason = None if is_done and self.is_interrupted else coordinator.stop_reason
            self._progress.status("done" if reason is None else "stopped")
            return reason

    # -- start and end --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Coordinator]:
        runtime = self._runtime
        with contextlib.ExitStack() as stack:
            stack.callback(self._checkpoints.close)
            stack.callback(self._metrics.close)
            stack.callback(self._evaluations.close)
            stack.callback(self._stop_profile)
            num_programs = await asyncio.to_thread(runtime.learner.warm_up)
            await asyncio.to_thread(runtime.worker.warm_up)
            renderer, frozen = runtime.renderer, runtime.frozen
            runtime.workdir.claim(
                self._config,
                model=runtime.model,
                tokenizer=renderer.tokenizer.fingerprint,
                template=renderer.template_fingerprint,
                frozen_policy=None if frozen is None else frozen.identity,
            )
            await asyncio.to_thread(self._restore)
            self._progress.resume(self._position.num_steps)
            await asyncio.to_thread(runtime.worker.start)
            stack.callback(runtime.worker.close)
            self._publish_now()
            await asyncio.to_thread(self._start_scorer, stack)
            self._compiles.start()
            stack.callback(self._compiles.close)
            self._progress.message(
                f"ready in {time.monotonic() - runtime.began_s:.1f} s: "
                f"{num_programs} learner programs, {runtime.learner.memory.describe()}, "
                f"at step {self._position.num_steps} of {self._config.run.num_steps}"
            )
            journal = Journal(runtime.workdir.events, time.monotonic)
            journal.start()
            stack.callback(journal.close)
            coordinator = self._coordinator = self._make_coordinator(journal)
            coordinator.start()
            try:
                yield coordinator
            finally:
                await coordinator.close()
                await runtime.sandboxes.close()
                self._timeline.write()

    def _start_scorer(self, stack: contextlib.ExitStack) -> None:
        """With its weights, of which it keeps a copy: the loaded ones go when this returns."""
        scorer, frozen = self._runtime.scorer, self._runtime.frozen
        if scorer is not None and frozen is not None:
            weights = load_weights(frozen)
            scorer.start()
            stack.callback(scorer.close)
            scorer.publish(weights, 0)

    def _make_coordinator(self, journal: Journal) -> Coordinator:
        learner = self._runtime.learner
        streams_turns = self._config.learner.stream_turns != "never"
        hears_turns = bool(self._config.opd.teacher) or streams_turns
        runner = self._runtime.runner(
            self._config.sampling,
            purpose=TRAINING,
            is_scored=True,
            on_turn=self._hear_turn if hears_turns else None,
        )
        return Coordinator(
            run=self._config.run,
            learner=learner,
            attempts=runner.run,
            publish=self._publish,
            commit=self._commit,
            journal=journal,
            priority=DecodePriority(
                lambda: self._runtime.worker.num_decoding,
                self._config.colocated.max_decode_stall_s,
            ),
            policy_version=learner.state.policy_version,
            empty_steps=self._position.num_empty_steps,
        )

    def _hear_turn(self, key: TrajectoryKey, turn: ScoredTurn) -> None:
        assert self._coordinator is not None
        self._coordinator.hear_turn(key, turn)

    def _restore(self) -> None:
        """Loads the newest checkpoint and replays the committed steps after it."""
        learner, workdir = self._runtime.learner, self._runtime.workdir
        newest = self._checkpoints.latest()
        if newest is not None:
            state, self._position = self._checkpoints.restore(learner.state, newest)
            learner.load(state)
            self._progress.message(f"resumed from the checkpoint of step {newest}")
        logged = {line["step"] for line in read_jsonl(workdir.metrics)}
        first = self._position.num_steps
        while step_path(workdir.trajectories, self._position.num_steps).exists():
            step = self._position.num_steps
            trajectories = read_step(
                workdir.trajectories,
                step,
                num_groups=self._config.run.groups_per_step,
                group_size=self._config.run.group_size,
                max_refilled=self._config.run.max_refilled_groups,
            )
            with self._naming_its_file(step):
                report = replay_step(learner, trajectories)
            learner.take_work_log()
            rewards = [t.verdict.reward for t in trajectories if t.verdict.reward is not None]
            self._advance(report.num_groups, report.is_empty, report.reward_mean)
            if step not in logged:
                line = replayed_line(
                    step, report, rewards, solved_reward=self._runtime.suite.solved_reward
                )
                self._metrics.write(line)
        if self._position.num_steps > first:
            self._progress.message(f"replayed steps {first} to {self._position.num_steps - 1}")
            self._save_now()

    @contextlib.contextmanager
    def _naming_its_file(self, step: int) -> Iterator[None]:
        """A committed step that the learner refuses is replayed for ever, unless its file goes."""
        try:
            yield
        except (NonFiniteGradientError, LogprobGapError, ObjectiveError) as error:
            path = step_path(self._runtime.workdir.trajectories, step)
            if not path.exists():
                raise
            raise RefusedStepError(
                f"step {step}: {error}. The same command trains on the step's trajectories again, "
                f"from {path}. Where they are at fault, mend the environment and move that file "
                "away: the step is then rolled out again"
            ) from error

    # -- one step -------------------------------------------------------------------------------

    async def _step(self, coordinator: Coordinator) -> None:
        config, step = self._config, self._position.num_steps
        self._start_profile(step)
        num_groups = config.run.groups_per_step
        num_tasks = num_groups + config.run.max_refilled_groups
        tasks = self._cursor.tasks_at(self._position.task_position, num_tasks)
        prompts = [self._runtime.prompt_ids(task) for task in tasks]
        self._progress.status(f"rolling out {num_groups * config.run.group_size} trajectories")
        compiles_before, serving_before = self._compiles.count, self._runtime.worker.statistics()
        try:
            with self._naming_its_file(step):
                result = await coordinator.run_step(step, tasks, prompts)
        except StepAbandoned:
            await coordinator.call_learner(self._runtime.learner.abandon)
            raise
        work = await coordinator.call_learner(self._runtime.learner.take_work_log)
        line = step_line(
            result,
            work,
            self._runtime.worker.statistics().since(serving_before),
            solved_reward=self._runtime.suite.solved_reward,
            compiles=self._compiles.count - compiles_before,
        )
        self._metrics.write(line)
        self._progress.step(line)
        for text in warnings_of(result):
            self._progress.message(text)
        self._add_to_timeline(result, work)
        self._advance(result.report.num_groups, result.report.is_empty, result.report.reward_mean)
        self._stop_profile(step)
        if self._position.num_steps % config.checkpoint.every_steps == 0:
            await self._save()
        every = config.evaluation.every_steps
        if every and self._position.num_steps % every == 0:
            await self._evaluate()

    def _commit(self, records: Sequence[TrajectoryRecord]) -> None:
        """Makes the step's trajectories durable before they change the weights."""
        write_step(self._runtime.workdir.trajectories, records[0].key.step, records)

    async def _publish(self, version: int) -> None:
        await asyncio.to_thread(self._publish_now)

    def _publish_now(self) -> None:
        learner = self._runtime.learner
        self._runtime.worker.publish(learner.params, learner.state.policy_version)

    def _advance(self, num_tasks: int, is_empty: bool, reward: float) -> None:
        self._position = RunPosition(
            num_steps=self._position.num_steps + 1,
            task_position=self._position.task_position + num_tasks,
            num_empty_steps=self._position.num_empty_steps + 1 if is_empty else 0,
        )
        self._last_reward = -math.inf if math.isnan(reward) else reward

    async def _save(self) -> None:
        assert self._coordinator is not None
        await self._coordinator.call_learner(self._save_now)
        self._timeline.write()

    def _save_now(self) -> None:
        if self._position.num_steps not in (0, self._checkpoints.latest()):
            self._checkpoints.save(
                self._runtime.learner.state, self._position, reward=self._last_reward
            )

    async def _evaluate(self) -> None:
        """Attempts the held-out tasks once each; a line in evaluation.jsonl."""
        runtime = self._runtime
        self._progress.status(f"evaluating {len(runtime.eval_tasks)} tasks")
        runner = runtime.runner(self._config.evaluation.sampling, purpose=EVALUATION)
        began_s = time.monotonic()
        verdicts: list[Verdict] = await asyncio.gather(
            *(
                runner.run(
                    TrajectoryKey(step=self._position.num_steps, group=number, index=0),
                    task,
                    runtime.prompt_ids(task),
                    lambda rollout: None,
                )
                for number, task in enumerate(runtime.eval_tasks)
            )
        )
        rewards = [v.reward for v in verdicts if v.reward is not None]
        solved = sum(r >= runtime.suite.solved_reward for r in rewards)
        line = {
            "step": self._position.num_steps,
            "policy_version": runtime.learner.state.policy_version,
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "solved": solved / len(rewards) if rewards else None,
            "num_tasks": len(verdicts),
            "num_failed": len(verdicts) - len(rewards),
            "evaluation_s": time.monotonic() - began_s,
        }
        self._evaluations.write(line)
        self._progress.message(
            f"held out, after step {line['step']}: solved {solved} of {len(verdicts)}, "
            f"{line['num_failed']} failed"
        )

    def _add_to_timeline(self, result: StepResult, work: Sequence[WorkItem]) -> None:
        ended_s = result.updated_s if result.published_s is None else result.published_s
        self._timeline.add_step(
            step=result.step,
            opened_s=result.opened_s,
            last_reward_s=result.last_reward_s,
            ended_s=ended_s,
            turns=[
                (record.key, record.rollout.turns, record.terminal_s)
                for record in result.records
                if record.rollout is not None
            ],
            work=work,
        )

    def _start_profile(self, step: int) -> None:
        """Begins the jax.profiler trace of `run.profile_steps`, also when resumed inside it."""
        if step in self._config.run.profile_range and not self._is_profiling:
            jax.profiler.start_trace(str(self._runtime.workdir.profile))
            self._is_profiling = True

    def _stop_profile(self, step: int | None = None) -> None:
        """Ends the trace after its last step, or whenever the run ends."""
        is_last = step is None or step + 1 not in self._config.run.profile_range
        if self._is_profiling and is_last:
            jax.profiler.stop_trace()
            self._is_profiling = False


def warnings_of(result: StepResult) -> list[str]:
    """What a person should hear of a step: failed attempts, and a step that taught nothing."""
    found = []
    failures = [r for r in result.records if r.verdict.failure is not None]
    if failures:
        first = failures[0]
        found.append(
            f"step {result.step}: {len(failures)} of {len(result.records)} attempts failed, "
            f"the first ({first.key}): {first.verdict.failure}"
        )
    if result.report.is_empty and len(failures) < len(result.records):
        found.append(f"step {result.step}: no update, for {_why_empty(result)}")
    return found


def _why_empty(result: StepResult) -> str:
    """What its groups lack: rewards, or two that differ. Distillation compares none."""
    if not result.report.zero_variance_groups:
        return "no trajectory has a gradient"
    rewards: dict[int, list[float]] = {record.key.group: [] for record in result.records}
    for record in result.records:
        if record.verdict.reward is not None:
            rewards[record.key.group].append(record.verdict.reward)
    num_short = sum(len(group) < 2 for group in rewards.values())
    num_tied = sum(len(group) > 1 and len(set(group)) == 1 for group in rewards.values())
    reasons = []
    if num_tied:
        reasons.append(
            f"{num_tied} of {len(rewards)} groups have equal rewards (mean "
            f"{result.report.reward_mean:.3g}): the tasks are too easy, too hard, or the samples "
            "do not differ"
        )
    if num_short:
        reasons.append(
            f"{num_short} of {len(rewards)} groups have fewer than two rewards to compare: mend "
            "what made the other attempts fail"
        )
    return "; ".join(reasons)
