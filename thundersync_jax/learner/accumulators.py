"""`Accumulators`: batch sum, pairs, held gradients and prompt slots; runs the calls on them.

All of it is donated to the programs and replaced by their results, so nobody else may hold a
reference across a call. Coefficients are computed here, on the host in float64, from moments in
index order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.buckets import Example, LaneItem, pad_lanes, pad_prompts
from thundersync_jax.learner.grids import ADJOINTS, PAIR, StepGrids, SumStart
from thundersync_jax.learner.groups import Group, Member, Path
from thundersync_jax.learner.pairs import Pairs
from thundersync_jax.learner.program_names import Fold
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.streaming import Binding, Params, PromptSlots
from thundersync_jax.learner.sums import Sum
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, LaneWork, PromptWork


class Accumulators:
    """Device buffers of one step, on every replica.

    Args:
      pairs: the pool of pairs (G1, G2).
      num_held: gradients that every replica can hold ahead of their verdicts. The last `num_held`
        prompt slots take the prompt's shares of them.
      advantage: "grpo" or "dr_grpo".
      start: what the sums begin their first step with.
    """

    def __init__(
        self,
        programs: Programs,
        pairs: Pairs,
        *,
        num_held: int,
        advantage: str,
        start: SumStart,
    ) -> None:
        self._programs = programs
        self._pairs = pairs
        self._num_held = num_held
        self._advantage = advantage
        self.clear(start)

    def clear(self, start: SumStart) -> None:
        """Begins with zeros again."""
        # Freed before their successors are made.
        self.batch: Any = None
        self._held: list[Sum] = []
        self._slots: PromptSlots | None = None
        self._pairs.clear()
        self._held = [self._programs.held() for _ in range(self._num_held)]
        self._slots = self._programs.prompt_slots()
        self.batch = self._programs.accumulator()
        self.begin(start)

    def begin(self, start: SumStart) -> None:
        """Sets the grids of a step; every sum is zero."""
        self._grids = StepGrids(start)
        self.batch = self.batch.started(start.batch)
        self._pairs.begin(start.reward_score_grad, start.score_grad)
        if self._slots is not None:
            self._slots = self._slots.replace(
                adjoint1=self._slots.adjoint1.started(start.adjoint1),
                adjoint2=self._slots.adjoint2.started(start.adjoint2),
            )

    @property
    def num_promotions(self) -> int:
        """Leaves of the step's sums that met an addend beyond their grid."""
        return self._grids.num_promotions

    def gradient(self) -> Params:
        """A copy of the batch sum."""
        return jax.device_get(jax.jit(type(self.batch).total)(self.batch))

    def update(
        self, state: TrainState, denominator: float, rewards: Sequence[float]
    ) -> tuple[float, SumStart]:
        """Steps once along the batch sum, which is zero then.

        Args:
          state: its arrays are donated and replaced.
          rewards: of all trajectories that have one.

        Returns:
          The gradient's norm, and what the next step begins with.
        """
        self._grids.note_total("batch", self.batch.grid)
        state.params, state.opt_state, self.batch, norm = self._programs.update(
            state.params, state.opt_state, self.batch, denominator
        )
        return float(norm), self._grids.next_start(rewards)  # blocks until it is complete

    def fold(self, params: Params, work: FoldWork) -> np.ndarray:
        """Runs one accumulate call; returns what it says of its lanes, [R, STATISTICS, K]."""
        reached, pairs = self._pairs.reach(work.pairs)
        buffers = (self.batch, *pairs, *self._held)
        lanes = pad_lanes(
            [
                [self._item(lane, replica) for lane in lanes]
                for replica, lanes in enumerate(work.replicas)
            ],
            self._programs.lanes_per_call(work.bucket),
            work.bucket,
            self._programs.placement.scalar_dtype,
        )
        shape = (self._programs.num_replicas, len(buffers), lanes.tokens.shape[1])
        coefficients = np.zeros(shape)
        to_prompt = np.zeros((shape[0], 2, shape[2]))
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                coefficients[replica, :, at] = self._coefficients(lane, reached)
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
        num_pairs = len(pairs)
        self.batch, self._held = results[0], list(results[1 + num_pairs :])
        self._pairs.put(reached, results[1 : 1 + num_pairs])
        self._slots = slots if work.prefix_bucket else self._slots
        return np.asarray(stats)

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
        """Adds pairs to the batch sum, with the coefficients of their groups' final moments."""
        coefficients = np.zeros((len(work.replicas), 2))
        for replica, group in enumerate(work.replicas):
            if group is not None:
                coefficients[replica] = self._closing_coefficients(group)
        is_used = np.array([group is not None for group in work.replicas])
        reached, pairs = self._pairs.reach([work.index])
        at = 2 * reached.index(work.index)
        pair = pairs[at : at + 2]
        for name, acc in zip(PAIR, pair, strict=True):
            self._grids.note(name, acc.grid, coefficients[:, 0] != 0)
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
        slot = np.zeros(self._programs.num_replicas, np.int32)
        for replica, group in enumerate(work.replicas):
            if group is not None:
                coefficients[replica] = self._closing_coefficients(group)
                slot[replica] = group.slots[replica]
        rows = np.arange(len(slot)), slot
        for name, acc in zip(ADJOINTS, (self._slots.adjoint1, self._slots.adjoint2), strict=True):
            self._grids.note(name, acc.grid, coefficients[:, 0] != 0, rows)
        self.batch = self._programs.prompt_backward(
            params, self.batch, self._slots, coefficients, prompts
        )
        jax.block_until_ready(self.batch)

    def _held_slot(self, index: int) -> int:
        """Where the prompt's share of a held gradient lies."""
        slots = self._programs.placement.slots
        return 0 if slots is None else slots.kv.keys.shape[1] - self._num_held + index

    def _coefficients(self, lane: LaneWork, reached: list[int]) -> np.ndarray:
        """The weights of one gradient in (batch, pairs, held)."""
        weights = np.zeros(1 + 2 * len(reached) + self._num_held)
        if lane.held is not None:
            weights[1 + 2 * len(reached) + lane.held] = 1.0
        elif lane.pair is not None:
            first = 1 + 2 * reached.index(lane.pair)
            weights[first : first + 2] = self._pair_coefficients(lane)
        else:
            weights[0] = 1.0 if len(lane.members) > 1 else self._advantages(lane)[0]
        return weights

    def _pair_coefficients(self, lane: LaneWork) -> tuple[float, float]:
        """The weights of one gradient in (G1, G2), or of its prompt's share in its slot's pair."""
        if lane.path is Path.AHEAD:
            return 0.0, 1.0  # held as it is
        if lane.path is Path.DIRECT and len(lane.members) > 1:
            moments = lane.group.moments(self._advantage)
            return moments.scale, 0.0
        reward = lane.members[0].reward  # a packed lane that streams has one reward
        assert reward is not None and lane.group.center is not None
        return reward - lane.group.center, 1.0

    def _closing_coefficients(self, group: Group) -> tuple[float, float]:
        assert group.center is not None
        return group.moments(self._advantage).closing_coefficients(group.center)

    def _item(self, lane: LaneWork, replica: int) -> LaneItem:
        """A packed lane's advantages are in its token weights: it has one gradient."""
        slot = lane.group.slots.get(replica, 0)
        is_packed = lane.path is Path.DIRECT and len(lane.members) > 1
        return LaneItem(
            examples=tuple(_example(m) for m in lane.members),
            scales=tuple(self._advantages(lane)) if is_packed else (1.0,) * len(lane.members),
            slot=slot,
            adjoint_slot=slot if lane.held is None else self._held_slot(lane.held),
        )

    def _advantages(self, lane: LaneWork) -> list[float]:
        moments = lane.group.moments(self._advantage)
        return [moments.advantage(m.reward) for m in lane.members if m.reward is not None]


def _example(member: Member) -> Example:
    assert member.example is not None
    return member.example
