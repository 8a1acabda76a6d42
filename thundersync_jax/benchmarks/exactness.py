"""How far the streamed gradient is from one ordinary batch gradient, over many arrival orders; and
what the same bits in every order cost.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from thundersync_jax.benchmarks import exact_orders, learner
from thundersync_jax.benchmarks.arrivals import (
    VOCAB_SIZE,
    random_batch,
    reference,
    rel_l2,
    run_events,
)
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.benchmarks.turn_arrivals import worst_distance
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
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
    "grpo_distillation": (
        "grpo",
        {
            "normalizer": "trajectory_mean",
            "distillation_coefficient": 0.5,
            "distillation_ratio_cap": 1.2,
            "terms_normalizer": "token_mean",
        },
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
    "reinforce_pp_baseline": (
        "reinforce_pp_baseline",
        {"kl_coefficient": 0.2, "kl_estimator": "k2"},
    ),
    "tis_reinforce": ("tis_reinforce", {"cap": 1.1}),
    "ppo": ("ppo", {}),
}
ORDERS_PER_POOL = 8
EXACT_MESHES = ((1, 1, 1), (2, 2, 2))
# One that streams by trajectory, group and batch, each with terms; on the last mesh.
EXACT_OBJECTIVES = ("grpo_kl_entropy", "dapo", "reinforce_pp")
EXACT_ORDERS_PER_OBJECTIVE = 6
NUM_PAIRED = 9


def run() -> Report:
    """The worst relative L2 distance over all orders and pool sizes, in float32 and float64; so for
    every objective, with one pair and gradients ahead of verdicts, and for distillation by turns;
    then the figures of exact sums.
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
            "exact_pool_sizes": exact_orders.POOL_SIZES,
            "exact_meshes": EXACT_MESHES,
            "exact_orders_per_objective": EXACT_ORDERS_PER_OBJECTIVE,
            "exact_num_paired": NUM_PAIRED,
        },
        results={
            **distances,
            "num_orders": len(POOL_SIZES) * ORDERS_PER_POOL,
            "objectives": objectives,
            **_exact_bits(),
            "exact_objectives": {name: _exact_objective(name) for name in EXACT_OBJECTIVES},
            **_exact_cost(),
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


def _exact_bits() -> dict[str, Any]:
    """Hashes of the weights after a few steps: one a mesh, whatever the order."""
    found = []
    for shape in EXACT_MESHES:
        print(f"exact, mesh {shape}: {exact_orders.NUM_ORDERS} orders", file=sys.stderr)
        found.append(exact_orders.bits_on(shape))
    distances = [distance for bits in found for distance in bits.distances]
    return {
        "exact_num_orders": exact_orders.NUM_ORDERS,
        "exact_num_hashes": max(bits.num_hashes for bits in found),
        "exact_stream_equals_barrier": all(
            bits.hashes["stream"] == bits.hashes["barrier"] for bits in found
        ),
        "exact_num_promotions": [bits.num_promotions for bits in found],
        "exact_paths": [bits.paths for bits in found],
        "exact_rel_l2_worst": max(distances),
        "exact_rel_l2_median": statistics.median(distances),
    }


def _exact_objective(name: str) -> dict[str, Any]:
    print(f"exact, {name}: {EXACT_ORDERS_PER_OBJECTIVE} orders", file=sys.stderr)
    objective, options = OBJECTIVES[name]
    config = dataclasses.replace(
        exact_orders.CONFIG, objective=objective, objective_options=options
    )
    bits = exact_orders.bits_on(EXACT_MESHES[-1], config, EXACT_ORDERS_PER_OBJECTIVE)
    return {"num_hashes": bits.num_hashes, "rel_l2_worst": max(bits.distances)}


def _exact_cost() -> dict[str, Any]:
    """Streamed steps of one group of 8 x (256 shared + 256 own) tokens, exact over ordered."""
    print(f"exact over ordered: {NUM_PAIRED} pairs of steps", file=sys.stderr)
    load = learner.workload(learner.LONG_PROMPT)
    made = {
        name: learner.make_learner(prompt_buckets=(256,), reduction=name)
        for name in ("ordered", "exact")
    }
    times = learner.medians(
        {name: functools.partial(_step_s, one, load) for name, one in made.items()}, NUM_PAIRED
    )
    ratios = sorted(e / o for e, o in zip(times["exact"], times["ordered"], strict=True))
    kept = {name: one.memory.resident_bytes for name, one in made.items()}
    return {
        "exact_time_ratio": statistics.median(ratios),
        "exact_time_ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "exact_memory_ratio": kept["exact"] / kept["ordered"],
    }


def _step_s(one: Learner, load: learner.Workload) -> float:
    """Seconds of a step in which every trajectory is folded as it arrives, the update included."""
    began_s = time.perf_counter()
    group = one.open_group("t", load.prompt, len(load.rewards))
    for index, (tokens, reward) in enumerate(zip(load.trajectories, load.rewards, strict=True)):
        one.add_trajectory(group, index, tokens)
        one.set_reward(group, index, reward)
        one.work()
    one.update()
    jax.block_until_ready(one.params)
    return time.perf_counter() - began_s
