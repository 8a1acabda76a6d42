"""A step's line in metrics.jsonl, computed from what the coordinator and the learner saw. Pure."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Sequence
from typing import Any

from thundersync_jax.coordinator.step_run import StepResult
from thundersync_jax.transport.messages import ServingStatistics, UpdateReport, WorkItem


def overlap(work: Sequence[WorkItem], last_reward_s: float) -> float:
    """Share of the learner's device-seconds that were complete before the step's last reward."""
    total = sum(item.ended_s - item.started_s for item in work)
    early = sum(item.ended_s - item.started_s for item in work if item.ended_s <= last_reward_s)
    return early / total if total > 0 else 0.0


def peak_rss_mb() -> float:
    """The most memory this process held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def report_fields(
    step: int, report: UpdateReport, rewards: Sequence[float], solved_reward: float
) -> dict[str, Any]:
    """What a line says of the update itself; a reward of at least `solved_reward` is solved."""
    fields = dataclasses.asdict(report)
    del fields["is_empty"]
    solved = sum(r >= solved_reward for r in rewards) / len(rewards) if rewards else None
    return {"step": step, "solved": solved, **fields}


def step_line(
    result: StepResult,
    work: Sequence[WorkItem],
    serving: ServingStatistics,
    *,
    solved_reward: float,
    compiles: int,
) -> dict[str, Any]:
    """The line of a rolled-out step.

    Args:
      work: the learner's calls in this step, the update included.
      serving: what the decode loop did in it.
      compiles: programs compiled or loaded during the step.
    """
    rewards = [r.verdict.reward for r in result.records if r.verdict.reward is not None]
    contents = [r.rollout for r in result.records if r.rollout is not None]
    ended_s = result.updated_s if result.published_s is None else result.published_s
    last_content_s = result.opened_s if result.rollout_s is None else result.rollout_s
    return {
        **report_fields(result.step, result.report, rewards, solved_reward),
        "step_s": ended_s - result.opened_s,
        "rollout_s": last_content_s - result.opened_s,
        "learner_busy_s": sum(item.ended_s - item.started_s for item in work),
        "overlap": overlap(work, result.last_reward_s),
        "tail_s": ended_s - result.last_reward_s,
        "max_loop_lag_s": result.max_loop_lag_s,
        "decode_stall_s": result.decode_stall_s,
        "serving": {"slot_utilization": serving.slot_utilization, **dataclasses.asdict(serving)},
        "num_rewrites": sum(len(content.tokens.segment_starts) for content in contents),
        "malformed_calls": sum(bool(turn.error) for c in contents for turn in c.turns),
        "compiles": compiles,
        "peak_rss_mb": peak_rss_mb(),
    }


def replayed_line(
    step: int, report: UpdateReport, rewards: Sequence[float], *, solved_reward: float
) -> dict[str, Any]:
    """The line of a step that was trained on from its log: no times, for nothing rolled out."""
    return {**report_fields(step, report, rewards, solved_reward), "is_replayed": True}
