"""Agents of many turns with slow tools: what an update takes in stream and in barrier mode.

Runs `train` on configs/bench_agentic.py in processes of their own, stream and barrier in turn, so
that the peak memory is each mode's own. Figures are medians over the steps of all runs, without the
first of each, from metrics.jsonl and the trajectories' files:

    update_s              opening of the step to the new weights in the engine
    tokens_per_s          tokens of prompts and trajectories trained on, over update_s
    learner_idle_share    share of the step in which the learner runs no program
    step_over_tool_path   update_s over the step's longest tool path: the waits of one trajectory,
                          one after the other, as they were drawn
    peak_rss_mb           the most memory of a run's process

Both modes draw the same waits.
"""

from __future__ import annotations

import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

import thundersync_jax
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.config import RunConfig, resolve
from thundersync_jax.envs.paced_tool import paced_tool
from thundersync_jax.errors import UserError
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.trajectory import TrajectoryRecord
from thundersync_jax.trajectory_log import read_step

CONFIG = Path(thundersync_jax.__file__).parents[1] / "configs" / "bench_agentic.py"
MODES = ("stream", "barrier")
NUM_RUNS = 2  # of each mode
RUN_TIMEOUT_S = 900.0


class TrainFailedError(UserError, RuntimeError):
    """A run of `train` that did not end well: its last words."""


def run() -> Report:
    """Medians over steps."""
    config = resolve(runpy.run_path(str(CONFIG))["get_config"]())
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="thundersync-agentic-") as directory:
        for number in range(NUM_RUNS):
            for mode in MODES[:: -1 if number % 2 else 1]:
                print(f"run {number + 1} of {NUM_RUNS}, {mode}", file=sys.stderr)
                workdir = Path(directory) / f"{mode}-{number}"
                _train(workdir, mode)
                found[mode] += _steps(config, workdir)[1:]
    results: dict[str, Any] = {"num_parameters": num_parameters(config)}
    for mode, steps in found.items():
        for name in steps[0]:
            values = sorted(step[name] for step in steps)
            results[f"{mode}_{name}"] = statistics.median(values)
            if name in ("update_s", "step_over_tool_path"):
                results[f"{mode}_{name}_spread"] = [values[0], values[-1]]
    sizes = {
        "config": str(CONFIG.relative_to(CONFIG.parents[1])),
        "groups": config.run.groups_per_step,
        "group_size": config.run.group_size,
        **config.env.options,
        "num_steps": len(found[MODES[0]]),
    }
    return Report(benchmark="agentic", config=sizes, results=results)


def num_parameters(config: RunConfig) -> int:
    vocab_size = len(paced_tool(**config.env.options).vocabulary)
    model = preset(config.model.preset, vocab_size=vocab_size)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _train(workdir: Path, mode: str) -> None:
    """A run of `train`; all of one parent directory share their compiled programs."""
    shared = workdir.parent / "compile_cache"
    shared.mkdir(exist_ok=True)
    workdir.mkdir()
    (workdir / "compile_cache").symlink_to(shared)
    command = [
        *(sys.executable, "-m", "thundersync_jax.train", f"--config={CONFIG}"),
        *(f"--workdir={workdir}", f"--config.run.mode={mode}", "--config.run.progress=none"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if ended.returncode != 0:
        words = ended.stderr.strip()[-2000:]
        raise TrainFailedError(f"{' '.join(command)} exited with {ended.returncode}: {words}")


def _steps(config: RunConfig, workdir: Path) -> list[dict[str, float]]:
    """The figures of every step of a run."""
    return [
        _figures(config, line, _records(config, workdir, line["step"]))
        for line in read_jsonl(workdir / "metrics.jsonl")
    ]


def _records(config: RunConfig, workdir: Path, step: int) -> list[TrajectoryRecord]:
    return read_step(
        workdir / "trajectories",
        step,
        num_groups=config.run.groups_per_step,
        group_size=config.run.group_size,
    )


def _figures(
    config: RunConfig, line: dict[str, Any], records: list[TrajectoryRecord]
) -> dict[str, float]:
    suite = paced_tool(**config.env.options)
    rollouts = [record.rollout for record in records if record.rollout is not None]
    own_tokens = [len(rollout.tokens.token_ids) for rollout in rollouts]
    num_prompt_tokens = sum(len(rollout.prompt_ids) for rollout in rollouts)
    update_s = line["step_s"]
    return {
        "update_s": update_s,
        "tokens_per_s": (num_prompt_tokens + sum(own_tokens)) / update_s,
        "learner_idle_share": 1.0 - line["learner_busy_s"] / update_s,
        "step_over_tool_path": update_s / max(suite.tool_path_s(record.key) for record in records),
        "peak_rss_mb": line["peak_rss_mb"],
        "overlap": line["overlap"],
        "tail_s": line["tail_s"],
        "own_tokens_mean": statistics.mean(own_tokens),
        "turns_mean": statistics.mean(len(rollout.turns) for rollout in rollouts),
        "num_failed": line["num_failed"],
    }
