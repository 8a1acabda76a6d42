"""The learner's gradient work on one device: streamed, in barrier mode, and as one plain batch.

A group of 8 trajectories with 256 shared and 256 own tokens. Every figure is the median of paired
repetitions in one process; `reference` is `reference.py`, one ordinary batch gradient that shares
no prompt. The update itself is the same for all and left out, except in the tails.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from thundersync_jax.benchmarks.report import Report
from thundersync_jax.config_sections import LearnerSection, OptimizerSection
from thundersync_jax.learner.buckets import Example, make_example
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.reference import reference_gradient
from thundersync_jax.learner.streaming import ScoreSettings
from thundersync_jax.losses.advantages import group_moments
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.trajectory import TrajectoryBuilder, TrajectoryTokens

GROUP_SIZE, OWN_TOKENS, LONG_PROMPT, SHORT_PROMPT = 8, 256, 256, 16
NUM_PAIRED = 7
SPACING = 1.2  # arrivals for the tails, in gradients of one trajectory


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


def make_learner(*, prompt_buckets: tuple[int, ...]) -> Learner:
    config = LearnerSection(
        buckets=(256, 512),
        tokens_per_step=2048,
        pool_size=1,
        prompt_buckets=prompt_buckets,
        prompt_slots=1,
        max_logprob_gap=1e9,
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


def workload(prompt_tokens: int, size: int = GROUP_SIZE) -> Workload:
    rng = np.random.default_rng(0)

    def trajectory() -> TrajectoryTokens:
        builder = TrajectoryBuilder()
        ids = rng.integers(0, 512, OWN_TOKENS).tolist()
        builder.append_action(ids, [-6.0] * OWN_TOKENS, [0] * OWN_TOKENS)
        return builder.build()

    return Workload(
        prompt=tuple(rng.integers(0, 512, prompt_tokens).tolist()),
        trajectories=tuple(trajectory() for _ in range(size)),
        rewards=tuple(rng.normal(size=size).tolist()),
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
        make_example(prompt, tokens, "token_mean") for tokens in load.trajectories
    ]
    moments = group_moments(load.rewards, "grpo")
    advantages = [moments.advantage(reward) for reward in load.rewards]

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


def tail(learner: Learner, size: int, gradient_s: float) -> float:
    """Seconds from the last of `size` rewards to the new weights, arrivals SPACING apart."""
    load = workload(LONG_PROMPT, size)
    group = learner.open_group("t", load.prompt, size)
    began_s = time.perf_counter()
    for index, (tokens, reward) in enumerate(zip(load.trajectories, load.rewards, strict=True)):
        due_s = began_s + index * SPACING * gradient_s
        while time.perf_counter() < due_s:
            if learner.work(max_steps=1) == 0:
                time.sleep(max(0.0, min(1e-3, due_s - time.perf_counter())))
        learner.add_trajectory(group, index, tokens)
        learner.set_reward(group, index, reward)
    last_s = time.perf_counter()
    learner.update()
    return time.perf_counter() - last_s


def run() -> Report:
    """Medians over paired repetitions."""
    long, short = workload(LONG_PROMPT), workload(SHORT_PROMPT)
    sharing, plain = make_learner(prompt_buckets=(256,)), make_learner(prompt_buckets=())
    reference = make_reference(long)
    timed: dict[str, Callable[[], float]] = {
        "reference": reference,
        "stream": lambda: work_s(sharing, long, is_streamed=True),
        "barrier": lambda: work_s(sharing, long, is_streamed=False),
        "barrier_unshared": lambda: work_s(plain, long, is_streamed=False),
        "stream_short": lambda: work_s(plain, short, is_streamed=True),
        "barrier_short": lambda: work_s(plain, short, is_streamed=False),
    }
    rounds = [{name: measure() for name, measure in timed.items()} for _ in range(NUM_PAIRED + 1)]

    def ratio(over: str, under: str) -> float:
        return statistics.median(r[over] / r[under] for r in rounds[1:])

    gradient_s = statistics.median(r["stream"] for r in rounds[1:]) / GROUP_SIZE
    tails = {
        size: statistics.median(tail(sharing, size, gradient_s) for _ in range(3))
        for size in (16, 64)
    }
    return Report(
        benchmark="learner",
        config={"group_size": GROUP_SIZE, "shared": LONG_PROMPT, "own": OWN_TOKENS},
        results={
            "stream_over_reference": ratio("stream", "reference"),
            "stream_over_barrier": ratio("stream", "barrier"),
            "stream_over_barrier_short_prompt": ratio("stream_short", "barrier_short"),
            "barrier_tokens_over_reference_tokens": ratio("reference", "barrier_unshared"),
            "reference_s": statistics.median(r["reference"] for r in rounds[1:]),
            "tail_s_16": tails[16],
            "tail_s_64": tails[64],
            "num_programs": sharing.warm_up(),
        },
    )
