"""Programs for a TPU topology, compiled by tests in a process of their own; prints JSON.

kernel       splash attention's gradient under shard_map: calls of kernels, and the report
gradients    the largest all-reduce where gradients are scattered, and where they are not
logits       whether [T, vocab] is there, with log-probabilities in pieces and in one
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
from thundersync_jax.losses.logprobs import token_logprobs
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.splash import splash
from thundersync_jax.model.visible import visible, wants_splash

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

    def body(query: jax.Array, own: KeysValues, before: KeysValues, ids: jax.Array) -> Any:
        assert wants_splash(CONFIG, LENGTH)

        def score(query: jax.Array, own: KeysValues, before: KeysValues) -> jax.Array:
            seen = visible(ids, jnp.ones((1, PREFIX), bool))
            attended = splash(query, own.keys, own.values, seen, before)
            return jnp.sum(attended.astype(jnp.float32) ** 2)

        return jax.grad(score, argnums=(0, 1, 2))(query, own, before)

    split = PartitionSpec("data")
    program = jax.shard_map(
        body, in_specs=split, out_specs=split, axis_names={"data"}, check_vma=False
    )

    def abstract(dtype: Any, *shape: int, spec: PartitionSpec = split) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def keys_values(length: int) -> KeysValues:
        key = abstract(jnp.bfloat16, 2, length, KV_HEADS, HEAD_DIM, spec=positions)
        return KeysValues(keys=key, values=key)

    positions = PartitionSpec("data", "fsdp", "tensor")
    query = abstract(jnp.bfloat16, 2, LENGTH, KV_HEADS, GROUP, HEAD_DIM, spec=positions)
    ids = abstract(jnp.int32, 2, LENGTH)
    with jax.set_mesh(mesh):
        lowered = jax.jit(program).lower(query, keys_values(LENGTH), keys_values(PREFIX), ids)
        compiled = lowered.compile()
    text = compiled.as_text() or ""
    scattered = sum(c.kind == hlo.Kind.REDUCE_SCATTER for c in hlo.collectives(text))
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "scattered": scattered,
        "report": dataclasses.asdict(topology.describe(compiled, mesh)),
    }


def gradients() -> dict[str, list[int]]:
    """Of x @ w by w, tokens and w split over `fsdp`: left so, and made whole on every device.

    Returns largest all-reduce over `fsdp`, and the bytes of the whole w.
    """
    mesh = sharding.make_mesh(sharding.MeshShape(data=2, fsdp=4), topology.topology_devices(NAME))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None))
    x = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16, sharding=split)
    w = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=split)

    def largest(placed: NamedSharding) -> list[int]:
        def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
            return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w).astype(jnp.float32)))(w)

        compiled = jax.jit(gradient, out_shardings=placed).lower(w, x).compile()
        report = topology.describe(compiled, mesh)
        return [report.largest_all_reduce["fsdp"], w.size * w.dtype.itemsize]

    return {"scattered": largest(split), "whole": largest(whole)}


def logits() -> dict[str, bool]:
    """Whether the gradient of log-probabilities holds [T, vocab], in pieces and in one piece."""
    mesh = sharding.make_mesh(
        sharding.MeshShape(data=2, fsdp=2, tensor=2), topology.topology_devices(NAME)
    )
    tokens, vocab = 512, 8192
    hidden = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16)
    placed = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    kernel = jax.ShapeDtypeStruct((256, vocab), jnp.bfloat16, sharding=placed)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def holds(chunk: int) -> bool:
        def gradient(kernel: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
            return jax.grad(lambda k: jnp.sum(token_logprobs(hidden, k, targets, chunk=chunk)))(
                kernel
            )

        with jax.set_mesh(mesh):
            compiled = jax.jit(gradient).lower(kernel, hidden, targets).compile()
        shapes = hlo.array_shapes(compiled.as_text() or "")
        return any({tokens, tokens // 2} & set(dims) and max(dims) >= vocab // 2 for dims in shapes)

    return {"pieces": holds(1024), "one piece": holds(vocab)}


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


def divided() -> list[list[int]]:
    """Sizes of meshes of slices whose own axes they divide, and how many devices are in them."""
    found = []
    for name, shape in (("v6e:8x8", (4, 8, 2)), ("v5p:4x4x4", (2, 16, 2))):
        data, fsdp, tensor = shape
        devices = topology.topology_devices(name)
        mesh = sharding.make_mesh(sharding.MeshShape(data=data, fsdp=fsdp, tensor=tensor), devices)
        found.append([*mesh.devices.shape, len(set(mesh.devices.flat))])
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
    made = (kernel, gradients, logits, numbering, divided, unknown)
    print(json.dumps({f.__name__: f for f in made}[sys.argv[1]]()))
