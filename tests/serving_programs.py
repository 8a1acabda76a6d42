"""The serving programs compiled for a TPU topology, run by tests in a process of their own.

    python tests/serving_programs.py PRESET SLOTS ROW_LENGTH EXTEND_ROWS BUCKET TOPOLOGY [NAME ..]

Prints JSON: the bytes of weights and slots on a device, and program -> report, with the bytes of
the rows that it must update in place, what it needs besides its arguments, and what is too large
among its arrays. Without names it compiles all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from thundersync_jax import hlo, topology
from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.serving import decode_state as programs
from thundersync_jax.serving import placement
from thundersync_jax.serving.scorer import ScoreBatch, score_pieces

STEPS = 8
LOGPROB_CHUNK = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    num_slots: int
    row_length: int
    extend_rows: int
    bucket: int


class Program(NamedTuple):
    function: Callable[..., Any]
    donated: int
    arguments: tuple[Any, ...]
    results: Any
    cache: KVCache


def extend_batch(num_rows: int, bucket: int) -> programs.ExtendBatch:
    count = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return programs.ExtendBatch(
        tokens=jax.ShapeDtypeStruct((num_rows, bucket), jnp.int32),
        slots=count,
        starts=count,
        counts=count,
        is_last=jax.ShapeDtypeStruct((num_rows,), jnp.bool_),
        turn=jax.eval_shape(lambda: programs.empty_turn_rows(num_rows)),
    )


def score_batch(num_rows: int, bucket: int) -> ScoreBatch:
    count = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((num_rows, bucket), jnp.int32)
    return ScoreBatch(tokens=tokens, targets=tokens, rows=count, starts=count, counts=count)


def declare(model: TransformerConfig, mesh: Mesh, shapes: Shapes) -> dict[str, Program]:
    num_slots, length = shapes.num_slots, shapes.row_length
    weights = placement.place_weights(mesh, model)
    state = placement.place_state(
        mesh, jax.eval_shape(lambda: programs.empty_state(model, num_slots, length))
    )
    prefix = placement.place_state(
        mesh, jax.eval_shape(lambda: programs.empty_prefix(model, length))
    )
    small = functools.partial(placement.replicate, mesh)
    slot = small(jax.ShapeDtypeStruct((), jnp.int32))
    one = small(extend_batch(1, shapes.bucket))
    many = small(extend_batch(shapes.extend_rows, shapes.bucket))
    scored = small(score_batch(shapes.extend_rows, shapes.bucket))
    prefill = functools.partial(programs.extend_prefix, model)
    extend = functools.partial(programs.extend, model)
    generate = functools.partial(programs.generate, model, STEPS)
    score = functools.partial(score_pieces, model, 1.0, LOGPROB_CHUNK)
    records = small(jax.eval_shape(generate, weights, state)[1])
    logprobs = small(jax.eval_shape(score, weights, state.cache, scored)[1])
    rows = state.cache
    return {
        "prefill": Program(prefill, 1, (weights, prefix, one), prefix, prefix.cache),
        "insert": Program(programs.insert, 0, (state, prefix, slot), state, rows),
        "extend": Program(extend, 1, (weights, state, many), state, rows),
        "generate": Program(generate, 1, (weights, state), (state, records), rows),
        "score": Program(score, 1, (weights, rows, scored), (rows, logprobs), rows),
    }


def device_bytes(placed: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(placed)
    )


def report(program: Program, mesh: Mesh, model: TransformerConfig, shapes: Shapes) -> dict:
    with jax.set_mesh(mesh):
        lowered = jax.jit(
            program.function,
            donate_argnums=program.donated,
            out_shardings=placement.shardings(program.results),
        ).lower(*program.arguments)
        compiled = lowered.compile()
    text = compiled.as_text() or ""
    keys = program.cache.keys
    share = keys.sharding.shard_shape(keys.shape)
    arrays = hlo.array_shapes(text)
    many_tokens = {shapes.bucket, shapes.row_length, shapes.extend_rows * shapes.bucket}
    width = model.vocab_size // mesh.size
    copies = re.findall(rf" = \w+\[{','.join(map(str, share))}\]\S* copy", text)
    described = topology.describe(compiled, mesh)
    return {
        **dataclasses.asdict(described),
        "cache_bytes": device_bytes(program.cache),
        "cache_copies": len(copies),
        "extra_bytes": described.peak_bytes - described.argument_bytes,
        "has_logits": any(many_tokens & set(dims) and max(dims) >= width for dims in arrays),
        "has_whole_cache": max(map(math.prod, arrays)) >= math.prod(keys.shape),
    }


def main() -> None:
    name, num_slots, row_length, extend_rows, bucket, topology_name, *names = sys.argv[1:]
    model = preset(name, dtype="bfloat16")
    shapes = Shapes(
        num_slots=int(num_slots),
        row_length=int(row_length),
        extend_rows=int(extend_rows),
        bucket=int(bucket),
    )
    mesh = placement.serving_mesh(model, topology.topology_devices(topology_name))
    declared = declare(model, mesh, shapes)
    found = {
        title: report(program, mesh, model, shapes)
        for title, program in declared.items()
        if not names or title in names
    }
    weights, state, _ = declared["extend"].arguments
    resident = device_bytes((weights, state))
    print(json.dumps({"resident_bytes": resident, "programs": found}))


if __name__ == "__main__":
    main()
