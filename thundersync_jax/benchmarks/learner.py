"""The learner's gradient work on one device: streamed, in barrier mode, and as one plain batch.

A group of 8 trajectories with 256 shared and 256 own tokens. Every figure is the median of paired
repetitions in one process; `reference` is `reference.py`, one ordinary batch gradient that shares
no prompt. The update itself is the same for all and left out, except in the tails.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.benchmarks import schedule
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.buckets import Example, make_example
from thundersync_jax.learner.compilation import compile_apart, temporary_cache
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.reference import reference_gradient
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.losses.advantages import standardized
from thundersync_jax.losses.objectives import grpo
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.trajectory import TrajectoryBuilder, TrajectoryTokens

GROUP_SIZE, OWN_TOKENS, LONG_PROMPT, SHORT_PROMPT = 8, 256, 256, 16
NUM_PAIRED = 15
SPACING = 1.2  # arrivals for the tails, in gradients of one trajectory
GRADER_GRADIENTS = 6.0  # a slow grader, in the same unit
SHORT_TOKENS = 48  # own tokens of the trajectories that are packed


def model() -> TransformerConfig:
    small = preset("tiny", vocab_size=512)
    return dataclasses.replace(
        small,
        num_layers=4,
        embed_dim=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        mlp_dim=768,
    )


def make_learner(**changes: Any) -> Learner:
    config = dataclasses.replace(
        LearnerSection(
            buckets=(256, 512),
            tokens_per_step=2048,
            pool_size=1,
            pairs_per_call=1,
            prompt_slots=1,
            max_logprob_gap=1e9,
        ),
        **changes,
    )
    learner = Learner(config, OptimizerSection(), model(), init_params(model(), 0))
    learner.warm_up()
    return learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One group."""

    prompt: tuple[int, ...]
    trajectories: tuple[TrajectoryTokens, ...]
    rewards: tuple[float, ...]


def workload(prompt_tokens: int, size: int = GROUP_SIZE, own_tokens: int = OWN_TOKENS) -> Workload:
    rng = np.random.default_rng(0)

    def trajectory() -> TrajectoryTokens:
        builder = TrajectoryBuilder()
        ids = rng.integers(0, 512, own_tokens).tolist()
        builder.append_action(ids, [-6.0] * own_tokens, [0] * own_tokens)
        return builder.build()

    return Workload(
        prompt=tuple(rng.integers(0, 512, prompt_tokens).tolist()),
        trajectories=tuple(trajectory() for _ in range(size)),
        rewards=tuple(rng.normal(size=size).tolist()),  # all differ: the most folds
    )


def work_s(learner: Learner, load: Workload, *, is_streamed: bool) -> float:
    """Seconds of work on one group.

    Args:
      is_streamed: each trajectory is folded as it arrives; otherwise all after the last reward.
    """
    began_s = time.perf_counter()
    group = learner.open_group("t", load.prompt, len(load.rewards))
    for index, (tokens, reward) in enumerate(zip(load.trajectories, load.rewards, strict=True)):
        learner.add_trajectory(group, index, tokens)
        learner.set_reward(group, index, reward)
        if is_streamed:
            learner.work()
    learner.work()
    elapsed_s = time.perf_counter() - began_s
    learner.abandon()
    return elapsed_s


def make_reference(load: Workload) -> Callable[[], float]:
    """Times one ordinary batch gradient of the same group."""
    settings, params = ScoreSettings(model=model()), init_params(model(), 0)
    prompt = np.asarray(load.prompt, np.int32)
    examples: Sequence[Example] = [
        make_example(prompt, tokens, grpo()) for tokens in load.trajectories
    ]
    advantages = standardized(np.asarray(load.rewards)).tolist()

    def run() -> float:
        began_s = time.perf_counter()
        jax.block_until_ready(
            reference_gradient(
                settings, params, examples, advantages, float(len(examples)), row_multiple=1
            )
        )
        return time.perf_counter() - began_s

    run()  # compiles
    return run


def tail(
    learner: Learner, load: Workload, gradient_s: float, *, grader_gradients: float = 0.0
) -> float:
    """Seconds from the last reward to the new weights.

    Args:
      gradient_s: of one trajectory; contents arrive SPACING of it apart.
      grader_gradients: what a verdict takes after its content, in gradients.
    """
    size = len(load.rewards)
    group = learner.open_group("t", load.prompt, size)
    events = [(SPACING * i, "content", i) for i in range(size)]
    events += [(SPACING * i + grader_gradients, "verdict", i) for i in range(size)]
    began_s = time.perf_counter()
    for due, kind, index in sorted(events):
        while time.perf_counter() < began_s + due * gradient_s:
            if learner.work(max_steps=1) == 0:
                time.sleep(1e-3)
        if kind == "content":
            learner.add_trajectory(group, index, load.trajectories[index])
        else:
            learner.set_reward(group, index, load.rewards[index])
    last_s = time.perf_counter()
    learner.update()
    return time.perf_counter() - last_s


