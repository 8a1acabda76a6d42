"""Programs for a TPU topology, compiled by tests in a process of their own; prints JSON.

kernel       splash attention's gradient under shard_map: calls of kernels, and the report
numbering    which axes a sum over `data` crosses, in three orders of the devices
unknown      messages about topologies that do not exist
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from thundersync_jax import hlo, sharding, topology
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.splash import splash, visible, wants_splash

NAME = "v5e:2x4"
AXES = ("data", "fsdp", "tensor")
LENGTH, PREFIX, KV_HEADS, GROUP, HEAD_DIM = 1024, 192, 4, 2, 128
CONFIG = TransformerConfig(
    vocab_size=16,
    embed_dim=16,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=HEAD_DIM,
    mlp_dim=16,
    rope_theta=1e4,
    dtype="bfloat16",
)


def kernel() -> dict[str, Any]:
    shape = sharding.MeshShape(data=2, fsdp=2, tensor=2)
    mesh = sharding.make_mesh(shape, topology.topology_devices(NAME))

    def body(query: jax.Array, keys: jax.Array, values: jax.Array, ids: jax.Array) -> Any:
        assert wants_splash(CONFIG, LENGTH)

        def score(*arrays: jax.Array) -> jax.Array:
            seen = visible(ids, jnp.ones((1, PREFIX), bool))
            return jnp.sum(splash(*arrays, seen).astype(jnp.float32) ** 2)

        return jax.grad(score, argnums=(0, 1, 2))(query, keys, values)

    split = PartitionSpec("data")
    program = jax.shard_map(
        body, in_specs=split, out_specs=split, axis_names={"data"}, check_vma=False
    )

    def abstract(dtype: Any, *shape: int, spec: PartitionSpec = split) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    queries = PartitionSpec("data", "fsdp", "tensor")
    keys = PartitionSpec("data", None, "tensor")
    key = abstract(jnp.bfloat16, 2, PREFIX + LENGTH, KV_HEADS, HEAD_DIM, spec=keys)
    query = abstract(jnp.bfloat16, 2, LENGTH, KV_HEADS, GROUP, HEAD_DIM, spec=queries)
    with jax.set_mesh(mesh):
        lowered = jax.jit(program).lower(query, key, key, abstract(jnp.int32, 2, LENGTH))
        compiled = lowered.compile()
    return {
        "kernels": (compiled.as_text() or "").count('custom_call_target="tpu_custom_call"'),
        "report": dataclasses.asdict(topology.describe(compiled, mesh)),
    }


def numbering() -> list[dict[str, int]]:
    devices = np.array(topology.topology_devices(NAME))
    made = jax.make_mesh((2, 2, 2), AXES, devices=list(devices))
    orders = (devices, devices[[3, 1, 4, 0, 5, 7, 2, 6]], made.devices)
    found = []
    for order in orders:
        mesh = Mesh(order.reshape(2, 2, 2), AXES)
        spec = PartitionSpec(AXES)
        program = jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        sharded = NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=sharded)
        joined = hlo.collectives(jax.jit(program).lower(x).compile().as_text() or "")
        found.append({axis: len(hlo.crossing(joined, mesh, axis)) for axis in AXES})
    return found


def unknown() -> list[str]:
    messages = []
    for name in ("v9z:2x4", "v5e:3x5"):
        try:
            topology.topology_devices(name)
        except topology.TopologyError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    chosen = {"kernel": kernel, "numbering": numbering, "unknown": unknown}[sys.argv[1]]
    print(json.dumps(chosen()))
