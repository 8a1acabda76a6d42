"""What streaming buys: whole train steps of the real parts in stream and barrier mode.

4 groups of 8 agents make 3 tool calls each in sandboxes, with waits lognormal(sigma = 1) drawn from
(seed, key, turn). Pairs of a stream and a barrier step of the same number alternate in their order;
both meet the same waits and sample the same tokens (`timed_steps`). Figures are medians over pairs.

Sizes. On a machine without accelerators learner, engine and tools share the cores. The engine runs
a third of a gradient's arithmetic on every token that it reads, so at the learner's own lengths it
would take a quarter of the CPU. Here trajectories are short for the engine and padded to one long
bucket for the learner, which stands for serving that has chips of its own. Pairs without waits come
first; the mean wait is then set so that the longest tool path of a step is, in the median, as long
as the learner's work. A mean that suits one machine would be idle time on another.

The bound. c_1 <= ... <= c_n are the times at which the contents of a barrier step were final, W its
learner's seconds before the update and U the time from its last gradient to the new weights. One
learner runs the n gradients, W / n each; those of the contents from the k-th on cannot begin before
c_k. No schedule of the same work is shorter than

    bound = max(last reward, max over k of c_k + (n - k + 1) W / n) + U

which for k = n is the last content and its gradient, and for k = 1 all work after the first
content. Stream steps share the cores with the rollouts; the bound, from barrier steps, does not.

CPU share. In a barrier step the learner begins after the last reward: what the process used until
then is engine, rollouts and event loop. Sandboxes are what their ended processes were charged, per
step. `engine_and_tools_cpu_share` is the sum of both over all CPU seconds of a barrier step.

The update. One step's logged trajectories are given to the learner in the order of their arrival
with work in between, and all at once: `updates_rel_l2` is the distance of the two normalised
gradients, which the same clip and optimizer step follow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from thundersync_jax.benchmarks.arrivals import rel_l2
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.benchmarks.timed_steps import TimedStep, TimedSteps, children_cpu_s, started
from thundersync_jax.config import RunConfig, default_config, resolve
from thundersync_jax.envs.paced_tool import paced_tool
from thundersync_jax.learner.compilation import configure
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.streaming import Params
from thundersync_jax.runtime import load_suite
from thundersync_jax.trajectory import TrajectoryKey, TrajectoryRecord
from thundersync_jax.trajectory_log import read_step
from thundersync_jax.workdir import WorkDirectory

GROUPS, GROUP_SIZE, NUM_TURNS, TURN_TOKENS = 4, 8, 3, 8
BUCKET = 1024
NUM_PAIRED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two steps of one number."""

    stream: TimedStep
    barrier: TimedStep


def config() -> RunConfig:
    """The experiment; its learning rate moves no weight, so every step samples from one policy."""
    made = default_config()
    made.run.groups_per_step = GROUPS
    made.run.group_size = GROUP_SIZE
    made.model.max_context = 64
    made.learner.buckets = (BUCKET,)
    made.learner.tokens_per_step = BUCKET
    made.learner.pool_size = GROUPS
    made.optimizer.learning_rate = 1e-12
    made.env.factory = "thundersync_jax.envs.paced_tool:paced_tool"
    made.env.options = ConfigDict(
        {
            "prompt_tokens": 16,
            "num_turns": NUM_TURNS,
            "turn_tokens": TURN_TOKENS,
            "tool_delay_s": 0.0,
            "num_tasks": GROUPS,
        }
    )
    made.rollout.max_turns = NUM_TURNS
    made.rollout.max_turn_tokens = 1
    made.rollout.tool_timeout_s = 120.0
    made.sandbox.num_slots = GROUPS * GROUP_SIZE
    made.serving.num_slots = GROUPS * GROUP_SIZE
    made.serving.steps_per_sync = 1
    made.serving.extend_rows = 8
    made.serving.extend_buckets = (8, 16)
    return resolve(made)


def run() -> Report:
    """Medians over pairs of steps."""
    with tempfile.TemporaryDirectory(prefix="thundersync-endtoend-") as directory:
        workdir = WorkDirectory(Path(directory))
        configure(workdir.compile_cache)
        results = asyncio.run(_measure(workdir, NUM_PAIRED))
    sizes = {
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "num_turns": NUM_TURNS,
        "tool_delay_sigma": 1.0,
        "bucket": BUCKET,
        "num_paired": NUM_PAIRED,
    }
    return Report(benchmark="endtoend", config=sizes, results=results)


async def _measure(workdir: WorkDirectory, num_paired: int) -> dict[str, Any]:
    async with started(config(), workdir) as steps:
        children_before_s = children_cpu_s()  # the self-tests of the sandboxes came before
        instant = await paired(steps, num_paired)
        learner_s = statistics.median(pair.barrier.work_s for pair in instant)
        tool_delay_s = learner_s / longest_path(num_paired)
        waiting = await paired(with_waits(steps, tool_delay_s), num_paired)
        logged = read_step(workdir.trajectories, 1, num_groups=GROUPS, group_size=GROUP_SIZE)
        learner = steps.runtime.learner
        streamed = gradient_of(learner, logged, is_streamed=True)
        distance = rel_l2(streamed, gradient_of(learner, logged, is_streamed=False))
    num_steps = 2 * 2 * (num_paired + 1)
    tools_cpu_s = (children_cpu_s() - children_before_s) / num_steps  # they are closed by now
    without_waits = [pair.stream.step_s / pair.barrier.step_s for pair in instant]
    return {
        **report_pairs(waiting),
        "updates_rel_l2": distance,
        "engine_and_tools_cpu_share": statistics.median(
            (pair.barrier.rollout_cpu_s + tools_cpu_s) / (pair.barrier.cpu_s + tools_cpu_s)
            for pair in waiting
        ),
        "engine_and_rollouts_cpu_s": statistics.median(p.barrier.rollout_cpu_s for p in waiting),
        "tools_cpu_s": tools_cpu_s,
        "tool_delay_s": tool_delay_s,
        "same_tokens": all(is_same_tokens(pair) for pair in (*instant, *waiting)),
        "stream_over_barrier_without_waits": statistics.median(without_waits),
        "stream_over_barrier_without_waits_quartiles": quartiles(without_waits),
    }


