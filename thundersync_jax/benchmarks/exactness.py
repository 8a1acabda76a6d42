"""How far the streamed gradient is from one ordinary batch gradient, over many arrival orders."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from thundersync_jax.benchmarks.arrivals import (
    VOCAB_SIZE,
    random_batch,
    reference,
    rel_l2,
    run_events,
)
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.benchmarks.turn_arrivals import worst_distance
from thundersync_jax.config_sections import LearnerSection, OptimizerSection
from thundersync_jax.learner.learner import Learner
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import init_params

POOL_SIZES = (0, 1, 8)
ORDERS_PER_OBJECTIVE = 4
# name -> (learner.objective, learner.objective_options): every built-in one, and what terms add.
OBJECTIVES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo_kl_entropy": (
        "grpo",
        {
            "normalizer": "trajectory_mean",
            "kl_coefficient": 0.1,
            "entropy_coefficient": 0.05,
            "terms_normalizer": "token_mean",
        },
    ),
    "grpo_kl_of_groups": (
        "grpo",
        {"kl_coefficient": 0.1, "kl_estimator": "k2", "terms_scope": "group"},
    ),
    "dr_grpo": ("dr_grpo", {"normalizer_tokens": 32}),
    "rloo": ("rloo", {}),
    "dapo": (
        "dapo",
        {
            "overlong_tokens": 12,
            "overlong_cache": 6,
            "kl_coefficient": 0.1,
            "kl_estimator": "k1",
            "terms_normalizer": "token_mean",
        },
    ),
    "gspo": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    "cispo": ("cispo", {"clip_low": 0.5, "clip_high": 0.2}),
    "reinforce_pp": (
        "reinforce_pp",
        {"kl_coefficient": 0.2, "terms_normalizer": "trajectory_mean"},
    ),
    "tis_reinforce": ("tis_reinforce", {"cap": 1.1}),
    "ppo": ("ppo", {}),
}
ORDERS_PER_POOL = 8


def run() -> Report:
    """The worst relative L2 distance over all orders and pool sizes, in float32 and float64; and so
    for every objective, with one pair and gradients ahead of verdicts, and for distillation by
    turns.
    """
    distances: dict[str, float] = {}
    objectives: dict[str, dict[str, float]] = {name: {} for name in (*OBJECTIVES, "opd")}
    for dtype, key in (("float32", "rel_l2_fp32"), ("float64", "rel_l2_fp64")):
        with jax.enable_x64(dtype == "float64"):
            pools = [_distance(dtype, ORDERS_PER_POOL, pool_size=n) for n in POOL_SIZES]
            distances[key] = max(pools)
            for name, (objective, options) in OBJECTIVES.items():
                objectives[name][key] = _distance(
                    dtype,
                    ORDERS_PER_OBJECTIVE,
                    pool_size=1,
                    objective=objective,
                    objective_options=options,
                )
            print(f"{dtype}, distillation by turns", file=sys.stderr)
            model = preset("tiny", vocab_size=VOCAB_SIZE, dtype=dtype)
            objectives["opd"][key] = worst_distance(model)
    return Report(
        benchmark="exactness",
        config={
            "model": "tiny",
            "pool_sizes": POOL_SIZES,
            "orders_per_pool": ORDERS_PER_POOL,
            "orders_per_objective": ORDERS_PER_OBJECTIVE,
        },
        results={
            **distances,
            "num_orders": len(POOL_SIZES) * ORDERS_PER_POOL,
            "objectives": objectives,
        },
    )


def _distance(dtype: str, num_orders: int, **changes: Any) -> float:
    """The worst distance over so many orders; each has a batch of its own."""
    named = ", ".join(f"{key} {value}" for key, value in changes.items())
    print(f"{dtype}, {named}: {num_orders} orders", file=sys.stderr)
    model = preset("tiny", vocab_size=VOCAB_SIZE, dtype=dtype)
    config = dataclasses.replace(LearnerSection(tokens_per_step=64, max_logprob_gap=1e9), **changes)
    learner = Learner(config, OptimizerSection(), model, init_params(model, 0))
    distances = []
    for order in range(num_orders):
        cases = random_batch(order)
        want = reference(model, learner.state.params, cases, config)
        run_events(learner, cases, np.random.default_rng(order))
        distances.append(rel_l2(learner.gradient(), want))
        learner.abandon()
    return max(distances)
