"""What the end-to-end benchmark computes from steps: the bound, and which steps are compared."""

from __future__ import annotations

import runpy
from pathlib import Path

import fakes
import pytest

from thundersync_jax.benchmarks import agentic, endtoend
from thundersync_jax.benchmarks.timed_steps import TimedStep
from thundersync_jax.config import resolve
from thundersync_jax.coordinator.step_run import StepResult
from thundersync_jax.trajectory import TrajectoryRecord, Verdict
from thundersync_jax.transport.messages import WorkItem

ROOT = Path(__file__).parents[1]


def step(contents_s: list[float], *, gradient_s: float, grade_s: float = 0.0) -> TimedStep:
    """A barrier step opened at 100 s: gradients after the last verdict, an update of 1 s."""
    records = tuple(
        TrajectoryRecord(
            key=fakes.key(0, 0, index),
            task_id="t",
            prompt_ids=(0,),
            rollout=fakes.rollout(fakes.key(0, 0, index)),
            verdict=Verdict(reward=1.0),
            dispatched_s=100.0,
            content_s=100.0 + content_s,
            terminal_s=100.0 + content_s + grade_s,
        )
        for index, content_s in enumerate(contents_s)
    )
    last_s = max(record.terminal_s for record in records)
    ends = [last_s + gradient_s * (index + 1) for index in range(len(records))]
    work = [
        WorkItem(
            path="direct", bucket=8, num_trajectories=1, started_s=end - gradient_s, ended_s=end
        )
        for end in ends
    ]
    update = WorkItem(
        path="update", bucket=0, num_trajectories=0, started_s=ends[-1], ended_s=ends[-1] + 1
    )
    result = StepResult(
        step=0,
        records=records,
        report=fakes.FakeLearner().update(),
        opened_s=100.0,
        rollout_s=max(record.content_s for record in records),
        last_reward_s=last_s,
        updated_s=ends[-1] + 0.75,
        published_s=ends[-1] + 1.0,
        max_loop_lag_s=0.0,
        decode_stall_s=0.0,
    )
    return TimedStep(result=result, work=(*work, update), cpu_s=1.0, rollout_cpu_s=0.1)


@pytest.mark.parametrize(
    ("contents_s", "gradient_s", "grade_s", "expected"),
    [
        ([1, 2, 10], 1.0, 0.0, 10 + 1 + 1),  # the last content and its gradient
        ([1, 2, 3], 4.0, 0.0, 1 + 3 * 4 + 1),  # all work after the first content
        ([1, 9, 10], 2.0, 0.0, 9 + 2 * 2 + 1),  # what arrived late
        ([1, 2, 3], 1.0, 9.0, 3 + 9 + 1),  # the last verdict
    ],
)
def test_the_bound_is_the_longest_of_what_no_schedule_can_avoid(
    contents_s: list[float], gradient_s: float, grade_s: float, expected: float
):
    barrier = step(contents_s, gradient_s=gradient_s, grade_s=grade_s)
    assert endtoend.bound_s(barrier) == pytest.approx(expected)
    assert barrier.update_s == pytest.approx(1.0)
    assert barrier.work_s == pytest.approx(3 * gradient_s)
    total = contents_s[-1] + grade_s + 3 * gradient_s + 1
    assert barrier.step_s == pytest.approx(total)
    assert barrier.overlap == 0.0


def test_both_benchmarks_have_the_sizes_that_they_state():
    made = endtoend.config()
    longest = made.env.options["prompt_tokens"] + endtoend.NUM_TURNS * endtoend.TURN_TOKENS
    assert longest <= made.model.max_context
    assert made.env.options["num_turns"] == made.rollout.max_turns
    assert endtoend.longest_path(5) > endtoend.NUM_TURNS

    config = resolve(runpy.run_path(str(ROOT / "configs" / "bench_agentic.py"))["get_config"]())
    assert (config.run.groups_per_step, config.run.group_size) == (4, 8)
    assert agentic.num_parameters(config) == pytest.approx(0.5e6, rel=0.01)
    options = config.env.options
    own_tokens = (options["num_turns"] - 1) * options["turn_tokens"]
    own_tokens += config.rollout.max_turn_tokens
    assert (options["prompt_tokens"], own_tokens, options["num_turns"]) == (512, 256, 6)
    assert options["prompt_tokens"] + own_tokens <= config.model.max_context
