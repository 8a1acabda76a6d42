"""`Accumulators`: batch sum, pairs, held gradients and prompt slots; runs the calls on them.

All of it is donated to the programs and replaced by their results, so nobody else may hold a
reference across a call. Coefficients are computed here, on the host in float64, from rewards in
index order.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from thundersync_jax.learner.buckets import Example, LaneItem, pad_lanes, pad_prompts
from thundersync_jax.learner.groups import Group, Member, Path
from thundersync_jax.learner.programs import Fold, Programs
from thundersync_jax.learner.streaming import Binding, LaneStats, Params, PromptSlots
from thundersync_jax.learner.work import AheadWork, BindWork, FoldWork, LaneWork, PromptWork


class Accumulators:
    """Device buffers of one step, on every replica.

    Args:
      num_pairs: pairs (G1, G2) of the pool.
      num_held: gradients that every replica can hold ahead of their verdicts. The last `num_held`
        prompt slots take the prompt's shares of them.
      pairs_per_call: pairs that one accumulate call passes, besides the batch sum.
      advantage: "grpo" or "dr_grpo".
    """

    def __init__(
        self,
        programs: Programs,
        *,
        num_pairs: int,
        num_held: int,
        pairs_per_call: int,
        advantage: str,
    ) -> None:
        self._programs = programs
        self._num_pairs = num_pairs
        self._num_held = num_held
        self._pairs_per_call = pairs_per_call
        self._advantage = advantage
        self.clear()

    def clear(self) -> None:
        """Begins with zeros again."""
        programs = self._programs
        self.batch: Params = programs.zeros(programs.placement.accumulator)
        self._pairs: list[tuple[Params, Params]] = [
            (
                programs.zeros(programs.placement.accumulator),
                programs.zeros(programs.placement.accumulator),
            )
            for _ in range(self._num_pairs)
        ]
        self._held: list[Params] = [
            programs.zeros(programs.placement.accumulator) for _ in range(self._num_held)
        ]
        self._slots: PromptSlots | None = None
        if programs.placement.slots is not None:
            self._slots = programs.zeros(programs.placement.slots)

    def fold(self, params: Params, work: FoldWork, center: float) -> LaneStats:
        """Runs one accumulate call; returns its statistics [R, K] as host arrays.

        Args:
          center: c of G1 = sum (r_i - c) g_i.
        """
        pairs = self._passed_pairs(work.pairs)
        buffers = self._take(pairs)
        lanes = pad_lanes(
            [
                [_item(lane, replica) for lane in lanes]
                for replica, lanes in enumerate(work.replicas)
            ],
            self._programs.lanes_per_call(work.bucket),
            work.bucket,
        )
        shape = (self._programs.num_replicas, len(buffers), lanes.tokens.shape[1])
        coefficients = np.zeros(shape)
        to_prompt = np.zeros((shape[0], 2, shape[2]))
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                coefficients[replica, :, at] = self._coefficients(lane, pairs, center)
                to_prompt[replica, :, at] = _pair_coefficients(lane, center)
        name = Fold(len(buffers), work.prefix_bucket, work.bucket)
        used = self._slots if work.prefix_bucket else None
        results, slots, stats = self._programs.fold(
            name, params, tuple(buffers), used, coefficients, to_prompt, lanes
        )
        self._put(pairs, results)
        self._slots = slots if work.prefix_bucket else self._slots
        return jax.device_get(stats)

    def ahead(self, params: Params, work: AheadWork) -> LaneStats:
        """Computes gradients into a held buffer, one a replica; returns statistics [R, K]."""
        held_slot = self._held_slot(work.index)
        items = [
            []
            if pick is None
            else [
                LaneItem(
                    example=_example(pick[1]),
                    slot=pick[0].slots.get(replica, 0),
                    adjoint_slot=held_slot,
                )
            ]
            for replica, pick in enumerate(work.replicas)
        ]
        num_lanes = self._programs.lanes_per_call(work.bucket)
        coefficients = np.zeros((len(items), 1, num_lanes))
        to_prompt = np.zeros((len(items), 2, num_lanes))
        for replica, filled in enumerate(items):
            coefficients[replica, 0, : len(filled)] = 1.0
            to_prompt[replica, 0, : len(filled)] = 1.0
        results, slots, stats = self._programs.fold(
            Fold(1, work.prefix_bucket, work.bucket),
            params,
            (self._held[work.index],),
            self._slots if work.prefix_bucket else None,
            coefficients,
            to_prompt,
            pad_lanes(items, num_lanes, work.bucket),
        )
        (self._held[work.index],) = results
        self._slots = slots if work.prefix_bucket else self._slots
        return jax.device_get(stats)

    def bind(self, work: BindWork, center: float) -> None:
        """Folds the held gradients whose verdicts came, and drops those that failed."""
        pairs = self._passed_pairs(work.pairs)
        buffers = self._take(pairs)
        num_replicas = len(work.replicas)
        coefficients = np.zeros((num_replicas, len(buffers)))
        to_prompt = np.zeros((num_replicas, 2))
        slot = np.zeros(num_replicas, np.int32)
        for replica, lane in enumerate(work.replicas):
            if lane is not None and lane.member.reward is not None:
                coefficients[replica] = self._coefficients(lane, pairs, center)
                to_prompt[replica] = _pair_coefficients(lane, center)
                slot[replica] = lane.group.slots.get(replica, 0)
        fields: dict[str, Any] = {
            "is_used": np.array([lane is not None for lane in work.replicas]),
            "coefficients": coefficients,
            "pair_coefficients": to_prompt,
            "slot": slot,
            "held_slot": np.full(num_replicas, self._held_slot(work.index), np.int32),
        }
        self._held[work.index], results, self._slots = self._programs.bind(
            self._held[work.index], tuple(buffers), self._slots, Binding(**fields)
        )
        self._put(pairs, results)
        jax.block_until_ready(self.batch)

    def close(self, group: Group, center: float) -> None:
        """Adds the group's pair to the batch sum, with the coefficients of its final moments."""
        assert group.pair is not None
        self.batch, self._pairs[group.pair] = self._programs.close(
            self.batch,
            self._pairs[group.pair],
            group.moments(self._advantage).closing_coefficients(center),
        )
        jax.block_until_ready(self.batch)

    def prompt(self, params: Params, work: PromptWork, center: float) -> None:
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
                moments = group.moments(self._advantage)
                coefficients[replica] = moments.closing_coefficients(center)
        self.batch = self._programs.prompt_backward(
            params, self.batch, self._slots, coefficients, prompts
        )
        jax.block_until_ready(self.batch)

    def _held_slot(self, index: int) -> int:
        """Where the prompt's share of a held gradient lies."""
        slots = self._programs.placement.slots
        return 0 if slots is None else slots.kv.keys.shape[1] - self._num_held + index

    def _take(self, pairs: list[int]) -> list[Params]:
        """The buffers of a call: the batch sum, then G1 and G2 of every pair."""
        return [self.batch, *(acc for pair in pairs for acc in self._pairs[pair])]

    def _put(self, pairs: list[int], results: tuple[Params, ...]) -> None:
        self.batch, *rest = results
        for at, pair in enumerate(pairs):
            self._pairs[pair] = (rest[2 * at], rest[2 * at + 1])

    def _coefficients(self, lane: LaneWork, pairs: list[int], center: float) -> np.ndarray:
        """The weights of one gradient in the buffers of `_take`."""
        assert lane.member.reward is not None
        weights = np.zeros(1 + 2 * len(pairs))
        if lane.path is Path.DIRECT:
            moments = lane.group.moments(self._advantage)
            weights[0] = moments.advantage(lane.member.reward)
        else:
            assert lane.group.pair is not None
            first = 1 + 2 * pairs.index(lane.group.pair)
            weights[first : first + 2] = _pair_coefficients(lane, center)
        return weights

    def _passed_pairs(self, used: list[int]) -> list[int]:
        """The call's pairs, filled up with idle ones to the number the program takes."""
        if not used:
            return []
        idle = [pair for pair in range(self._num_pairs) if pair not in used]
        return used + idle[: self._pairs_per_call - len(used)]


def _item(lane: LaneWork, replica: int) -> LaneItem:
    slot = lane.group.slots.get(replica, 0)
    return LaneItem(example=_example(lane.member), slot=slot, adjoint_slot=slot)


def _example(member: Member) -> Example:
    assert member.example is not None
    return member.example


def _pair_coefficients(lane: LaneWork, center: float) -> tuple[float, float]:
    """The weights of one gradient in G1 and G2."""
    assert lane.member.reward is not None
    return lane.member.reward - center, 1.0
