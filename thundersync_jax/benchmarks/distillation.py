"""The tail of distillation: from the last score of a step to the new weights.

Trajectories of NUM_TURNS scored turns arrive SPACING whole gradients apart, so that the learner can
keep up although turns run twice: `work_over_whole` says how often. `idle` streams turns and replays
them with a forward pass each, `kept` from residuals, `never` differentiates whole trajectories at
their end. A trajectory fills its bucket and a turn its own, for a padded position costs as much.
Every call passes over all parameters to fold what it found: turns must be long against that.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import numpy as np

from thundersync_jax.benchmarks import turns
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.benchmarks.turn_arrivals import TurnCase, turn
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.compilation import compile_apart, temporary_cache
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import init_params

NUM_TURNS, READ_TOKENS, SAMPLED_TOKENS, PROMPT_TOKENS = 4, 32, 96, 1
BUCKETS = (128, 512)
VOCAB_SIZE = 8192
SPACING = 2.0  # of trajectories, in gradients of a whole one
TURN_SPACING = 0.8
NUM_CACHES = 4
REPETITIONS = {16: 5, 64: 2}
MODES = {
    "never": OpdSection(stream_turns="never"),
    "idle": OpdSection(stream_turns="idle", num_caches=NUM_CACHES),
    "kept": OpdSection(stream_turns="idle", num_caches=NUM_CACHES, num_residuals=8),
}


def model() -> TransformerConfig:
    """That of `benchmark turns`, with fewer words."""
    return dataclasses.replace(turns.model(), vocab_size=VOCAB_SIZE)


def make_distiller(opd: OpdSection) -> Distiller:
    config = LearnerSection(buckets=BUCKETS, tokens_per_step=BUCKETS[-1], max_logprob_gap=1e9)
    distiller = Distiller(config, opd, OptimizerSection(), model(), init_params(model(), 0))
    distiller.warm_up()
    return distiller


def make_distillers() -> dict[str, Distiller]:
    """All that compiles."""
    return {name: make_distiller(opd) for name, opd in MODES.items()}


@functools.cache
def case() -> TurnCase:
    """One trajectory; all are alike."""
    rng = np.random.default_rng(0)
    turns = [turn(rng, READ_TOKENS, SAMPLED_TOKENS, 0) for _ in range(NUM_TURNS)]
    return TurnCase(prompt=tuple(range(PROMPT_TOKENS)), turns=tuple(turns))


def whole_s(distiller: Distiller) -> float:
    """Seconds of one whole trajectory's gradient, without the update."""
    (group,) = _open(distiller, 1)
    for one in case().turns:
        distiller.add_turn(group, 0, one)
    distiller.add_trajectory(group, 0, case().tokens)
    began_s = time.perf_counter()
    distiller.work()
    elapsed_s = time.perf_counter() - began_s
    distiller.update()
    return elapsed_s


def tail(distiller: Distiller, num_trajectories: int, gradient_s: float) -> dict[str, float]:
    """Seconds from the last score to the new weights, of the update in it, and of all calls.

    Args:
      gradient_s: of one whole trajectory.
    """
    groups = _open(distiller, num_trajectories)
    events = sorted(
        (SPACING * at + TURN_SPACING * number, at, number)
        for at in range(num_trajectories)
        for number in range(NUM_TURNS)
    )
    distiller.take_work_log()
    began_s = time.perf_counter()
    for due, at, number in events:
        while time.perf_counter() < began_s + due * gradient_s:
            if distiller.work(max_steps=1) == 0:
                time.sleep(1e-3)
        distiller.add_turn(groups[at], 0, case().turns[number])
        if number == NUM_TURNS - 1:
            distiller.add_trajectory(groups[at], 0, case().tokens)
    last_s = time.perf_counter()
    report = distiller.update()
    items = distiller.take_work_log()
    times = [item.ended_s - item.started_s for item in items]
    return {
        "tail_s": time.perf_counter() - last_s,
        "update_s": times[-1],
        "work_s": sum(times[:-1]) / num_trajectories,
        "replayed_gflops": report.replayed_flops / num_trajectories / 1e9,
    }


def _open(distiller: Distiller, count: int) -> list[int]:
    return [distiller.open_group("t", case().prompt, 1) for _ in range(count)]


def run() -> Report:
    """Medians over repetitions, the modes in turn."""
    with temporary_cache():
        compile_apart(make_distillers)
        distillers = make_distillers()
    for distiller in distillers.values():
        tail(distiller, 2, 0.0)  # first calls
    gradient_s = statistics.median(whole_s(distillers["never"]) for _ in range(5))
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for size, repetitions in REPETITIONS.items():
        for _ in range(repetitions):
            for name, distiller in distillers.items():
                found.setdefault((name, size), []).append(tail(distiller, size, gradient_s))
    update_s = statistics.median(one["update_s"] for some in found.values() for one in some)
    results: dict[str, Any] = {"whole_gradient_s": gradient_s, "update_s": update_s}
    for name, distiller in distillers.items():
        for size in REPETITIONS:
            tail_s = statistics.median(one["tail_s"] for one in found[name, size])
            results[f"{name}_tail_s_{size}"] = tail_s
            results[f"{name}_tail_over_whole_{size}"] = tail_s / (gradient_s + update_s)
        some = [one for size in REPETITIONS for one in found[name, size]]
        work_s = statistics.median(one["work_s"] for one in some)
        results[f"{name}_work_over_whole"] = work_s / gradient_s
        gflops = statistics.median(one["replayed_gflops"] for one in some)
        results[f"{name}_replayed_gflops_a_trajectory"] = gflops
        results[f"{name}_peak_mb"] = distiller.memory.peak_bytes / 1e6
    config = {
        "num_turns": NUM_TURNS,
        "tokens": PROMPT_TOKENS + NUM_TURNS * (READ_TOKENS + SAMPLED_TOKENS),
        "spacing": SPACING,
        "num_caches": NUM_CACHES,
        "repetitions": REPETITIONS,
    }
    return Report(benchmark="distillation", config=config, results=results)
