"""Programs on 8 simulated devices, run by tests in a process of their own; prints JSON.

collectives    which axes the exchanges of small programs cross, in two orders of the devices
look_up        how far a split table's rows and gradient are from a whole one's
attention      how far a mesh's gradients through the kernel are from one device's without it
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from thundersync_jax import hlo, sharding
from thundersync_jax.model import transformer
from thundersync_jax.model.embedding import look_up
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig


def on_eight_devices(name: str) -> Any:
    """What one of the above prints, from a process with 8 devices."""
    done = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


AXES = ("data", "fsdp", "tensor")
PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "within": lambda x: jax.lax.psum(x, "fsdp"),
    "psum": lambda x: jax.lax.psum(x, ("data", "fsdp")),
    "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    "identity": lambda x: jax.lax.ppermute(x, "data", [(0, 0), (1, 1)]),
    "gather": lambda x: jax.lax.all_gather(x, "tensor").sum(0),
}


def collectives() -> list[dict[str, dict[str, int]]]:
    found = []
    for order in ((0, 1, 2, 3, 4, 5, 6, 7), (3, 1, 4, 0, 5, 7, 2, 6)):
        devices = np.array(jax.devices())[list(order)].reshape(2, 2, 2)
        mesh = Mesh(devices, AXES)

        def crossed(body: Callable[[jax.Array], jax.Array], mesh: Mesh = mesh) -> dict[str, int]:
            spec = PartitionSpec(AXES)
            program = jax.jit(
                jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            )
            text = program.lower(jnp.zeros((16, 4))).compile().as_text()
            joined = hlo.collectives(text or "")
            return {axis: len(hlo.crossing(joined, mesh, axis)) for axis in AXES}

        found.append({name: crossed(body) for name, body in PROGRAMS.items()})
    return found


def rows_of_a_table() -> list[float]:
    """For a length that `fsdp` divides and one that it does not; ids outside are clipped."""
    random = np.random.default_rng(0)
    table = random.standard_normal((16, 8)).astype(np.float32)
    tokens = random.integers(-1, 18, (2, 1, 6)).astype(np.int32)
    weights = random.standard_normal((2, 1, 6, 8)).astype(np.float32)
    mesh = sharding.make_mesh(sharding.MeshShape(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(table, NamedSharding(mesh, PartitionSpec("tensor", "fsdp")))

    def body(table: jax.Array, tokens: jax.Array, weights: jax.Array) -> Any:
        def score(table: jax.Array) -> jax.Array:
            return jnp.sum(look_up(table, tokens[0]) ** 2 * weights[0])

        return jax.tree.map(lambda x: x[None], jax.value_and_grad(score)(table))

    split = PartitionSpec("data")
    program = jax.shard_map(
        body,
        in_specs=(PartitionSpec(), split, split),
        out_specs=split,
        axis_names={"data"},
        check_vma=False,
    )
    gaps = []
    for length in (6, 5):
        local = tokens[:, :, :length], weights[:, :, :length]
        with jax.set_mesh(mesh):
            got = jax.jit(program)(placed, *local)
        want = [body(table, *jax.tree.map(lambda x, i=i: x[i : i + 1], local)) for i in range(2)]
        want = jax.tree.map(lambda *x: np.concatenate(x), *want)
        differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, want)
        gaps.append(float(np.max(jax.tree.leaves(differences))))
    return gaps


CONFIG = TransformerConfig(
    vocab_size=32,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e4,
    tie_embeddings=True,
    attention="splash",
)
LENGTH, PREFIX = 256, 40


def gradients(config: TransformerConfig, params: Any, tokens: jax.Array, prefix: Any) -> Any:
    """Of one replica's packed row: a score, and its gradient by parameters and prefix."""
    ids = np.repeat([1, 2, 0], [100, 120, 36]).astype(np.int32)[None]
    offsets = np.concatenate([np.arange(n) for n in (100, 120, 36)])[None]
    valid = (np.arange(PREFIX) < 30)[None]

    def score(params: Any, prefix: Any) -> jax.Array:
        positions = (30 + offsets).astype(np.int32)
        hidden = transformer.forward(config, params, tokens, positions, ids, prefix, valid)
        return jnp.sum(jnp.where(ids[..., None] != 0, hidden, 0) ** 2 * jnp.arange(16))

    return jax.value_and_grad(score, argnums=(0, 1))(params, prefix)


def attention() -> float:
    """Largest difference of any leaf, relative to the leaf's largest entry."""
    random = np.random.default_rng(0)
    params = transformer.init_params(CONFIG, 0)
    tokens = random.integers(0, 32, (2, 1, LENGTH)).astype(np.int32)
    shape = (2, 2, 1, PREFIX, 2, 8)
    keys, values = random.standard_normal((2, *shape)).astype(np.float32)
    prefix = KeysValues(keys=keys, values=values)
    plain = jax.jit(functools.partial(gradients, dataclasses.replace(CONFIG, attention="xla")))
    want = [plain(params, tokens[i], jax.tree.map(lambda x, i=i: x[i], prefix)) for i in range(2)]
    want = jax.tree.map(lambda *x: np.stack(x), *want)

    mesh = sharding.make_mesh(sharding.MeshShape(data=2, fsdp=2, tensor=2))
    specs = jax.tree.map(
        sharding.partition_spec,
        transformer.logical_axes(CONFIG),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    placed = jax.device_put(params, sharding.named(mesh, specs))
    split = NamedSharding(mesh, PartitionSpec("data"))

    def body(params: Any, *local: Any) -> Any:
        local = jax.tree.map(lambda x: x[0], local)
        return jax.tree.map(lambda x: x[None], gradients(CONFIG, params, *local))

    program = jax.shard_map(
        body,
        in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
        check_vma=False,
    )
    arguments = placed, *jax.device_put((tokens, prefix), split)
    with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(*arguments).compile()
        got = compiled(*arguments)
    assert not hlo.crossing(hlo.collectives(compiled.as_text() or ""), mesh, "data")
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), got, want)
    return float(np.max(jax.tree.leaves(gaps)))


if __name__ == "__main__":
    programs = {"collectives": collectives, "look_up": rows_of_a_table, "attention": attention}
    print(json.dumps(programs[sys.argv[1]]()))
