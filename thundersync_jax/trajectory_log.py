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
    TOKEN_ARRAYS,
    Rollout,
    ScoredTurn,
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
    return {
        **dataclasses.asdict(t.key),
        "task_id": t.task_id,
        "reward": t.verdict.reward,
        "failure": t.verdict.failure,
        "stop_reason": rollout.stop_reason if rollout else None,
        "prompt_ids": list(t.prompt_ids),
        "segment_starts": list(rollout.tokens.segment_starts) if rollout else [],
        **(_tokens_to_json(rollout.tokens) if rollout else dict.fromkeys(TOKEN_ARRAYS)),
        "scored_turns": [
            {**_tokens_to_json(turn.tokens), "teacher_logprobs": turn.teacher_logprobs}
            for turn in t.scored_turns
        ],
        "turns": [dataclasses.asdict(turn) for turn in rollout.turns] if rollout else [],
        "dispatched_s": t.dispatched_s,
        "content_s": t.content_s,
        "terminal_s": t.terminal_s,
    }


def _from_json(line: dict[str, Any]) -> TrajectoryRecord:
    key = TrajectoryKey(step=line["step"], group=line["group"], index=line["index"])
    prompt_ids = tuple(line["prompt_ids"])
    rollout = None
    if line["token_ids"] is not None:
        rollout = Rollout(
            key=key,
            task_id=line["task_id"],
            prompt_ids=prompt_ids,
            tokens=_tokens_from_json(line),
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
        scored_turns=tuple(
            ScoredTurn(
                tokens=_tokens_from_json(turn),
                teacher_logprobs=np.asarray(turn["teacher_logprobs"], np.float64),
            )
            for turn in line.get("scored_turns", ())
        ),
    )


def _tokens_to_json(tokens: TrajectoryTokens) -> dict[str, Any]:
    arrays = {name: getattr(tokens, name) for name in TOKEN_ARRAYS}
    arrays["action_mask"] = tokens.action_mask.astype(int)
    for name in ("behavior_logprobs", "reference_logprobs"):
        arrays[name] = None if arrays[name] is None else arrays[name].astype(float)
    return arrays


def _tokens_from_json(line: dict[str, Any]) -> TrajectoryTokens:
    arrays: dict[str, Any] = {name: line.get(name) for name in TOKEN_ARRAYS}
    given = {name: np.asarray(values) for name, values in arrays.items() if values is not None}
    return TrajectoryTokens(**given, segment_starts=tuple(line.get("segment_starts", ())))
