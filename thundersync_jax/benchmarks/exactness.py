"""How far the streamed gradient is from one ordinary batch gradient, over many arrival orders."""

from __future__ import annotations

import dataclasses
import sys

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
ORDERS_PER_POOL = 8


def run() -> Report:
    """The worst relative L2 distance over all orders and pool sizes, in float32 and float64."""
    worst, by_turns = {}, {}
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            worst[dtype] = max(_distance(dtype, pool_size) for pool_size in POOL_SIZES)
            print(f"{dtype}, distillation by turns", file=sys.stderr)
            by_turns[dtype] = worst_distance(preset("tiny", vocab_size=VOCAB_SIZE, dtype=dtype))
    return Report(
        benchmark="exactness",
        config={"model": "tiny", "pool_sizes": POOL_SIZES, "orders_per_pool": ORDERS_PER_POOL},
        results={
            "rel_l2_fp32": worst["float32"],
            "rel_l2_fp64": worst["float64"],
            "objectives": {
                "opd": {"rel_l2_fp32": by_turns["float32"], "rel_l2_fp64": by_turns["float64"]}
            },
            "num_orders": len(POOL_SIZES) * ORDERS_PER_POOL,
        },
    )


def _distance(dtype: str, pool_size: int) -> float:
    """The worst distance over this pool's orders; each order has a batch of its own."""
    print(f"{dtype}, pool of {pool_size}: {ORDERS_PER_POOL} orders", file=sys.stderr)
    model = preset("tiny", vocab_size=VOCAB_SIZE, dtype=dtype)
    config = dataclasses.replace(
        LearnerSection(), pool_size=pool_size, tokens_per_step=64, max_logprob_gap=1e9
    )
    learner = Learner(config, OptimizerSection(), model, init_params(model, 0))
    distances = []
    for order in range(ORDERS_PER_POOL):
        cases = random_batch(order)
        want = reference(model, learner.state.params, cases, config)
        run_events(learner, cases, np.random.default_rng(order))
        distances.append(rel_l2(learner.gradient(), want))
        learner.abandon()
    return max(distances)
