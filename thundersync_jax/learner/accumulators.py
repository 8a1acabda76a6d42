"""`Accumulators`: batch sum, term sums, pairs, held gradients and prompt slots; runs the calls on
them.

All of it is donated to the programs and replaced by their results, so nobody else may hold a
reference across a call. Coefficients are computed here, on the host in float64, from advantages in
index order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.buckets import Example, LaneItem, pad_lanes, pad_prompts
from thundersync_jax.learner.grids import (
    ADJOINTS,
    PAIR,
    StepGrids,
    SumStart,
    adjoint_names,
    coarseness,
    sum_names,
)
from thundersync_jax.learner.groups import Cohort, Member, Path
from thundersync_jax.learner.pairs import Pairs
from thundersync_jax.learner.program_names import Fold
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.streaming import Binding, Params, PromptSlots
from thundersync_jax.learner.sums import Sum
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_buffers import TurnCaches
from thundersync_jax.learner.turn_schedule import SegmentWork
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, LaneWork, PromptWork
from thundersync_jax.losses.objective import Objective

_TOLERATED = 1e-5  # relative error of a group's gradient


class Accumulators:
    """Device buffers of one step, on every replica.

    Attributes:
      sums: (batch, *terms), what the update divides, each by its own denominator.

    Args:
      pairs: the pool of pairs (G1, G2).
      num_held: gradients that every replica can hold ahead of their verdicts. The last `num_held`
        prompt slots take the prompt's shares of them.
      turns: the caches of trajectories whose turns run ahead of their content, if any do.
      start: what the sums begin their first step with.
    """

    def __init__(
        self,
        programs: Programs,
        pairs: Pairs,
        *,
        num_held: int,
        objective: Objective,
        start: SumStart,
        turns: TurnCaches | None = None,
    ) -> None:
        self._programs = programs
        self._turns = turns
        self._pairs = pairs
        self._num_held = num_held
        self._objective = objective
        self._sum_names = sum_names(objective.num_sums)
        self._adjoint_names = adjoint_names(objective.num_sums)
        self.clear(start)

    def clear(self, start: SumStart) -> None:
        """Begins with zeros again."""
        # Freed before their successors are made.
        self.sums: tuple[Sum, ...] = ()
        self._held: list[Sum] = []
        self._slots: PromptSlots | None = None
        self._pairs.clear()
        if self._turns is not None:
            self._turns.clear()
        self._held = [self._programs.held() for _ in range(self._num_held)]
        self._slots = self._programs.prompt_slots()
        self.sums = tuple(self._programs.accumulator() for _ in self._sum_names)
        self.begin(start)

    def begin(self, start: SumStart) -> None:
        """Sets the grids of a step; every sum is zero."""
        self._grids = StepGrids(start)
        self.sums = tuple(
            acc.started(start.grid(name))
            for name, acc in zip(self._sum_names, self.sums, strict=True)
        )
        self._pairs.begin(*(start.grid(name) for name in PAIR))
        if self._slots is not None:
            named = zip(self._adjoint_names, self._slots.adjoints, strict=True)
            self._slots = self._slots.with_adjoints(
                [acc.started(start.grid(name)) for name, acc in named]
            )

    @property
    def batch(self) -> Sum:
        """The sum of the scores, the first of `sums`."""
        return self.sums[0]

    @batch.setter
    def batch(self, batch: Sum) -> None:
        self.sums = (batch, *self.sums[1:])

    @property
    def num_promotions(self) -> int:
        """Leaves of the step's sums that met an addend beyond their grid."""
        return self._grids.num_promotions

    def totals(self) -> tuple[Params, ...]:
        """A copy of what the update divides."""
        return jax.device_get(tuple(jax.jit(type(acc).total)(acc) for acc in self.sums))

    def update(self, state: TrainState, denominators: Sequence[float]) -> jax.Array:
        """Steps once along the sums, which are zero then; returns the gradient's norm.

        Args:
          state: its arrays are donated and replaced.
          denominators: of every sum.
        """
        for name, acc in zip(self._sum_names, self.sums, strict=True):
            self._grids.note_total(name, acc.grid)
        state.params, state.opt_state, self.sums, norm = self._programs.update(
            state.params, state.opt_state, self.sums, denominators
        )
        return norm

    def next_start(self, rewards: Sequence[float]) -> SumStart:
        """What the next step begins with, after the update.

        Args:
          rewards: of all trajectories that have one.
        """
        return self._grids.next_start(rewards)

    def fold(self, params: Params, work: FoldWork) -> np.ndarray:
        """Runs one accumulate call; returns what it says of its lanes, [R, STATISTICS, K]."""
        reached, pairs = self._pairs.reach(work.pairs)
        num_sums, buffers = len(self.sums), (*self.sums, *pairs, *self._held)
        lanes = pad_lanes(
            [
                [self._item(lane, replica) for lane in lanes]
                for replica, lanes in enumerate(work.replicas)
            ],
            self._programs.lanes_per_call(work.bucket),
            work.bucket,
            self._programs.placement.scalar_dtype,
            objective=self._objective,
        )
        shape = (self._programs.num_replicas, len(buffers), lanes.tokens.shape[1])
        coefficients = np.zeros(shape)
        to_prompt = np.zeros((shape[0], 2, shape[2]))
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                batch, *others = self._coefficients(lane, reached)
                # Every trajectory runs once, and then its terms are final.
                coefficients[replica, :, at] = (batch, *[1.0] * (num_sums - 1), *others)
                to_prompt[replica, :, at] = self._pair_coefficients(lane)
        used = self._slots if work.prefix_bucket else None
        results, slots, stats = self._programs.fold(
            Fold(work.prefix_bucket, work.bucket),
            params,
            buffers,
            used,
            coefficients,
            to_prompt,
            lanes,
        )
        num_others = num_sums + len(pairs)
        self.sums, self._held = results[:num_sums], list(results[num_others:])
        self._pairs.put(reached, results[num_sums:num_others])
        self._slots = slots if work.prefix_bucket else self._slots
        return np.asarray(stats)

    def run_turns(self, params: Params, work: SegmentWork) -> np.ndarray | None:
        """Folds turns into their trajectories' held gradients; returns as `TurnCaches.run`."""
        assert self._turns is not None
        held, stats = self._turns.run(params, work, tuple(self._held))
        self._held = list(held)
        return stats

    def bind(self, work: BindWork) -> None:
        """Folds the held gradients whose verdicts came, and drops those that failed."""
        reached, pairs = self._pairs.reach(work.pairs)
        num_replicas = len(work.replicas)
        coefficients = np.zeros((num_replicas, 1 + len(pairs)))
        to_prompt = np.zeros((num_replicas, 2))
        slot = np.zeros(num_replicas, np.int32)
        for replica, lane in enumerate(work.replicas):
            if lane is not None and lane.member.reward is not None:
                row = self._coefficients(lane, reached)
                coefficients[replica] = row[: 1 + len(pairs)]
                to_prompt[replica] = self._pair_coefficients(lane)
                slot[replica] = lane.group.slots.get(replica, 0)
        fields: dict[str, Any] = {
            "is_used": np.array([lane is not None for lane in work.replicas]),
            "coefficients": coefficients,
            "pair_coefficients": to_prompt,
            "slot": slot,
            "held_slot": np.full(num_replicas, self._held_slot(work.index), np.int32),
        }
        self._held[work.index], results, self._slots = self._programs.bind(
            self._held[work.index], (self.batch, *pairs), self._slots, Binding(**fields)
        )
        self.batch = results[0]
        self._pairs.put(reached, results[1:])
        jax.block_until_ready(self.batch)

    def close(self, work: CloseWork) -> None:
        """Adds pairs to the batch sum, with the coefficients of their cohorts' advantages."""
        coefficients = np.zeros((len(work.replicas), 2))
        for replica, cohort in enumerate(work.replicas):
            if cohort is not None:
                coefficients[replica] = cohort.closing.coefficients
        is_used = np.array([cohort is not None for cohort in work.replicas])
        reached, pairs = self._pairs.reach([work.index])
        at = 2 * reached.index(work.index)
        pair = pairs[at : at + 2]
        for name, acc in zip(PAIR, pair, strict=True):
            self._grids.note(name, acc.grid, np.any(coefficients, axis=1))
        for replica, cohort in enumerate(work.replicas):
            if cohort is not None and pair[0].grid is not None:
                _warn_of_cancellation(cohort, coarseness(pair[0].grid, replica))
        self.batch, *closed = self._programs.close(self.batch, pair, coefficients, is_used)
        self._pairs.put(reached, (*pairs[:at], *closed, *pairs[at + 2 :]))
        jax.block_until_ready(self.batch)

    def prompt(self, params: Params, work: PromptWork) -> None:
        """Runs prompts forward into their slots, or backward with their combined adjoints."""
        assert self._slots is not None
        prompts = pad_prompts(
            [
                None if group is None else (group.prefix_ids, group.slots[replica])
                for replica, group in enumerate(work.replicas)
            ],
            work.prefix_bucket,
        )
        if not work.is_backward:
            self._slots = self._programs.prompt_forward(params, self._slots, prompts)
            jax.block_until_ready(self._slots)
            return
        coefficients = np.zeros((self._programs.num_replicas, 2))
        for replica, group in enumerate(work.replicas):
            if group is not None:
                coefficients[replica] = group.cohort.closing.coefficients
        has_score = np.any(coefficients, axis=1)
        has_terms = np.array([group is not None for group in work.replicas])
        rows = np.arange(len(coefficients)), prompts.slot
        for name, acc in zip(self._adjoint_names, self._slots.adjoints, strict=True):
            self._grids.note(name, acc.grid, has_score if name in ADJOINTS else has_terms, rows)
        self.sums = self._programs.prompt_backward(
            params, self.sums, self._slots, coefficients, prompts
        )
        jax.block_until_ready(self.sums)

    def _held_slot(self, index: int) -> int:
        """Where the prompt's share of a held gradient lies."""
        slots = self._programs.placement.slots
        return 0 if slots is None else slots.kv.keys.shape[1] - self._num_held + index

    def _coefficients(self, lane: LaneWork, reached: list[int]) -> np.ndarray:
        """The weights of one gradient in (batch, pairs, held)."""
        weights = np.zeros(1 + 2 * len(reached) + self._num_held)
        match lane.path:
            case Path.AHEAD:
                assert lane.held is not None
                weights[1 + 2 * len(reached) + lane.held] = 1.0
            case Path.TERMS:
                pass
            case _ if lane.pair is not None:
                first = 1 + 2 * reached.index(lane.pair)
                weights[first : first + 2] = self._pair_coefficients(lane)
            case _ if self._has_advantages(lane):
                weights[0] = 1.0
            case _:
                closing = lane.group.cohort.closing
                advantage = closing.advantages[lane.member]
                weights[0] = closing.scale * advantage * lane.member.held_scale
        return weights

    def _pair_coefficients(self, lane: LaneWork) -> tuple[float, float]:
        """The weights of one gradient in (G1, G2), or of its prompt's share in its slot's pair."""
        if lane.path is Path.AHEAD:
            return 0.0, 1.0  # held as it is
        if lane.path is Path.TERMS:
            return 0.0, 0.0
        cohort = lane.group.cohort
        if self._has_advantages(lane):
            return cohort.closing.unit()
        member = lane.members[0]  # a packed lane that streams has one reward
        assert member.reward is not None and cohort.center is not None
        scale = member.held_scale
        return scale * (member.reward - cohort.center), scale

    def _has_advantages(self, lane: LaneWork) -> bool:
        """Its gradient contains them: its score reads them, or one pass serves several members."""
        is_shared = not self._objective.is_linear or len(lane.members) > 1
        return lane.path is Path.DIRECT and is_shared

    def _item(self, lane: LaneWork, replica: int) -> LaneItem:
        """Where a gradient contains its advantages, they are in the lane: as arguments of a score
        that reads them, otherwise in the token weights.
        """
        slot = lane.group.slots.get(replica, 0)
        scales = advantages = (1.0,) * len(lane.members)
        if self._has_advantages(lane):
            closing = lane.group.cohort.closing
            advantages = tuple(closing.advantages[m] for m in lane.members)
            scales = (closing.scale,) * len(lane.members)
            if self._objective.is_linear:
                scales = tuple(closing.scale * a for a in advantages)
        return LaneItem(
            examples=tuple(_example(m) for m in lane.members),
            scales=scales,
            advantages=advantages,
            slot=slot,
            adjoint_slot=slot if lane.held is None else self._held_slot(lane.held),
        )


def _warn_of_cancellation(cohort: Cohort, coarseness: float) -> None:
    """Where too few bits are left of what an exact pair closes to."""
    error = 4 * coarseness * cohort.closing.cancellation  # of some addends, not of one
    if error > _TOLERATED:
        logging.warning(
            "%s: the rewards lie %.0e of their spreads from c = %g, the median of the last update, "
            "so with learner.reduction = 'exact' this gradient is right to about %.0e. The next "
            "step's c follows the rewards; where groups always differ so much, use 'ordered'",
            cohort.groups[0].name(),
            cohort.closing.cancellation,
            cohort.center,
            min(error, 1.0),
        )


def _example(member: Member) -> Example:
    assert member.example is not None
    return member.example
