"""What the learner keeps on every device: planned before it is allocated, sized where asked.

`learner.pool_size` and `learner.prompt_slots` of -1 mean as many as fit. A group that streams uses
a pair and a prompt slot on its replica, so both grow together. The largest programs are compiled
for the most that could fit, for their temporaries are known to the compiler alone.

`Learner` calls `plan_memory` in its constructor and `check_programs` when all is compiled. A device
that states no limit refuses nothing; on the CPU the host's memory is the limit.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.errors import UserError
from thundersync_jax.learner.placement import Placement, device_bytes
from thundersync_jax.learner.program_names import (
    Fold,
    Name,
    PromptBackward,
    Shapes,
    Whole,
    shapes_of,
)
from thundersync_jax.learner.programs import Programs

MAX_GROUPS = 32  # that stream on one replica at a time: seldom more are open there
HEADROOM = 0.95  # of a device for what was sized: fragments, arguments of calls, the runtime
HOST_SHARE = 0.5  # of the host for buffers: checkpoints pass through it, and sandboxes run there

# What can be lowered to make room, with the least it can be.
_SIZED = ("pool_size", "prompt_slots")  # where -1 is as many as fit
_MOST = 2**31  # no device holds as many of anything
_LEAST = {"pool_size": 0, "pairs_per_call": 1, "prompt_slots": 1, "held_gradients": 0}


class MemoryPlanError(UserError, ValueError):
    """The buffers or a program do not fit: the numbers, and what would."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Memory that one device offers.

    Attributes:
      device_bytes: what the device has; None where nobody says.
      reserved_bytes: others' part of it, such as the serving engine's.
      host_bytes: what buffers may take of the host's memory.
      is_host: the device computes in the host's memory (the CPU): both are one.
    """

    device_bytes: int | None
    reserved_bytes: int = 0
    host_bytes: int = 0
    is_host: bool = False


def room_of(device: jax.Device, reserved_bytes: int = 0) -> Room:
    """As the device states it; devices of one host share the host's memory equally."""
    stated = (device.memory_stats() or {}).get("bytes_limit")
    host_bytes = _host_bytes() // jax.local_device_count()
    is_host = stated is None and device.platform == "cpu"
    return Room(
        device_bytes=host_bytes if is_host else stated,
        reserved_bytes=reserved_bytes,
        host_bytes=int(HOST_SHARE * host_bytes),
        is_host=is_host,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes on one device.

    Attributes:
      state_bytes: parameters that train, the optimizer's copy of them where it is another, and its
        moments.
      frozen_bytes: parameters that do not train.
      accumulator_bytes: one sum of gradients; a pair (G1, G2) is two.
      held_bytes: one gradient ahead of its verdict.
      slot_bytes: one shared prompt with its adjoints; 0 where none is shared.
      num_sums: sums with a denominator of their own: of the scores, and of reward-free terms.
      caches_bytes: the trajectory caches on the device, all of them.
      host_caches_bytes: those in pinned host memory, all of them.
      residual_bytes: the residuals that are kept of their segments.
    """

    state_bytes: int
    accumulator_bytes: int
    held_bytes: int
    slot_bytes: int
    frozen_bytes: int = 0
    num_sums: int = 1
    caches_bytes: int = 0
    host_caches_bytes: int = 0
    residual_bytes: int = 0


def sizes_of(placement: Placement, caches: Any = None, host_caches: Any = None) -> Sizes:
    """Sizes of what a learner places; the caches are abstract."""
    master = 0 if placement.is_master_shared else device_bytes(placement.master)
    slots = placement.slots
    residual_bytes = device_bytes(None if caches is None else caches.residuals)
    return Sizes(
        state_bytes=device_bytes((placement.trainable, placement.opt_state)) + master,
        frozen_bytes=device_bytes(placement.frozen),
        accumulator_bytes=device_bytes(placement.accumulator),
        held_bytes=device_bytes(placement.held),
        slot_bytes=0 if slots is None else device_bytes(slots) // slots.kv.keys.shape[1],
        num_sums=placement.num_sums,
        caches_bytes=device_bytes(caches) - residual_bytes,
        host_caches_bytes=device_bytes(host_caches),
        residual_bytes=residual_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The buffers of one configuration, in bytes of one device.

    Attributes:
      config: with numbers in place of -1.
      program, program_bytes: the largest program, and its temporaries; "" and 0 until compiled.
    """

    config: LearnerSection
    sizes: Sizes
    room: Room
    program: str = ""
    program_bytes: int = 0

    @property
    def num_device_pairs(self) -> int:
        is_on_device = self.config.pool_memory == "device"
        size = self.config.pool_size
        return size if is_on_device else min(size, self.config.pairs_per_call)

    @property
    def num_slots(self) -> int:
        """Prompt slots; every held gradient has one for its prompt's share."""
        has_slots = bool(self.config.prompt_buckets)
        return self.config.prompt_slots + self.config.held_gradients if has_slots else 0

    @property
    def parts(self) -> dict[str, int]:
        """What stays on the device."""
        accumulator, held = self.sizes.accumulator_bytes, self.config.held_gradients
        return {
            "state": self.sizes.state_bytes,
            "frozen parameters": self.sizes.frozen_bytes,
            "batch sum": self.sizes.num_sums * accumulator,
            "pairs": 2 * self.num_device_pairs * accumulator,
            "held gradients": held * self.sizes.held_bytes,
            "prompt slots": self.num_slots * self.sizes.slot_bytes,
            "trajectory caches": self.sizes.caches_bytes,
            "kept residuals": self.sizes.residual_bytes,
        }

    @property
    def resident_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def host_parts(self) -> dict[str, int]:
        """What lies in pinned host memory between calls."""
        num_pairs = self.config.pool_size - self.num_device_pairs
        return {
            "pairs": 2 * num_pairs * self.sizes.accumulator_bytes,
            "trajectory caches": self.sizes.host_caches_bytes,
        }

    @property
    def host_bytes(self) -> int:
        return sum(self.host_parts.values())

    @property
    def peak_bytes(self) -> int:
        """The most on the device at once."""
        return self.resident_bytes + self.program_bytes

    @property
    def fits(self) -> bool:
        room = self.room
        if room.device_bytes is None:
            return True
        free_bytes = room.device_bytes - room.reserved_bytes
        if room.is_host:
            return self.peak_bytes + self.host_bytes <= free_bytes
        return self.peak_bytes <= free_bytes and self.host_bytes <= room.host_bytes

    def describe(self) -> str:
        """For people, in one line."""
        slots = f", {self.config.prompt_slots} prompt slots" if self.num_slots else ""
        host = f", {_mb(self.host_bytes)} in the host" if self.host_bytes else ""
        return (
            f"{_mb(self.resident_bytes)} of buffers a device{host} "
            f"({self.config.pool_size} pairs{slots}) and "
            f"{_mb(self.program_bytes)} for the largest program"
        )


def plan_memory(
    config: LearnerSection, room: Room, make: Callable[[Shapes], Programs]
) -> tuple[MemoryPlan, Programs]:
    """The plan of a configuration, and its programs. Raises MemoryPlanError if it does not fit."""
    most = _with_groups(config, MAX_GROUPS)
    programs = make(shapes_of(most))
    sizes = sizes_of(programs.placement, programs.caches, programs.host_caches)
    plan = MemoryPlan(config=most, sizes=sizes, room=room)
    if most == config:
        check_fits(plan)
        return plan, programs
    if room.device_bytes is None:
        raise MemoryPlanError(
            "this device does not say how much memory it has: give numbers for "
            "learner.pool_size and learner.prompt_slots instead of -1"
        )
    programs.warm_up(_largest(most))
    plan = fit(config, _with_largest(plan, programs.temporaries()))
    return plan, programs if plan.config == most else make(shapes_of(plan.config))


def fit(config: LearnerSection, most: MemoryPlan) -> MemoryPlan:
    """The largest plan for `config` that fits with headroom.

    Args:
      most: the plan for MAX_GROUPS, with its largest program.
    """
    tight = _with_headroom(most)
    if most.sizes.state_bytes > most.program_bytes:  # a second state, next to all buffers
        tight = dataclasses.replace(
            tight, program="reading a checkpoint", program_bytes=most.sizes.state_bytes
        )
    for num_groups in range(MAX_GROUPS, 0, -1):
        fitted = _with_groups(config, num_groups)
        if dataclasses.replace(tight, config=fitted).fits:
            return dataclasses.replace(most, config=fitted)
    smallest = dataclasses.replace(tight, config=_with_groups(config, 1))
    raise _refusal(smallest, f"not one group fits {HEADROOM:.0%} of a device: ")


def _with_headroom(plan: MemoryPlan) -> MemoryPlan:
    assert plan.room.device_bytes is not None
    room = dataclasses.replace(plan.room, device_bytes=int(HEADROOM * plan.room.device_bytes))
    return dataclasses.replace(plan, room=room)


def check_fits(plan: MemoryPlan) -> None:
    """Raises MemoryPlanError when a device has less; the CPU counts the host's whole memory."""
    if not plan.fits:
        raise _refusal(plan)


def check_programs(plan: MemoryPlan, temporaries: Mapping[Name, int]) -> MemoryPlan:
    """The plan with its largest program. Raises MemoryPlanError if that does not fit on top."""
    plan = _with_largest(plan, temporaries)
    check_fits(plan)
    return plan


def _with_largest(plan: MemoryPlan, temporaries: Mapping[Name, int]) -> MemoryPlan:
    name = max(temporaries, key=lambda name: temporaries[name])
    label = name.value if isinstance(name, Whole) else name
    return dataclasses.replace(plan, program=f"program {label}", program_bytes=temporaries[name])


def _with_groups(config: LearnerSection, num_groups: int) -> LearnerSection:
    """Buffers for so many groups wherever the configuration says -1."""
    sized = [key for key in _SIZED if getattr(config, key) == -1]
    numbers: dict[str, Any] = dict.fromkeys(sized, num_groups)
    return dataclasses.replace(config, **numbers)


def _largest(config: LearnerSection) -> list[Name]:
    """One of these has the most temporaries: longer buckets have more, closing has less."""
    prompts = config.prompt_buckets[-1:]
    names: list[Name] = [Fold(max(prompts, default=0), config.buckets[-1])]
    names += [PromptBackward(bucket) for bucket in prompts]
    names += [Whole.BIND] if config.held_gradients else []
    return [*names, Whole.UPDATE, Whole.GATHER]


def _refusal(plan: MemoryPlan, why: str = "") -> MemoryPlanError:
    room = plan.room
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in plan.parts.items() if size)
    text = f"{why}the learner keeps {_gb(plan.resident_bytes)} on every device ({parts})"
    if plan.program_bytes:
        text += f", {plan.program} needs {_gb(plan.program_bytes)} more"
    if room.device_bytes is not None:
        text += f", and {_gb(room.device_bytes - room.reserved_bytes)} are there for it"
    if room.reserved_bytes:
        text += f" besides {_gb(room.reserved_bytes)} for serving"
    if plan.host_bytes:
        names = " and ".join(name for name, size in plan.host_parts.items() if size)
        text += f"; its {names} in the host take {_gb(plan.host_bytes)}"
        text += "" if room.is_host else f" of {_gb(room.host_bytes)}"
    return MemoryPlanError(f"{text}: {_remedy(plan)}")


