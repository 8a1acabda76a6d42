"""`trajectories/step_NNNNNN.jsonl`: every trajectory of a step, one a line, whole or not at all.

The file of a step is written after its last verdict and before its update. Its presence is the
step's commit point: a resumed run replays the steps that have a file and are newer than the
checkpoint (gradients, no rollouts), and rolls out everything later again. So every logged
trajectory is trained on exactly once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.errors import UserError
from thundersync_jax.metrics import read_jsonl, write_jsonl_atomically
from thundersync_jax.trajectory import (
    Rollout,
    TrajectoryKey,
    TrajectoryRecord,
    TrajectoryTokens,
    Turn,
    Verdict,
)


class TrajectoryLogError(UserError, ValueError):
    """A file of trajectories that cannot be read: which, why, and what to do."""


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.jsonl"


def write_step(directory: Path, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
    """Commits the step. All of the file appears at once."""
    directory.mkdir(parents=True, exist_ok=True)
    write_jsonl_atomically(step_path(directory, step), [_to_json(t) for t in trajectories])


def read_step(
    directory: Path, step: int, *, num_groups: int, group_size: int, max_refilled: int = 0
) -> list[TrajectoryRecord]:
    """A committed step's trajectories, sorted by key; raises TrajectoryLogError.

    Args:
      max_refilled: so many groups there may be besides.
    """
    path = step_path(directory, step)
    if not path.exists():
        raise TrajectoryLogError(f"{path} does not exist: step {step} was not committed")
    try:
        trajectories = [_from_json(line) for line in read_jsonl(path)]
    except (KeyError, TypeError, ValueError) as error:
        raise TrajectoryLogError(
            f"{path} is not a file of trajectories ({type(error).__name__}: {error}); move it away "
            "to roll "
            "the step out again"
        ) from error
    found = sorted(trajectories, key=lambda t: t.key)
    count = min(max(len(found) // group_size, num_groups), num_groups + max_refilled)
    expected = [(step, group, index) for group in range(count) for index in range(group_size)]
    if [(t.key.step, t.key.group, t.key.index) for t in found] != expected:
        raise TrajectoryLogError(
            f"{path} holds {len(found)} trajectories, expected those of {count} groups of "
            f"{group_size}, each once: move it away to roll the step out again"
        )
    return found


def _to_json(t: TrajectoryRecord) -> dict[str, Any]:
    rollout = t.rollout
    tokens = rollout.tokens if rollout else None
    return {
        **dataclasses.asdict(t.key),
        "task_id": t.task_id,
        "reward": t.verdict.reward,
        "failure": t.verdict.failure,
        "stop_reason": rollout.stop_reason if rollout else None,
        "prompt_ids": list(t.prompt_ids),
        "token_ids": tokens.token_ids if tokens else None,
        "action_mask": tokens.action_mask.astype(int) if tokens else None,
        "behavior_logprobs": tokens.behavior_logprobs.astype(float) if tokens else None,
        "policy_versions": tokens.policy_versions if tokens else None,
        "reference_logprobs": _floats(tokens.reference_logprobs) if tokens else None,
        "turns": [dataclasses.asdict(turn) for turn in rollout.turns] if rollout else [],
        "dispatched_s": t.dispatched_s,
        "content_s": t.content_s,
        "terminal_s": t.terminal_s,
    }


def _floats(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.astype(float)


def _from_json(line: dict[str, Any]) -> TrajectoryRecord:
    key = TrajectoryKey(step=line["step"], group=line["group"], index=line["index"])
    prompt_ids = tuple(line["prompt_ids"])
    rollout = None
    if line["token_ids"] is not None:
        rollout = Rollout(
            key=key,
            task_id=line["task_id"],
            prompt_ids=prompt_ids,
            tokens=TrajectoryTokens(
                token_ids=np.asarray(line["token_ids"], np.int32),
                action_mask=np.asarray(line["action_mask"], np.bool_),
                behavior_logprobs=np.asarray(line["behavior_logprobs"], np.float32),
                policy_versions=np.asarray(line["policy_versions"], np.int32),
                reference_logprobs=line.get("reference_logprobs"),
            ),
            turns=tuple(Turn(**turn) for turn in line["turns"]),
            stop_reason=line["stop_reason"],
        )
    return TrajectoryRecord(
        key=key,
        task_id=line["task_id"],
        prompt_ids=prompt_ids,
        rollout=rollout,
        verdict=Verdict(reward=line["reward"], failure=line["failure"]),
        dispatched_s=line["dispatched_s"],
        content_s=line["content_s"],
        terminal_s=line["terminal_s"],
    )
