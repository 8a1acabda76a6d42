"""The serving programs compiled for a TPU topology, run by tests in a process of their own.

    python tests/serving_programs.py PRESET SLOTS ROW_LENGTH EXTEND_ROWS BUCKET TOPOLOGY [NAME ..]

Prints JSON: the bytes of weights and slots on a device, and program -> report, with the bytes of
the rows that it must update in place, what it needs besides its arguments, and what is too large
among its arrays. Without names it compiles all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax

from thundersync_jax import hlo, topology
from thundersync_jax.config_serving import ServingSection
from thundersync_jax.model.kv_cache import init_cache
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.placement import place_cache, serving_mesh
from thundersync_jax.serving.scorer import Scorer


def device_bytes(placed: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(placed)
    )


def lowerings(
    engine: PolicyEngine, bucket: int
) -> dict[str, tuple[Callable[[], jax.stages.Lowered], int]]:
    """Program -> how to trace it, and of how many rows it must update the cache in place."""
    serving, found = engine.serving, engine.lowerings(with_prefill=True)
    scorer = Scorer(engine.config, serving, engine.row_length, mesh=engine.mesh)
    return {
        "prefill": (found["prefill", bucket], 1),
        "insert": (found["insert"], serving.num_slots),
        "extend": (found["extend", bucket], serving.num_slots),
        "generate": (found["generate"], serving.num_slots),
        "take_row": (found["take_row"], 0),
        "put_row": (found["put_row"], serving.num_slots),
        "score": (scorer.lowering(bucket), serving.num_slots),
    }


def report(
    engine: PolicyEngine, bucket: int, lower: Callable[[], jax.stages.Lowered], num_rows: int
) -> dict[str, Any]:
    compiled = lower().compile()
    text = compiled.as_text() or ""
    rows = abstract_rows(engine, num_rows or engine.serving.num_slots)
    share = rows.keys.sharding.shard_shape(rows.keys.shape)
    copies = re.findall(rf" = \w+\[{','.join(map(str, share))}\]\S* copy", text)
    arrays = hlo.array_shapes(text)
    many_tokens = {bucket, engine.row_length, engine.serving.extend_rows * bucket}
    width = engine.config.vocab_size // engine.mesh.size
    described = topology.describe(compiled, engine.mesh)
    return {
        **dataclasses.asdict(described),
        "in_place_bytes": device_bytes(rows) if num_rows else 0,
        "cache_copies": len(copies),
        "extra_bytes": described.peak_bytes - described.argument_bytes,
        "has_logits": any(many_tokens & set(dims) and max(dims) >= width for dims in arrays),
        "has_whole_cache": max(map(math.prod, arrays)) >= math.prod(rows.keys.shape),
    }


def abstract_rows(engine: PolicyEngine, num_rows: int) -> Any:
    make = jax.eval_shape(lambda: init_cache(engine.config, num_rows, engine.row_length))
    return place_cache(engine.mesh, make)


def make_engine(model: TransformerConfig, shapes: list[int], topology_name: str) -> PolicyEngine:
    num_slots, row_length, extend_rows, bucket = shapes
    section = ServingSection(
        num_slots=num_slots, steps_per_sync=8, extend_rows=extend_rows, extend_buckets=(bucket,)
    )
    mesh = serving_mesh(model, topology.topology_devices(topology_name))
    return PolicyEngine(model, section, row_length, mesh)


def main() -> None:
    name, *numbers = sys.argv[1:6]
    topology_name, *names = sys.argv[6:]
    shapes = list(map(int, numbers))
    engine = make_engine(preset(name, dtype="bfloat16"), shapes, topology_name)
    bucket = shapes[-1]
    found = {
        title: report(engine, bucket, *program)
        for title, program in lowerings(engine, bucket).items()
        if not names or title in names
    }
    resident = engine.weights.abstract, abstract_rows(engine, engine.serving.num_slots)
    print(json.dumps({"resident_bytes": device_bytes(resident), "programs": found}))


if __name__ == "__main__":
    main()
