"""Devices of a TPU topology without a TPU, and what a program compiled for them needs.

Needs `libtpu` (pip install libtpu) and, before jax starts, the variables of `environment`: a parent
process sets them for the one that compiles. Called by tests and by the planner.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from thundersync_jax import hlo
from thundersync_jax.errors import UserError

EXAMPLES = ("v5e:2x4", "v5e:16x16", "v6e:2x4", "v6e:16x16", "v5p:2x2x1", "v5p:4x4x4")


class TopologyError(UserError, ValueError):
    """A topology that cannot be had: its name, what exists, the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Peaks of one chip as published: docs.cloud.google.com/tpu/docs/v5e, v5p and v6e.

    Attributes:
      flops_per_s: of bfloat16 products.
      hbm_bytes: as sold, GB = 1e9; compilers state more.
      link_bytes_per_s: of all its links, both directions together.
      num_links: two for every axis of the torus.
    """

    flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    num_links: int

    @property
    def ring_bytes_per_s(self) -> float:
        """What a chip receives over a ring along one axis of the torus: two links, inward."""
        return self.link_bytes_per_s / self.num_links


CHIPS = {
    "v5e": Chip(
        flops_per_s=197e12,
        hbm_bytes=16 * 10**9,
        hbm_bytes_per_s=819e9,
        link_bytes_per_s=400e9,
        num_links=4,
    ),
    "v5p": Chip(
        flops_per_s=459e12,
        hbm_bytes=95 * 10**9,
        hbm_bytes_per_s=2765e9,
        link_bytes_per_s=1200e9,
        num_links=6,
    ),
    "v6e": Chip(
        flops_per_s=918e12,
        hbm_bytes=32 * 10**9,
        hbm_bytes_per_s=1638e9,
        link_bytes_per_s=800e9,
        num_links=4,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What a compiled program needs on one device.

    Attributes:
      argument_bytes, output_bytes, temp_bytes: HBM; outputs in donated arguments are `alias_bytes`.
      peak_bytes: the most that is alive at once, arguments included. The compiler refuses a program
        by this; temp_bytes may count more, with fragments.
      collectives: mesh axis -> (instructions that join devices along it, bytes of their results).
        An instruction counts once, also in a loop, and under every axis that it crosses.
      largest_all_reduce: mesh axis -> bytes of the largest result of an all-reduce along it; what
        is reduced and scattered is no all-reduce.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    largest_all_reduce: Mapping[str, int]


def environment() -> dict[str, str]:
    """Variables for a process that compiles for a topology; the computing backend is the CPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        # The compiler holds no chip: two processes may use it at a time.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def chip_of(name: str) -> Chip:
    """The chip of a topology such as "v5e:2x4". Raises TopologyError at one without known peaks."""
    generation = name.partition(":")[0]
    if generation not in CHIPS:
        raise TopologyError(
            f"topology {name!r} begins with no chip whose peaks are known. Expected one of "
            f"{', '.join(CHIPS)}, and a grid, as in {', '.join(EXAMPLES)}"
        )
    return CHIPS[generation]


def topology_devices(name: str) -> list[jax.Device]:
    """The devices of a topology such as "v5e:2x4", to make a mesh of and to compile for.

    Raises:
      TopologyError: libtpu is missing, or knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"topology {name!r} needs the TPU compiler, which is not installed: pip install libtpu"
        )
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (RuntimeError, ValueError) as error:
        raise TopologyError(
            f"topology {name!r} is unknown to the TPU compiler ({error}). Expected a generation "
            f"and a grid of chips that fills whole hosts, such as {', '.join(EXAMPLES)}"
        ) from error
    return list(topology.devices)


def describe(compiled: jax.stages.Compiled, mesh: Mesh) -> ProgramReport:
    """Memory and collectives of a program compiled for `mesh`."""
    memory: Any = compiled.memory_analysis()
    found = hlo.collectives(compiled.as_text() or "")
    by_axis = {axis: hlo.crossing(found, mesh, axis) for axis in mesh.axis_names}
    return ProgramReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        collectives={
            axis: (len(crossed), sum(c.bytes for c in crossed)) for axis, crossed in by_axis.items()
        },
        largest_all_reduce={
            axis: max((c.bytes for c in crossed if c.kind == hlo.Kind.ALL_REDUCE), default=0)
            for axis, crossed in by_axis.items()
        },
    )
