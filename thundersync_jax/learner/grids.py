"""What exact sums begin a step with, and what the next step begins with. Host numbers.

`SumStart` is part of the train state: it is fixed while a step runs, and it is checkpointed. The
next one follows from the sums that reached the update, never from the order in which they did:
failed attempts and groups of equal rewards, which are computed or not as they arrive, leave no
trace in it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.exact_sum import Grid, start_for
from thundersync_jax.learner.limbs import FIRST_EXPONENT, NO_PEAK

PAIR = ("reward_score_grad", "score_grad")
ADJOINTS = ("adjoint1", "adjoint2")


def sum_names(num_sums: int) -> tuple[str, ...]:
    """Of what the update divides: the batch sum, and a sum for each denominator of terms."""
    return ("batch", *(f"terms{number}" for number in range(1, num_sums)))


def adjoint_names(num_sums: int) -> tuple[str, ...]:
    """Of the prompt's shares of a pair, and of every sum of terms."""
    return (*ADJOINTS, *(f"terms{number}_adjoint" for number in range(1, num_sums)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumStart:
    """State of the sums at the start of a step. `ordered` sums have none and leave it alone.

    Attributes:
      center: c of sum (r_i - c) g_i: the median reward of the last update, which no single one
        drags away from the others; 0 before any.
      grids: of PAIR, `sum_names` and `adjoint_names`, the grid of every leaf of these sums, as the
        exponent of a power of two; without those that no update has had yet.
    """

    center: float = 0.0
    grids: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        grids = {name: tuple(grid) for name, grid in sorted(self.grids.items())}  # JSON has lists
        object.__setattr__(self, "grids", grids)

    def grid(self, name: str) -> tuple[int, ...]:
        return self.grids.get(name, ())


class StepGrids:
    """Collects the grids of one step's sums.

    Attributes:
      num_promotions: leaves of sums that met an addend beyond their grid.
    """

    def __init__(self, start: SumStart) -> None:
        self._start = start
        self._peaks: dict[str, np.ndarray] = {}
        self.num_promotions = 0

    def note(
        self, name: str, grid: Grid | None, is_counted: np.ndarray, rows: Any = slice(None)
    ) -> None:
        """Counts one sum of every replica that reaches the update.

        Args:
          name: of PAIR or `adjoint_names`.
          grid: [R, ..., N]; None of sums without one.
          is_counted: bool [R].
          rows: where the sums of the replicas are, [R, N] of all.
        """
        if grid is not None and is_counted.any():
            self._count(name, jax.tree.map(lambda x: np.asarray(x)[rows][is_counted], grid))

    def note_total(self, name: str, grid: Grid | None) -> None:
        """Counts the replicas' sums [R, N] as one."""
        if grid is not None:
            self._count(name, jax.tree.map(lambda x: np.asarray(x).max(0, keepdims=True), grid))

    def _count(self, name: str, grid: Grid) -> None:
        peak = np.asarray(grid.peak)
        self.num_promotions += int(np.sum(grid.exponent > grid.start))
        self._peaks[name] = np.maximum(self._peaks.get(name, NO_PEAK), peak.max(axis=0))

    def next_start(self, rewards: Sequence[float]) -> SumStart:
        """What the step after this one begins with.

        Args:
          rewards: of all trajectories that have one, in any order.
        """
        start = self._start
        fitted = {name: _fitted(start.grid(name), peaks) for name, peaks in self._peaks.items()}
        center = statistics.median(rewards) if rewards else start.center
        return SumStart(center=center, grids={**start.grids, **fitted})


def coarseness(grid: Grid, row: int) -> float:
    """Of a replica's sum: the step of the grid over the largest addend, of the leaf where that is
    the most.
    """
    exponent, peak = np.asarray(grid.exponent)[row], np.asarray(grid.peak)[row]
    steps = (exponent - peak)[peak > NO_PEAK].astype(np.float64)
    return 2.0 ** min(float(np.max(steps, initial=-np.inf)), 0.0)


def _fitted(old: tuple[int, ...], peaks: np.ndarray) -> tuple[int, ...]:
    """The grids for addends like these; a leaf that was always zero keeps its grid."""
    before = old or (FIRST_EXPONENT,) * len(peaks)
    return tuple(
        exponent if peak == NO_PEAK else start_for(peak)
        for exponent, peak in zip(before, peaks.tolist(), strict=True)
    )
