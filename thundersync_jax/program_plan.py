"""One program compiled for a mesh that is not there: memory, work, and time at published peaks.

Called by `planner`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from thundersync_jax import hlo_cost, topology
from thundersync_jax.errors import UserError
from thundersync_jax.hlo_cost import Assumed
from thundersync_jax.topology import Chip


class PlanError(UserError):
    """A program that no chip of the topology can hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """One compiled program, of one device and one call.

    Attributes:
      argument_bytes, temp_bytes, output_bytes, alias_bytes, peak_bytes: see ProgramReport.
      fits: the chip has room for it beside everything that stays there.
      flops, hbm_bytes, link_bytes, collectives: see Cost.
      arithmetic_s, memory_s, links_s: what these take at the chip's published peaks.
    """

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    peak_bytes: int
    fits: bool
    flops: float
    hbm_bytes: int
    link_bytes: int
    collectives: Mapping[str, Mapping[str, int]]
    arithmetic_s: float
    memory_s: float
    links_s: float
    compile_s: float

    @property
    def extra_bytes(self) -> int:
        """What it needs besides its arguments."""
        return max(self.peak_bytes - self.argument_bytes, self.output_bytes - self.alias_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Calls of a step, one after the other on a device, and what they take at published peaks.

    Attributes:
      overlapped_s: each call takes the longest of its three times.
      serial_s: each takes their sum.
    """

    calls: Mapping[str, int]
    arithmetic_s: float
    memory_s: float
    links_s: float
    overlapped_s: float
    serial_s: float


def compile_program(
    title: str,
    lower: Callable[[], jax.stages.Lowered],
    mesh: Mesh,
    chip: Chip,
    assumed: Assumed,
    announce: Callable[[str], None],
) -> ProgramPlan:
    """Compiles one program; whether it fits is judged by the caller, who knows what stays there.

    Raises:
      PlanError: the compiler refuses a program that needs more than a whole chip.
    """
    started_s = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"the compiler refuses {title} on its own: {reason} Shorten the longest bucket, set "
            "config.model.remat = 'block', use more chips along fsdp or tensor, or a smaller model"
        ) from error
    compile_s = time.monotonic() - started_s
    announce(f"{title} compiled in {compile_s:.1f} s")
    report = topology.describe(compiled, mesh)
    cost = hlo_cost.cost(compiled.as_text() or "", mesh, assumed)
    return ProgramPlan(
        argument_bytes=report.argument_bytes,
        temp_bytes=report.temp_bytes,
        output_bytes=report.output_bytes,
        alias_bytes=report.alias_bytes,
        peak_bytes=report.peak_bytes,
        fits=True,
        flops=cost.flops,
        hbm_bytes=cost.hbm_bytes,
        link_bytes=cost.link_bytes,
        collectives={
            axis: {"count": count, "bytes": num_bytes}
            for axis, (count, num_bytes) in cost.collectives.items()
        },
        arithmetic_s=cost.flops / chip.flops_per_s,
        memory_s=cost.hbm_bytes / chip.hbm_bytes_per_s,
        links_s=cost.link_bytes / chip.ring_bytes_per_s,
        compile_s=compile_s,
    )


def step_time(calls: Mapping[str, int], programs: Mapping[str, ProgramPlan]) -> StepTime:
    def total(seconds: Callable[[ProgramPlan], float]) -> float:
        return sum(count * seconds(programs[title]) for title, count in calls.items())

    return StepTime(
        calls=calls,
        arithmetic_s=total(lambda p: p.arithmetic_s),
        memory_s=total(lambda p: p.memory_s),
        links_s=total(lambda p: p.links_s),
        overlapped_s=total(lambda p: max(p.arithmetic_s, p.memory_s, p.links_s)),
        serial_s=total(lambda p: p.arithmetic_s + p.memory_s + p.links_s),
    )