async def paired(steps: TimedSteps, num_paired: int) -> list[Pair]:
    """Pairs of steps in alternating order; the first is warm-up and left out."""
    pairs = []
    for step in range(num_paired + 1):
        modes = ("stream", "barrier")[:: -1 if step % 2 else 1]
        timed = {mode: await steps.run(mode, step) for mode in modes}
        pair = Pair(**timed)
        print(
            f"step {step}: stream {pair.stream.step_s:.2f} s, barrier {pair.barrier.step_s:.2f} s "
            f"(rollouts {pair.barrier.last_reward_s:.2f}, learner {pair.barrier.work_s:.2f})",
            file=sys.stderr,
        )
        pairs.append(pair)
    return pairs[1:]


def with_waits(steps: TimedSteps, tool_delay_s: float) -> TimedSteps:
    """The same parts with tools of that mean wait."""
    env = steps.runtime.config.env
    options = {**env.options, "tool_delay_s": tool_delay_s}
    suite = load_suite(dataclasses.replace(env, options=options))
    return TimedSteps(dataclasses.replace(steps.runtime, suite=suite))


def longest_path(num_paired: int) -> float:
    """The longest tool path of a measured step in mean waits; the median over steps."""
    suite = paced_tool(**{**config().env.options, "tool_delay_s": 1.0})
    return statistics.median(
        max(
            suite.tool_path_s(TrajectoryKey(step=step, group=group, index=index))
            for group in range(GROUPS)
            for index in range(GROUP_SIZE)
        )
        for step in range(1, num_paired + 1)
    )


def bound_s(step: TimedStep) -> float:
    """No schedule of this barrier step's work is shorter; see the module's docstring."""
    contents = step.content_s
    gradient_s = step.work_s / len(contents)
    learner_s = max(
        content_s + (len(contents) - earlier) * gradient_s
        for earlier, content_s in enumerate(contents)
    )
    return max(step.last_reward_s, learner_s) + step.update_s


def report_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratios = [pair.barrier.step_s / pair.stream.step_s for pair in pairs]
    of_bound = [bound_s(pair.barrier) / pair.stream.step_s for pair in pairs]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return {
        "barrier_over_stream": median(ratios),
        "barrier_over_stream_quartiles": quartiles(ratios),
        "stream_step_s": median([pair.stream.step_s for pair in pairs]),
        "barrier_step_s": median([pair.barrier.step_s for pair in pairs]),
        "bound_s": median([bound_s(pair.barrier) for pair in pairs]),
        "bound_over_stream": median(of_bound),
        "bound_over_stream_quartiles": quartiles(of_bound),
        "overlap": median([pair.stream.overlap for pair in pairs]),
        "rollouts_s": median([pair.barrier.last_reward_s for pair in pairs]),
        "learner_s": median([pair.barrier.work_s for pair in pairs]),
        "stream_rollouts_s": median([pair.stream.last_reward_s for pair in pairs]),
        "stream_learner_s": median([pair.stream.work_s for pair in pairs]),
        "update_s": median([pair.barrier.update_s for pair in pairs]),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def is_same_tokens(pair: Pair) -> bool:
    """Whether both steps trained on the same trajectories."""
    return tokens_of(pair.stream) == tokens_of(pair.barrier)


def tokens_of(step: TimedStep) -> list[tuple[int, ...]]:
    rollouts = (record.rollout for record in step.result.records)
    return [tuple(rollout.tokens.token_ids.tolist()) if rollout else () for rollout in rollouts]


def gradient_of(
    learner: Learner, records: Sequence[TrajectoryRecord], *, is_streamed: bool
) -> Params:
    """The step's gradient from its log: in the order of arrival with work in between, or at
    once.
    """
    groups = {
        group: learner.open_group(first.task_id, first.prompt_ids, GROUP_SIZE)
        for group, (first, *_) in (
            (group, list(members))
            for group, members in itertools.groupby(records, key=lambda record: record.key.group)
        )
    }
    arrivals = sorted(
        [(record.content_s or 0.0, False, record) for record in records]
        + [(record.terminal_s, True, record) for record in records],
        key=lambda arrival: arrival[:2],
    )
    for _, is_verdict, record in arrivals:
        group, index = groups[record.key.group], record.key.index
        if not is_verdict and record.rollout is not None:
            learner.add_trajectory(group, index, record.rollout.tokens)
        elif is_verdict and record.verdict.reward is not None:
            learner.set_reward(group, index, record.verdict.reward)
        elif is_verdict:
            learner.set_failed(group, index, str(record.verdict.failure))
        if is_streamed:
            learner.work()
    gradient = learner.gradient()
    learner.abandon()
    return gradient
