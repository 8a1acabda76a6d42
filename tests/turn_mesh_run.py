"""Distills random trajectories by turns on a mesh of eight simulated devices; prints JSON.

    python tests/turn_mesh_run.py DATA FSDP TENSOR

JAX_NUM_CPU_DEVICES=8 must be set before jax starts.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np

from thundersync_jax import topology
from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.learner.placement import device_bytes
from thundersync_jax.learner.program_names import Caches, Part, Turn
from thundersync_jax.model.sharded import init_on_mesh
from thundersync_jax.sharding import MeshShape, make_mesh

MODEL = dataclasses.replace(
    lc.tiny(), num_layers=1, num_heads=8, num_kv_heads=8, vocab_size=16, remat="block"
)


def main() -> None:
    data, fsdp, tensor = map(int, sys.argv[1:])
    mesh = make_mesh(MeshShape(data=data, fsdp=fsdp, tensor=tensor))
    distiller = Distiller(
        LearnerSection(buckets=(oc.LENGTH,), tokens_per_step=80, max_logprob_gap=1e9),
        OpdSection(num_caches=3, cache_memory="pinned_host"),
        OptimizerSection(),
        MODEL,
        init_on_mesh(MODEL, 0, mesh),
        mesh=mesh,
    )
    distiller.warm_up()
    whole = jax.tree.map(jnp.asarray, jax.device_get(distiller.state.params))
    cases = [oc.random_case(seed) for seed in range(8)]
    total = oc.plain_gradient(MODEL, whole, cases)
    want = jax.tree.map(lambda g: -g / oc.num_scored(cases), total)
    distances = []
    for order in range(3):
        oc.run_events(distiller, cases, np.random.default_rng(order))
        distances.append(lc.rel_l2(distiller.gradient(), want))
        if order < 2:
            distiller.abandon()
    paths = dict(distiller.update().paths)
    programs = distiller._programs
    batch, caches = map(device_bytes, (programs.placement.accumulator, programs.caches))
    donated = {Part.FORWARD: caches, Part.WHOLE: batch, Caches.READ: 0, Caches.WRITE: caches}
    found = {}
    for name, compiled in programs._compiled.items():
        if isinstance(name, Turn | Caches) and name is not Caches.ZERO:
            part = name.part if isinstance(name, Turn) else name
            report = topology.describe(compiled, mesh)
            found[str(name)] = {
                "crosses_data": report.collectives["data"][0],
                "is_in_place": report.alias_bytes >= donated.get(part, batch + caches),
            }
    pages = distiller._buffers._caches._pages
    assert pages is not None
    print(
        json.dumps(
            {
                "distances": distances,
                "paths": paths,
                "programs": found,
                "num_moved": pages.num_moved,
            }
        )
    )


if __name__ == "__main__":
    main()