def medians(timed: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each, taken in turn, forward and backward; the first round is warm-up."""
    rounds = []
    for repetition in range(repetitions + 1):
        names = list(timed)[:: -1 if repetition % 2 else 1]
        rounds.append({name: timed[name]() for name in names})
    return {name: [r[name] for r in rounds[1:]] for name in timed}


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the paired ratios."""
    pairs = zip(times[over], times[under], strict=True)
    return statistics.median(a / b for a, b in pairs)


@dataclasses.dataclass(frozen=True)
class Measured:
    """All that compiles."""

    sharing: Learner
    plain: Learner
    without_ahead: Learner
    packed: Learner
    scanned: Learner
    reference_s: Callable[[], float]

    @classmethod
    def make(cls) -> Measured:
        bucket = SHORT_PROMPT + SHORT_TOKENS
        ladder = {"buckets": (bucket, GROUP_SIZE * bucket), "held_gradients": 0}
        return cls(
            sharing=make_learner(prompt_buckets=(256,)),
            plain=make_learner(),
            without_ahead=make_learner(held_gradients=0, buckets=(512,)),
            packed=make_learner(**ladder, pack_tokens=GROUP_SIZE * bucket),
            scanned=make_learner(**ladder),
            reference_s=make_reference(workload(LONG_PROMPT)),
        )


def run() -> Report:
    """Medians over paired repetitions."""
    long, short = workload(LONG_PROMPT), workload(SHORT_PROMPT)
    with temporary_cache():
        compile_apart(Measured.make)
        measured = Measured.make()
    sharing, plain = measured.sharing, measured.plain
    times = medians(
        {
            "reference": measured.reference_s,
            "stream": lambda: work_s(sharing, long, is_streamed=True),
            "barrier": lambda: work_s(sharing, long, is_streamed=False),
            "barrier_unshared": lambda: work_s(plain, long, is_streamed=False),
            "stream_short": lambda: work_s(plain, short, is_streamed=True),
            "barrier_short": lambda: work_s(plain, short, is_streamed=False),
        },
        NUM_PAIRED,
    )
    spread = sorted(s / b for s, b in zip(times["stream"], times["barrier"], strict=True))
    results: dict[str, Any] = {
        "stream_over_reference": ratio(times, "stream", "reference"),
        "stream_over_barrier": ratio(times, "stream", "barrier"),
        "stream_over_barrier_quartiles": [spread[len(spread) // 4], spread[-1 - len(spread) // 4]],
        "stream_over_barrier_short_prompt": ratio(times, "stream_short", "barrier_short"),
        "barrier_tokens_over_reference_tokens": ratio(times, "reference", "barrier_unshared"),
        "reference_s": statistics.median(times["reference"]),
        "num_programs": sharing.warm_up(),
        "lane_fill": float(np.median([schedule.stream_step(s, 1.0).lane_fill for s in range(9)])),
    }
    gradient_s = statistics.median(times["stream"]) / GROUP_SIZE
    results |= tails(sharing, gradient_s) | packing(measured)
    results |= ahead(measured, statistics.median(times["stream_short"]) / GROUP_SIZE)
    config = {
        "group_size": GROUP_SIZE,
        "shared": LONG_PROMPT,
        "own": OWN_TOKENS,
        "rewards": long.rewards,
        "num_paired": NUM_PAIRED,
    }
    return Report(benchmark="learner", config=config, results=results)


def tails(learner: Learner, gradient_s: float) -> dict[str, float]:
    """The tail does not grow with the batch."""
    times = medians(
        {
            f"tail_s_{size}": functools.partial(
                tail, learner, workload(LONG_PROMPT, size), gradient_s
            )
            for size in (16, 64)
        },
        3,
    )
    return {name: statistics.median(found) for name, found in times.items()}


def ahead(measured: Measured, gradient_s: float) -> dict[str, float]:
    """What gradients ahead of verdicts save when a grader takes as long as 6 gradients."""
    learner, without = measured.plain, measured.without_ahead
    load = workload(SHORT_PROMPT)
    times = medians(
        {
            "ahead": lambda: tail(learner, load, gradient_s, grader_gradients=GRADER_GRADIENTS),
            "stream": lambda: tail(without, load, gradient_s, grader_gradients=GRADER_GRADIENTS),
        },
        NUM_PAIRED,
    )
    return {
        "slow_grader_tail_s": statistics.median(times["stream"]),
        "slow_grader_ahead_tail_s": statistics.median(times["ahead"]),
        "ahead_tail_over_stream_tail": ratio(times, "ahead", "stream"),
    }


def packing(measured: Measured) -> dict[str, float]:
    """Eight short trajectories whose rewards are known: in one lane, and in eight."""
    load = workload(SHORT_PROMPT, own_tokens=SHORT_TOKENS)
    times = medians(
        {
            "packed": lambda: work_s(measured.packed, load, is_streamed=False),
            "scanned": lambda: work_s(measured.scanned, load, is_streamed=False),
        },
        NUM_PAIRED,
    )
    return {"packed_over_scanned": ratio(times, "packed", "scanned")}
