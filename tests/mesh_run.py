"""Streams random batches on a mesh of eight simulated devices; prints JSON for test_mesh.py.

    python tests/mesh_run.py DATA FSDP TENSOR NUM_ORDERS [RANK]

With a rank adapters train beside every projection.

JAX_NUM_CPU_DEVICES=8 must be set before jax starts.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import learner_cases as lc
import numpy as np

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.learner import Learner
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.sharded import init_on_mesh
from thundersync_jax.model.trainable import join, partition
from thundersync_jax.model.transformer import init_params
from thundersync_jax.sharding import MeshShape, make_mesh

CONFIG = LearnerSection(
    buckets=(32,),
    tokens_per_step=64,
    pool_size=2,
    pool_memory="pinned_host",
    pack_tokens=32,
    pairs_per_call=1,
    held_gradients=1,
    prompt_buckets=(24,),
    prompt_slots=2,
    min_shared_tokens=2,
    max_logprob_gap=1e9,
)
OPTIMIZER = OptimizerSection(learning_rate=1e-2)
MODEL = dataclasses.replace(
    lc.tiny(), num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=16, remat="block"
)


def batch(seed: int) -> list[lc.Case]:
    """Prompts long enough to be shared by some groups and not by others."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, 13, n).tolist()) for n in rng.integers(1, 12, 4)]
    cases = lc.random_batch(seed)
    return [dataclasses.replace(c, prompt=p) for c, p in zip(cases, prompts, strict=True)]


def with_slopes(model: TransformerConfig, params: Any) -> Any:
    """Adapters that are not zero, so that both factors have a gradient."""
    trainable, frozen = partition(model, params)
    if not frozen:
        return params
    moved = jax.tree.map(lambda x: x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape), trainable)
    return join(jax.tree.map(lambda x, like: x.astype(like.dtype), moved, trainable), frozen)


def main() -> None:
    data, fsdp, tensor, num_orders, *rank = map(int, sys.argv[1:])
    mesh = make_mesh(MeshShape(data=data, fsdp=fsdp, tensor=tensor))
    model = with_adapters(MODEL, LoraSection(rank=sum(rank)))
    params = with_slopes(model, init_on_mesh(model, 0, mesh))
    made = jax.tree.map(lambda x: x.sharding, partition(model, params)[0])
    learner = Learner(CONFIG, OPTIMIZER, model, params, mesh=mesh)
    is_kept_there = made == jax.tree.map(lambda x: x.sharding, learner.state.params)
    whole, start = jax.device_get((learner.params, with_slopes(model, init_params(model, 0))))
    same = jax.tree.map(np.array_equal, whole, start)
    distances = []
    for order in range(num_orders):
        cases = batch(order % 2)
        want = partition(model, lc.reference(model, whole, cases, CONFIG))[0]
        lc.run_events(learner, cases, np.random.default_rng(order))
        distances.append(lc.rel_l2(learner.gradient(), want))
        if order < num_orders - 1:
            learner.abandon()
    paths = dict(learner.update().paths)
    alone = Learner(CONFIG, OPTIMIZER, model, jax.tree.map(jax.numpy.asarray, whole))
    lc.enqueue(alone, cases)
    alone.update()
    moved = jax.tree.map(np.subtract, jax.device_get(learner.params), whole)
    wanted = jax.tree.map(np.subtract, jax.device_get(alone.params), whole)
    result = {
        "is_kept_there": is_kept_there,
        "is_same_start": all(jax.tree.leaves(same)),
        "distances": distances,
        "update": lc.rel_l2(moved, wanted),
        "paths": paths,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
