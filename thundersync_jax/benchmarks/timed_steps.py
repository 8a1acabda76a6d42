"""Single train steps in either mode on one set of parts, with what each of them cost.

The parts are those of `runtime.build`: learner, serving worker, sandboxes. Each step has a
coordinator and a journal of its own and carries the number that its caller gives it, so the steps
of both modes can meet the same tasks, draws and tool waits. With a learning rate too small to move
a float32 weight they also sample the same tokens. A step commits its trajectories' file as the
trainer does.

CPU seconds of the process are those of `time.process_time`: all threads, XLA's included. CPU of the
sandboxes is what the kernel charged to children that ended, which is complete once they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import time
from collections.abc import AsyncIterator, Callable

from thundersync_jax.config import RunConfig
from thundersync_jax.coordinator.coordinator import Coordinator
from thundersync_jax.coordinator.decode_priority import DecodePriority
from thundersync_jax.coordinator.journal import Journal
from thundersync_jax.coordinator.step_run import StepResult
from thundersync_jax.runtime import Runtime, build
from thundersync_jax.step_metrics import overlap
from thundersync_jax.trajectory import Rollout, Task, TrajectoryKey, Verdict
from thundersync_jax.trajectory_log import write_step
from thundersync_jax.transport.messages import WorkItem
from thundersync_jax.workdir import WorkDirectory

_TRAINING = 0  # purpose of draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What one step took.

    Attributes:
      work: the learner's calls, the update included.
      cpu_s: of the process, from the step's opening to its end.
      rollout_cpu_s: of the process until the last verdict. In barrier mode the learner has not
        begun by then: this is what engine, rollouts and event loop take.
    """

    result: StepResult
    work: tuple[WorkItem, ...]
    cpu_s: float
    rollout_cpu_s: float

    @property
    def step_s(self) -> float:
        return self._ended_s - self.result.opened_s

    @property
    def last_reward_s(self) -> float:
        return self.result.last_reward_s - self.result.opened_s

    @property
    def content_s(self) -> list[float]:
        """When each trajectory was final, in order, from the opening on."""
        times = (record.content_s for record in self.result.records)
        return sorted(found - self.result.opened_s for found in times if found is not None)

    @property
    def gradients(self) -> tuple[WorkItem, ...]:
        """All calls of the learner before its update."""
        return tuple(item for item in self.work if item.path != "update")

    @property
    def work_s(self) -> float:
        return sum(item.ended_s - item.started_s for item in self.gradients)

    @property
    def update_s(self) -> float:
        """From the last gradient, or verdict, to the new weights in the engine."""
        ends = (item.ended_s for item in self.gradients)
        return self._ended_s - max(self.result.last_reward_s, *ends)

    @property
    def overlap(self) -> float:
        return overlap(self.work, self.result.last_reward_s)

    @property
    def _ended_s(self) -> float:
        published_s = self.result.published_s
        return self.result.updated_s if published_s is None else published_s


class TimedSteps:
    """Runs steps on started parts; made by `started`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    async def run(self, mode: str, step: int) -> TimedStep:
        """One step of that mode. Steps of one number draw the same."""
        runtime = self.runtime
        runner = runtime.runner(runtime.config.sampling, purpose=_TRAINING)
        last_verdict_cpu_s = 0.0

        async def attempt(
            key: TrajectoryKey,
            task: Task,
            prompt_ids: tuple[int, ...],
            on_content: Callable[[Rollout], None],
        ) -> Verdict:
            nonlocal last_verdict_cpu_s
            verdict = await runner.run(key, task, prompt_ids, on_content)
            last_verdict_cpu_s = time.process_time()
            return verdict

        async def publish(version: int) -> None:
            await asyncio.to_thread(runtime.worker.publish, runtime.learner.params, version)

        tasks = runtime.train_tasks[: runtime.config.run.groups_per_step]
        prompts = [runtime.prompt_ids(task) for task in tasks]
        with contextlib.closing(Journal(runtime.workdir.events, time.monotonic)) as journal:
            journal.start()
            coordinator = Coordinator(
                run=dataclasses.replace(runtime.config.run, mode=mode),
                learner=runtime.learner,
                attempts=attempt,
                publish=publish,
                commit=lambda records: write_step(runtime.workdir.trajectories, step, records),
                journal=journal,
                priority=DecodePriority(
                    lambda: runtime.worker.num_decoding,
                    runtime.config.colocated.max_decode_stall_s,
                ),
                policy_version=runtime.learner.state.policy_version,
            )
            coordinator.start()
            try:
                began_cpu_s = time.process_time()
                result = await coordinator.run_step(step, tasks, prompts)
                cpu_s = time.process_time() - began_cpu_s
            finally:
                await coordinator.close()
        return TimedStep(
            result=result,
            work=tuple(runtime.learner.take_work_log()),
            cpu_s=cpu_s,
            rollout_cpu_s=last_verdict_cpu_s - began_cpu_s,
        )


@contextlib.asynccontextmanager
async def started(config: RunConfig, workdir: WorkDirectory) -> AsyncIterator[TimedSteps]:
    """Builds, compiles and starts the parts, and closes them all."""
    runtime = await build(config, workdir, lambda _: None)
    learner, worker = runtime.learner, runtime.worker
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.to_thread(learner.warm_up)
        stack.push_async_callback(runtime.sandboxes.close)
        await asyncio.to_thread(worker.start)
        stack.callback(worker.close)
        worker.publish(learner.params, learner.state.policy_version)
        yield TimedSteps(runtime)


def children_cpu_s() -> float:
    """CPU seconds of this process's children that ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
