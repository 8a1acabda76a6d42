"""What the learner keeps on every device, before anything is allocated.

Programs need temporaries on top of it, which only the compiler knows; `topology.describe` reads
them from a compiled program.
"""

from __future__ import annotations

import dataclasses

import jax

from thundersync_jax.config_sections import LearnerSection
from thundersync_jax.errors import UserError
from thundersync_jax.learner.placement import Placement, device_bytes


class MemoryPlanError(UserError, ValueError):
    """The configured buffers do not fit: the numbers, and the pool that would."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device.

    Attributes:
      state_bytes: parameters, the optimizer's copy of them where it is another, and its moments.
      batch_bytes: the batch sum.
      pairs_bytes: all pairs (G1, G2) of the pool.
      held_bytes: all gradients held ahead of their verdicts.
      slots_bytes: shared prompts with their adjoints.
    """

    state_bytes: int
    batch_bytes: int
    pairs_bytes: int
    held_bytes: int
    slots_bytes: int

    @property
    def resident_bytes(self) -> int:
        return sum(dataclasses.astuple(self))


def plan_memory(placement: Placement, config: LearnerSection) -> MemoryPlan:
    """What a learner with this configuration keeps."""
    params, master = device_bytes(placement.params), device_bytes(placement.master)
    accumulator = device_bytes(placement.accumulator)
    return MemoryPlan(
        # Where the master lies as the parameters do, they are the same arrays.
        state_bytes=params
        + (0 if placement.is_master_shared else master)
        + device_bytes(placement.opt_state),
        batch_bytes=accumulator,
        pairs_bytes=2 * config.pool_size * accumulator,
        held_bytes=config.held_gradients * accumulator,
        slots_bytes=device_bytes(placement.slots),
    )


def check_fits(plan: MemoryPlan, config: LearnerSection, device: jax.Device) -> None:
    """Raises MemoryPlanError when a device says that it has less. The CPU says nothing."""
    limit_bytes = (device.memory_stats() or {}).get("bytes_limit")
    if limit_bytes is None:
        return
    excess = plan.resident_bytes - limit_bytes
    if excess <= 0:
        return
    pair_bytes = 2 * plan.batch_bytes
    fitting = config.pool_size - -(-excess // pair_bytes)
    remedy = (
        f"learner.pool_size = {fitting} would fit"
        if fitting >= 0
        else "no pool fits: use more devices along fsdp or tensor, or a smaller model"
    )
    parts = ", ".join(
        f"{field.name.removesuffix('_bytes')} {getattr(plan, field.name) / 1e9:.3g}"
        for field in dataclasses.fields(plan)
    )
    raise MemoryPlanError(
        f"the learner would keep {plan.resident_bytes / 1e9:.3g} GB on every device ({parts}), "
        f"which has {limit_bytes / 1e9:.3g} GB: {remedy}"
    )