def _remedy(plan: MemoryPlan) -> str:
    """Every single change that would do; what else helps where none would."""
    is_before_programs = not plan.program_bytes
    if is_before_programs:
        plan = _with_headroom(plan)
    found = []
    leasts = dict(_LEAST)
    if plan.config.reduction == "exact":
        leasts["pool_size"] = 1
    if plan.config.has_turns:
        leasts["held_gradients"] = 1
    for key, least in leasts.items():
        smaller = range(least, min(getattr(plan.config, key), _MOST))
        at = bisect.bisect_left(
            smaller, True, key=lambda value: not _changed(plan, key, value).fits
        )
        found += [f"learner.{key} = {smaller[at - 1]}"] if at else []
    if _changed(plan, "pool_memory", "pinned_host").fits:
        found.append("learner.pool_memory = 'pinned_host'")
    advice = "use more devices along fsdp or tensor, or a smaller model"
    if plan.program.startswith(("program Fold", "program Prompt")):
        advice = f"shorten the longest bucket, set model.remat = 'block', {advice}"
    if plan.config.has_turns:
        advice = f"lower learner.num_turn_caches, {advice}"
    elif plan.sizes.caches_bytes:  # a distiller's
        is_paged = plan.sizes.host_caches_bytes > 0
        advice = f"lower opd.num_caches, {advice}"
        advice = advice if is_paged else f"set opd.cache_memory = 'pinned_host', {advice}"
    if plan.sizes.residual_bytes:
        advice = f"lower opd.num_residuals, {advice}"
    if not found:
        return advice
    rest = f", and leave {1 - HEADROOM:.0%} for programs" if is_before_programs else ""
    if is_before_programs and any(key in change for key in _SIZED for change in found):
        rest += " (-1 takes as many as fit)"
    return f"{' or '.join(found)} would fit{rest}; or {advice}"


def _changed(plan: MemoryPlan, key: str, value: Any) -> MemoryPlan:
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, **{key: value}))


def _host_bytes() -> int:
    """The host's memory, or what its container may use of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return physical if text == "max" else min(physical, int(text))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
