"""What a configuration needs of a TPU slice, read from its programs compiled for that slice.

`plan` compiles the learner's programs for the whole topology, and the engine's for a slice of one
engine of the same chips, which serves beside it: an independent program of a part of a slice does
not compile on every generation. Nothing runs, and no weight is made. Times are those of published
peaks: what a program cannot undercut, not what it takes.

Called by the main `plan`, in a process with the variables of `topology.environment`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from thundersync_jax import topology
from thundersync_jax.config import RunConfig
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.errors import check
from thundersync_jax.hlo_cost import Assumed
from thundersync_jax.initial_policy import make_model
from thundersync_jax.learner.memory import MAX_GROUPS, MemoryPlan, Room, Sizes, check_fits, sizes_of
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.program_names import (
    Fold,
    Name,
    PromptBackward,
    PromptForward,
    Whole,
    program_names,
    shapes_of,
)
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.turn_programs import TurnPrograms, held_caches
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.mesh_search import StepShape, fastest_meshes, groups_that_fit
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.sharded import check_mesh
from thundersync_jax.model.transformer import num_parameters
from thundersync_jax.model.visible import MAX_BLOCK
from thundersync_jax.program_plan import ProgramPlan, compile_program, step_time
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.placement import serving_mesh
from thundersync_jax.sharding import MeshError, MeshShape, make_mesh
from thundersync_jax.topology import Chip, TopologyError

_ENGINE_GRIDS = ("2x4", "2x2x2", "2x2", "2x2x1", "1x1", "1x1x1")  # of at most 8 chips


def plan(
    config: RunConfig, name: str, announce: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The report of one configuration on one topology, as plain values.

    Bytes, FLOPs and seconds are of one chip. `resident_bytes` is what stays on it with as many
    buffers as are configured; with `open_groups`, as many groups as can stream at a time, where
    the configuration says -1. `fits` is of all that and the largest program, and of the engine.
    `step` takes every trajectory as long as it may be; on chips of its own, as many as the learner
    has, the engine samples all that follows the prompts. `flops_over_model` is what the streaming
    step computes over a forward and a backward pass, attention included.

    Raises:
      TopologyError, MeshError, ConfigError, MemoryPlanError: before anything compiles.
      PlanError: see `compile_program`.
    """
    check(not config.opd.teacher, "opd.teacher", config.opd.teacher, "'': a plan is of a Learner")
    chip, devices = topology.chip_of(name), topology.topology_devices(name)
    model = make_model(config.model, None)
    mesh = _learner_mesh(config, model, name, devices)
    learner = LearnerPlan(config, model, mesh, chip)
    learner.compile(announce)
    engine = EnginePlan(config, model, name.partition(":")[0], chip)
    engine.compile(announce)
    shape = _step_shape(config, model)
    num_engines = max(1, len(devices) // engine.mesh.size)
    memory = learner.memory
    lengths = _lengths(config.learner)
    meshes = fastest_meshes(shape, memory, dict(mesh.shape), chip, lengths, learner.sizes)
    programs = learner.programs | engine.programs
    tokens = learner.tokens_per_call
    flops = len(devices) * learner.programs["streaming_step"].flops
    return {
        "topology": name,
        "chip": name.partition(":")[0],
        "peaks": dataclasses.asdict(chip),
        "num_chips": len(devices),
        "mesh": dict(mesh.shape),
        "model": config.model.checkpoint or config.model.preset,
        "lora_rank": config.model.lora.rank,
        "num_parameters": num_parameters(model),
        "programs": {key: dataclasses.asdict(value) for key, value in programs.items()},
        "flops_over_6nt": flops / (6 * shape.num_product_parameters * tokens),
        "flops_over_model": flops / (shape.model_flops * tokens / shape.tokens),
        "resident_bytes": memory.resident_bytes,
        "resident": memory.parts,
        "fits": memory.fits and engine.fits,
        "prompt_tokens": max(config.learner.prompt_buckets, default=0),
        "trajectory_tokens": config.model.max_context,
        "open_groups": learner.open_groups,
        "num_programs": learner.num_programs + engine.num_programs,
        "serving": {"num_slots": config.serving.num_slots, **engine.report()},
        "step": {
            "learner": dataclasses.asdict(step_time(learner.calls(), programs)),
            "rollout": dataclasses.asdict(step_time(engine.calls(num_engines), programs))
            | {"num_engines": num_engines},
        },
        "recommended_mesh": dataclasses.asdict(meshes[0]),
        "meshes": [dataclasses.asdict(found) for found in meshes[:5]],
    }


class LearnerPlan:
    """The learner's programs on the whole topology."""

    def __init__(self, config: RunConfig, model: TransformerConfig, mesh: Mesh, chip: Chip) -> None:
        self._config, self._mesh, self._chip = config, mesh, chip
        settings = ScoreSettings(
            model=model,
            objective=make_objective(config.learner.objective, config.learner.objective_options),
            temperature=config.sampling.temperature,
            logprob_chunk=config.model.logprob_chunk,
        )
        self._parts = (settings, make_optimizer(config.optimizer))
        room = Room(device_bytes=chip.hbm_bytes, host_bytes=2**62)
        first = with_groups(config.learner, 1)
        self.memory = MemoryPlan(config=first, sizes=self._sizes(mesh), room=room)
        check_fits(self.memory)
        self.programs: dict[str, ProgramPlan] = {}

    def sizes(self, shape: MeshShape) -> Sizes:
        """What stays on a device of another mesh of the same devices."""
        return self._sizes(make_mesh(shape, list(self._mesh.devices.flat)))

    def _sizes(self, mesh: Mesh) -> Sizes:
        made = self._make(mesh, with_groups(self._config.learner, 1))
        return sizes_of(made.placement, made.caches, made.host_caches)

    def _make(self, mesh: Mesh, section: LearnerSection) -> Programs:
        shapes = shapes_of(section)
        if section.has_turns:
            return TurnPrograms(*self._parts, mesh, held_caches(section), shapes)
        return Programs(*self._parts, mesh, shapes)

    def compile(self, announce: Callable[[str], None]) -> None:
        """Compiles what a step needs; sizes the buffers by the largest program."""
        # Prompt slots are arguments: half of the chip is left for the program itself.
        half = dataclasses.replace(self.memory.room, device_bytes=self._chip.hbm_bytes // 2)
        tight = dataclasses.replace(self.memory, room=half)
        section = with_groups(self._config.learner, min(MAX_GROUPS, max(1, groups_that_fit(tight))))
        made = self._make(self._mesh, section)
        bucket, prompt = section.buckets[-1], max(section.prompt_buckets, default=0)
        names = self._names(made)
        trips = made.lanes_per_call(bucket)
        assumed = dict.fromkeys(names, Assumed(trips=1, attended=_attended(prompt, 0)))
        assumed["streaming_step"] = Assumed(trips=trips, attended=_attended(bucket, prompt))
        compiled = {
            title: compile_program(
                title,
                functools.partial(made.lower, name),
                self._mesh,
                self._chip,
                assumed[title],
                announce,
            )
            for title, name in names.items()
        }
        largest = max(compiled, key=lambda title: compiled[title].extra_bytes)
        self.memory = dataclasses.replace(
            self.memory, program=largest, program_bytes=compiled[largest].extra_bytes
        )
        self.open_groups = groups_that_fit(self.memory) * made.num_replicas
        self.memory = dataclasses.replace(
            self.memory,
            config=with_groups(self._config.learner, max(1, groups_that_fit(self.memory))),
        )
        self.num_programs = len(program_names(self.memory.config))
        self.tokens_per_call = bucket * trips * made.num_replicas
        free = self._chip.hbm_bytes - self.memory.resident_bytes
        self.programs = {
            title: dataclasses.replace(program, fits=program.extra_bytes <= free)
            for title, program in compiled.items()
        }

    def calls(self) -> dict[str, int]:
        """Of a step whose trajectories are all of the longest bucket."""
        run, learner, replicas = self._config.run, self._config.learner, self._mesh.shape["data"]
        lanes = max(1, learner.tokens_per_step // learner.buckets[-1])
        num_trajectories = run.groups_per_step * run.group_size
        groups = _ceil(run.groups_per_step, replicas)
        each = {
            "streaming_step": _ceil(num_trajectories, lanes * replicas),
            "prompt_forward": groups,
            "prompt_backward": groups,
            "group_close": groups,
            "update": 1,
            "gather": 1,
        }
        return {title: count for title, count in each.items() if title in self.programs}

    def _names(self, made: Programs) -> dict[str, Name]:
        section = self._config.learner
        prompt = max(section.prompt_buckets, default=0)
        names: dict[str, Name] = {"streaming_step": Fold(prompt, section.buckets[-1])}
        if prompt:
            names["prompt_forward"] = PromptForward(prompt)
            names["prompt_backward"] = PromptBackward(prompt)
        if section.pool_size:
            names["group_close"] = Whole.CLOSE
        names["update"] = Whole.UPDATE
        if not made.placement.is_master_shared:
            names["gather"] = Whole.GATHER
        return names


class EnginePlan:
    """The engine's programs on the largest slice of the chip that divides the model."""

    def __init__(
        self, config: RunConfig, model: TransformerConfig, generation: str, chip: Chip
    ) -> None:
        self._config, self._chip = config, chip
        self.topology, self.mesh = _engine_mesh(model, generation)
        self._engine = PolicyEngine(model, config.serving, config.model.max_context, self.mesh)
        self.programs: dict[str, ProgramPlan] = {}

    def report(self) -> dict[str, Any]:
        """Once it is compiled."""
        return {
            "topology": self.topology,
            "num_chips": self.mesh.size,
            "resident_bytes": self.resident_bytes,
            "fits": self.fits,
        }

    def compile(self, announce: Callable[[str], None]) -> None:
        engine, serving = self._engine, self._config.serving
        found = engine.lowerings(with_prefill=False)
        self.num_programs = len(found)
        lowerings = {
            "prefill": (found["extend", engine.extend_buckets[-1]], 1),
            "decode": (found["generate"], serving.steps_per_sync),
        }
        compiled = {
            title: compile_program(
                title, lower, self.mesh, self._chip, Assumed(trips=trips), announce
            )
            for title, (lower, trips) in lowerings.items()
        }
        parked = serving.parked_bytes // self.mesh.size
        arguments = compiled["decode"].argument_bytes
        self.resident_bytes = arguments + parked
        free = self._chip.hbm_bytes - self.resident_bytes
        self.programs = {
            title: dataclasses.replace(program, fits=program.extra_bytes <= free)
            for title, program in compiled.items()
        }
        self.fits = all(program.fits for program in self.programs.values())

    def calls(self, num_engines: int) -> dict[str, int]:
        """Of a step whose trajectories sample everything after their prompts, prefilled once."""
        run, serving = self._config.run, self._config.serving
        prompt = max(self._config.learner.prompt_buckets, default=0)
        sampled = self._config.model.max_context - prompt
        rows = _ceil(run.groups_per_step * run.group_size, num_engines)
        prefilled = _ceil(run.groups_per_step, num_engines) * prompt
        per_call = serving.extend_rows * self._engine.extend_buckets[-1]
        return {
            "prefill": _ceil(prefilled, per_call),
            "decode": _ceil(rows, serving.num_slots) * _ceil(sampled, serving.steps_per_sync),
        }


def with_groups(section: LearnerSection, num_groups: int) -> LearnerSection:
    """Buffers for so many groups a replica where the configuration says -1."""
    sized = [key for key in ("pool_size", "prompt_slots") if getattr(section, key) == -1]
    numbers: dict[str, Any] = dict.fromkeys(sized, num_groups)
    return dataclasses.replace(section, **numbers)


def _learner_mesh(
    config: RunConfig, model: TransformerConfig, name: str, devices: list[jax.Device]
) -> Mesh:
    data, fsdp, tensor = config.learner.mesh
    shape, count = MeshShape(data=data, fsdp=fsdp, tensor=tensor), len(devices)
    check(
        shape.num_devices == count,
        "learner.mesh",
        config.learner.mesh,
        f"a mesh of all {count} chips of --topology={name}, not of {shape.num_devices}",
        f'One that divides every model is --config.learner.mesh="({count}, 1, 1)".',
    )
    check_mesh(shape, model, _lengths(config.learner), num_devices=len(devices))
    return make_mesh(shape, devices)


def _engine_mesh(model: TransformerConfig, generation: str) -> tuple[str, Mesh]:
    """The first grid that is a slice of the chip and divides the model."""
    reasons = []
    for grid in _ENGINE_GRIDS:
        name = f"{generation}:{grid}"
        try:
            return name, serving_mesh(model, topology.topology_devices(name))
        except (TopologyError, MeshError) as error:
            reasons.append(str(error))
    raise MeshError(f"no slice of {generation} serves the model: {reasons[-1]}")


def _step_shape(config: RunConfig, model: TransformerConfig) -> StepShape:
    return StepShape(
        model=model,
        num_trajectories=config.run.groups_per_step * config.run.group_size,
        tokens=config.learner.buckets[-1],
        prompt_tokens=max(config.learner.prompt_buckets, default=0),
        num_open_groups=config.run.groups_per_step,
    )


def _lengths(section: LearnerSection) -> tuple[int, ...]:
    return (*section.buckets, *section.prompt_buckets)


def _ceil(amount: int, size: int) -> int:
    return -(-amount // size)


def _attended(length: int, before: int) -> float:
    """Share of the pairs of `length` queries and before + length keys in blocks that a kernel does
    not skip: all keys before the row, and its own up to the query's block.
    """
    block = min(MAX_BLOCK, length)
    return (before + (length + block) / 2) / (before + length) if length else 1.0
