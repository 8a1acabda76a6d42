"""`timeline.json`: the last steps of a run as a Chrome trace (chrome://tracing, ui.perfetto.dev).

One row for the step and its update, one for the learner's program calls, one for each serving slot:
sampling and the tool or verifier that follows it, each named by its trajectory. Times are
microseconds on the run's clock.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thundersync_jax.metrics import write_atomically
from thundersync_jax.trajectory import TrajectoryKey, Turn
from thundersync_jax.transport.messages import WorkItem

MAX_STEPS = 20

_STEPS, _SLOTS, _LEARNER = 0, 1, 2


class Timeline:
    """Keeps the events of the last MAX_STEPS steps; `write` replaces the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: collections.deque[list[dict[str, Any]]] = collections.deque(maxlen=MAX_STEPS)

    def add_step(
        self,
        *,
        step: int,
        opened_s: float,
        last_reward_s: float,
        ended_s: float,
        turns: Iterable[tuple[TrajectoryKey, Sequence[Turn], float]],
        work: Iterable[WorkItem],
    ) -> None:
        """Adds one step.

        Args:
          turns: for each trajectory its key, its turns, and when its verdict was known.
          work: the learner's calls.
        """
        events = [
            _span(f"step {step}", _STEPS, 0, opened_s, last_reward_s),
            _span(f"step {step} tail", _STEPS, 0, last_reward_s, ended_s),
        ]
        for key, trajectory, terminal_s in turns:
            name = f"{key.group}.{key.index}"
            for number, turn in enumerate(trajectory):
                events.append(
                    _span(
                        f"{name} turn {number}", _SLOTS, turn.slot, turn.started_s, turn.sampled_s
                    )
                )
                events.append(_span("tool", _SLOTS, turn.slot, turn.sampled_s, turn.ended_s))
            if trajectory:
                last = trajectory[-1]
                events.append(_span(f"{name} grade", _SLOTS, last.slot, last.ended_s, terminal_s))
        events += [
            _span(
                item.path,
                _LEARNER,
                0,
                item.started_s,
                item.ended_s,
                trajectories=item.num_trajectories,
            )
            for item in work
        ]
        self._steps.append(events)

    def write(self) -> None:
        """Writes the file anew."""
        events = [event for step in self._steps for event in step]
        slots = sorted({e["tid"] for e in events if e["pid"] == _SLOTS})
        names = [
            _name("process_name", _STEPS, 0, "steps"),
            _name("process_name", _SLOTS, 0, "serving"),
            _name("process_name", _LEARNER, 0, "learner"),
            *(_name("thread_name", _SLOTS, slot, f"slot {slot}") for slot in slots),
        ]
        write_atomically(self._path, json.dumps({"traceEvents": names + events}))


def _span(
    name: str, process: int, thread: int, start_s: float, end_s: float, **args: Any
) -> dict[str, Any]:
    duration_us = max(0.0, (end_s - start_s) * 1e6)
    event = {"name": name, "ph": "X", "pid": process, "tid": thread}
    return {**event, "ts": round(start_s * 1e6, 1), "dur": round(duration_us, 1), "args": args}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
