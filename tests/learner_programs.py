"""The learner's programs compiled for eight devices, run by tests in a process of their own.

    python tests/learner_programs.py PRESET BUCKET PREFIX_BUCKET DATA FSDP TENSOR [TOPOLOGY]

Prints JSON: program -> report, with the bytes of the accumulators it is given. Without a topology
the devices are those of the process.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax

from thundersync_jax import topology
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.placement import device_bytes
from thundersync_jax.learner.programs import (
    Bind,
    Fold,
    Programs,
    PromptBackward,
    PromptForward,
    Shapes,
    Whole,
)
from thundersync_jax.learner.streaming import ScoreSettings
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.sharding import MeshShape, make_mesh

NUM_PAIRS, NUM_SLOTS = 2, 2


def model_of(name: str) -> TransformerConfig:
    if name == "tiny":
        small = preset("tiny", vocab_size=16, remat="block")
        return dataclasses.replace(small, num_heads=4, num_kv_heads=4)
    return preset(name, dtype="bfloat16", remat="block")


def main() -> None:
    name, bucket, prefix, data, fsdp, tensor, *where = sys.argv[1:]
    devices = topology.topology_devices(where[0]) if where else jax.devices()
    mesh = make_mesh(MeshShape(data=int(data), fsdp=int(fsdp), tensor=int(tensor)), devices)
    shapes = Shapes(lanes_per_call=lambda bucket: 2, num_slots=NUM_SLOTS, slot_length=int(prefix))
    settings = ScoreSettings(model=model_of(name))
    programs = Programs(settings, make_optimizer(OptimizerSection()), mesh, shapes)
    num_buffers = 1 + 2 * NUM_PAIRS
    accumulator = device_bytes(programs.placement.accumulator)
    slots = device_bytes(programs.placement.slots)
    adjoints = device_bytes((programs.placement.slots.adjoint1, programs.placement.slots.adjoint2))
    donated = {
        Fold(num_buffers, int(prefix), int(bucket)): num_buffers * accumulator + adjoints,
        Bind(num_buffers, True): (num_buffers + 1) * accumulator + adjoints,
        PromptForward(int(prefix)): slots,
        PromptBackward(int(prefix)): accumulator,
        Whole.CLOSE: 3 * accumulator,
        Whole.UPDATE: 0,
    }
    found = {}
    for program, num_bytes in donated.items():
        compiled = programs.lower(program).compile()
        report = dataclasses.asdict(topology.describe(compiled, mesh))
        found[type(program).__name__ + str(getattr(program, "value", ""))] = report | {
            "donated_bytes": num_bytes
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
