"""The bits of exactly summed weights over arrival orders, path mixes, pools, modes and restarts.

`bits_on` runs one mesh in a process of its own with as many simulated devices. An order is a few
steps from the same weights; each draws when contents and verdicts come and how much work is done
between them. Every tenth order is in barrier mode. Every second one goes through a checkpoint after
its first step and on in another learner, whose pool is another.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import multiprocessing
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from thundersync_jax.benchmarks.arrivals import (
    VOCAB_SIZE,
    Case,
    enqueue,
    random_batch,
    reference,
    rel_l2,
    run_events,
)
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
from thundersync_jax.learner.compilation import temporary_cache
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.sharded import init_on_mesh
from thundersync_jax.sharding import MeshShape, make_mesh

POOL_SIZES = (1, 2, 8)
NUM_ORDERS, NUM_STEPS = 50, 3
BARRIER_EVERY, RESTART_EVERY = 10, 2
PROMPT_TOKENS = (1, 9, 20, 14, 5)  # the first is too short to be shared
CONFIG = LearnerSection(
    reduction="exact",
    buckets=(32, 64),
    tokens_per_step=128,
    held_gradients=1,
    prompt_buckets=(24,),
    prompt_slots=2,
    min_shared_tokens=2,
    max_logprob_gap=1e9,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bits:
    """What the orders of one mesh came to.

    Attributes:
      hashes: of weights and moments after the last step, by mode.
      paths: trajectories by path, of all orders.
      num_promotions: of the first order.
      distances: of every step's gradient from the reference, on one device.
    """

    hashes: dict[str, set[str]]
    paths: dict[str, int]
    num_promotions: int
    distances: list[float]

    @property
    def num_hashes(self) -> int:
        return len(set.union(*self.hashes.values()))

    @property
    def median_distance(self) -> float:
        return statistics.median(self.distances)


def bits_on(
    shape: tuple[int, int, int], config: LearnerSection = CONFIG, num_orders: int = NUM_ORDERS
) -> Bits:
    """All orders on a mesh of simulated devices (data, fsdp, tensor)."""
    num_devices = int(np.prod(shape))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, initializer=_simulate, initargs=(num_devices,)
    ) as executor:
        return executor.submit(_run, shape, config, num_orders).result()


def _simulate(num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def _model() -> TransformerConfig:
    small = preset("tiny", vocab_size=VOCAB_SIZE + 3, remat="block")
    return dataclasses.replace(
        small, num_layers=2, embed_dim=32, mlp_dim=64, head_dim=8, num_heads=4, num_kv_heads=4
    )


def _batch(step: int) -> list[Case]:
    """Groups of every kind, some with a prompt to share; rewards drift from step to step."""
    rng = np.random.default_rng(step)
    return [
        dataclasses.replace(
            case,
            prompt=tuple(rng.integers(0, VOCAB_SIZE, length).tolist()),
            rewards=tuple(None if r is None else r + step for r in case.rewards),
        )
        for case, length in zip(
            random_batch(step, num_groups=len(PROMPT_TOKENS)), PROMPT_TOKENS, strict=True
        )
    ]


def _run(shape: tuple[int, int, int], config: LearnerSection, num_orders: int) -> Bits:
    data, fsdp, tensor = shape
    mesh, model = make_mesh(MeshShape(data=data, fsdp=fsdp, tensor=tensor)), _model()
    with temporary_cache():
        learners = [
            Learner(
                dataclasses.replace(config, pool_size=pool_size),
                OptimizerSection(learning_rate=1e-2),
                model,
                init_on_mesh(model, 0, mesh),
                mesh=mesh,
            )
            for pool_size in POOL_SIZES
        ]
        start = _copy(learners[0].state)
        found = Bits(
            hashes={"stream": set(), "barrier": set()}, paths={}, num_promotions=0, distances=[]
        )
        for order in range(num_orders):
            turns = itertools.cycle(learners[order % len(learners) :] + learners)
            found = _add_order(found, start, config, order, turns)
        return found


def _add_order(
    found: Bits, start: TrainState, config: LearnerSection, order: int, learners: Any
) -> Bits:
    """Runs one order; `learners` gives the next learner to go on in."""
    is_barrier = order % BARRIER_EVERY == 0
    learner: Learner = next(learners)
    learner.load(_copy(start))
    paths, promotions, distances = dict(found.paths), 0, list(found.distances)
    for step in range(NUM_STEPS):
        cases = _batch(step)
        whole = jax.device_get(learner.params)
        if is_barrier:
            enqueue(learner, cases)
        else:
            run_events(learner, cases, np.random.default_rng((order, step)))
        wanted = reference(_model(), whole, cases, config)
        distances.append(rel_l2(learner.gradient(), wanted))
        report = learner.update()
        promotions += report.num_promotions
        for path, count in report.paths.items():
            paths[path] = paths.get(path, 0) + count
        if step == 0 and order % RESTART_EVERY:
            learner = _restarted(learner, next(learners))
    mode = "barrier" if is_barrier else "stream"
    hashes = found.hashes | {mode: found.hashes[mode] | {_hash(learner.state)}}
    num_promotions = found.num_promotions if order else promotions
    return Bits(hashes=hashes, paths=paths, num_promotions=num_promotions, distances=distances)


def _restarted(old: Learner, new: Learner) -> Learner:
    """Another learner that went on from the first one's checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpointer(Path(directory), keep_last=1)
        checkpoints.save(old.state, RunPosition(num_steps=1), reward=0.0)
        state, _ = checkpoints.restore(new.state, 1)
        checkpoints.close()
    new.load(state)
    return new


def _copy(state: TrainState) -> TrainState:
    """A state whose arrays may be donated."""

    def copy(x: jax.Array) -> jax.Array:
        return jax.device_put(np.array(x), x.sharding)

    params, opt_state = jax.tree.map(copy, (state.params, state.opt_state))
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def _hash(state: TrainState) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()
