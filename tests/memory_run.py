"""What a learner really keeps on its first device; prints JSON for test_memory.py.

    python tests/memory_run.py DATA FSDP TENSOR

JAX_NUM_CPU_DEVICES=N must be set before jax starts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable

import jax
import learner_cases as lc

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.learner import Learner
from thundersync_jax.model.transformer import init_params
from thundersync_jax.sharding import MeshShape, make_mesh

MODEL = dataclasses.replace(lc.tiny(), num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=16)
CONFIG = LearnerSection(
    pool_size=3,
    pairs_per_call=1,
    held_gradients=1,
    prompt_buckets=(8,),
    prompt_slots=4,
    min_shared_tokens=2,
    max_logprob_gap=1e9,
)


def on_device(arrays: Iterable[jax.Array], memory_kind: str) -> int:
    """Bytes of the first device, or of its part of the host's memory."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for array in arrays
        if (array.sharding.memory_kind == "pinned_host") == (memory_kind == "pinned_host")
        for shard in array.addressable_shards
        if shard.device == first
    )


def main() -> None:
    data, fsdp, tensor = map(int, sys.argv[1:])
    mesh = make_mesh(MeshShape(data=data, fsdp=fsdp, tensor=tensor))
    found = {}
    for pool_memory in ("device", "pinned_host"):
        config = dataclasses.replace(CONFIG, pool_memory=pool_memory)
        learner = Learner(config, OptimizerSection(), MODEL, init_params(MODEL, 0), mesh=mesh)
        found[pool_memory] = {
            "planned": [learner.memory.resident_bytes, learner.memory.host_bytes],
            "live": [on_device(jax.live_arrays(), kind) for kind in ("device", "pinned_host")],
        }
        del learner
    print(json.dumps(found))


if __name__ == "__main__":
    main()
