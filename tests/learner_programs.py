r"""The learner's programs compiled for a mesh, run by tests in a process of their own.

    python tests/learner_programs.py PRESET REDUCTION BUCKET PREFIX DATA FSDP TENSOR \
        [TOPOLOGY [NAME ..]]

Prints JSON: program -> report, with the bytes that must be updated in place and those that lie on
the device while it runs, its temporaries included. Without a topology the devices are those of the
process; without names it compiles all programs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax

from thundersync_jax import hlo, topology
from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.placement import Placement, device_bytes
from thundersync_jax.learner.programs import (
    Fold,
    Name,
    Programs,
    PromptBackward,
    PromptForward,
    Shapes,
    Whole,
)
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.sharding import MeshShape, make_mesh

NUM_HELD, NUM_GROUPS, NUM_ADAPTED_GROUPS = 1, 32, 512
TOKENS_PER_STEP = 16384


def model_of(name: str) -> TransformerConfig:
    """A preset; after "+" with adapters of that rank beside every projection."""
    name, _, rank = name.partition("+")
    if name == "tiny":
        small = preset("tiny", vocab_size=16, remat="block")
        model = dataclasses.replace(small, num_heads=4, num_kv_heads=4)
    else:
        model = preset(name, dtype="bfloat16", remat="block")
    return with_adapters(model, LoraSection(rank=int(rank or 0)))


def num_pairs(num_replicas: int, num_groups: int = NUM_GROUPS) -> int:
    """Of a replica, for so many groups on all of them; two where there are few. A call reaches
    those of NUM_GROUPS.
    """
    return num_groups // num_replicas if num_replicas > 2 else 2


def donated_bytes(place: Placement, bucket: int, prefix: int) -> dict[Name, int]:
    """Of every program, the bytes on a device that it must not need twice."""
    accumulator, slots = device_bytes(place.accumulator), place.slots
    summed = (1 + 2 * num_pairs(place.num_replicas)) * accumulator + device_bytes(
        (slots.adjoint1, slots.adjoint2)
    )
    return {
        Fold(prefix, bucket): summed + NUM_HELD * device_bytes(place.held),
        PromptForward(prefix): device_bytes(slots),
        PromptBackward(prefix): accumulator,
        Whole.BIND: summed + device_bytes(place.held),
        Whole.CLOSE: 3 * accumulator,
        Whole.UPDATE: device_bytes((place.master, place.opt_state)) + accumulator,
        Whole.GATHER: 0,
    }


def resident_bytes(place: Placement, num_groups: int) -> int:
    """What the learner keeps on a device all the time."""
    master = () if place.is_master_shared else place.master
    sums = (1 + 2 * num_pairs(place.num_replicas, num_groups)) * device_bytes(place.accumulator)
    sums += NUM_HELD * device_bytes(place.held)
    return sums + device_bytes((place.params, master, place.opt_state, place.slots))


def has_logits(text: str, bucket: int, shape: MeshShape, vocab_size: int) -> bool:
    """Whether some array has a device's tokens, or all, and a device's share of the vocabulary."""
    tokens = {bucket, bucket // shape.fsdp}
    return any(
        tokens & set(dims) and max(dims) >= vocab_size // shape.tensor
        for dims in hlo.array_shapes(text)
    )


def title(program: Name) -> str:
    return program.value if isinstance(program, Whole) else type(program).__name__


def reports(
    name: str,
    reduction: str,
    bucket: int,
    prefix: int,
    shape: MeshShape,
    devices: list[jax.Device],
    titles: list[str],
) -> dict[str, Any]:
    mesh, model = make_mesh(shape, devices), model_of(name)
    num_groups = NUM_ADAPTED_GROUPS if model.lora else NUM_GROUPS
    shapes = Shapes(
        lanes_per_call=lambda bucket: max(1, TOKENS_PER_STEP // bucket),
        num_pairs=num_pairs(shape.data),
        num_held=NUM_HELD,
        num_slots=num_pairs(shape.data, num_groups) + NUM_HELD,
        slot_length=prefix,
        reduction=reduction,
    )
    programs = Programs(
        ScoreSettings(model=model), make_optimizer(OptimizerSection()), mesh, shapes
    )
    resident = resident_bytes(programs.placement, num_groups)
    found = {}
    for program, num_bytes in donated_bytes(programs.placement, bucket, prefix).items():
        if titles and title(program) not in titles:
            continue
        compiled = programs.lower(program).compile()
        report = topology.describe(compiled, mesh)
        # With fragments, temp_bytes counts more than the compiler refuses by: its peak.
        extra = report.peak_bytes - report.argument_bytes
        found[title(program)] = {
            **dataclasses.asdict(report),
            "donated_bytes": num_bytes,
            "total_bytes": resident + extra,
            "has_logits": has_logits(compiled.as_text() or "", bucket, shape, model.vocab_size),
        }
    return found


def main() -> None:
    name, reduction, bucket, prefix, data, fsdp, tensor, *rest = sys.argv[1:]
    shape = MeshShape(data=int(data), fsdp=int(fsdp), tensor=int(tensor))
    devices = topology.topology_devices(rest[0]) if rest else jax.devices()
    found = reports(name, reduction, int(bucket), int(prefix), shape, devices, rest[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
