"""The learner's part of a configuration. Never imports jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thundersync_jax.config_sections import mutable
from thundersync_jax.errors import check, check_choice

MAX_LANES = 4096  # trajectories of one learner call and replica


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSection:
    """The learner's memory and shapes.

    Attributes:
      mesh: devices along data, fsdp, tensor.
      pool_size: pairs (G1, G2) of every replica, each twice the parameters' size in float32; a
        group streams into one on every replica that runs it. 0 holds every group until its rewards
        are known; -1 takes as many as fit, at most 32.
      pool_memory: "device", or "pinned_host": there the pairs that no call has just used lie in the
        host's memory, and pairs_per_call are on the device.
      buckets: padded trajectory lengths (prompt included), ascending; the last must hold
        model.max_context.
      tokens_per_step: padded tokens that one call scans on every replica: K trajectories of
        bucket T with K x T at most this, and at least one.
      pairs_per_call: pairs of every replica that one call can reach.
      pack_tokens: trajectories of a group share a lane of up to so many tokens where one backward
        pass serves them all: on the direct path, and of equal rewards. 0 packs nothing.
      held_gradients: trajectories whose gradient each replica may compute ahead of their verdicts,
        when it would idle otherwise; each costs memory of the parameters' size in float32.
      prompt_buckets: padded lengths of shared prompts, ascending; none shares no prompt.
      prompt_slots: shared prompts a replica can hold; a group without one shares none. -1 as in
        pool_size; where both are -1 there is a slot for every pair.
      min_shared_tokens: a shorter prompt is run by every trajectory itself.
      objective: what is maximised: a name of `losses/objectives.py`, or "package.module:function"
        that returns an `Objective`.
      objective_options: its keyword arguments.
      reduction: "ordered" sums in float32; with "exact" the bits of the updated weights do not
        depend on the order in which trajectories arrive, for twice the memory of every sum.
      stream_turns: "idle" runs turns of growing trajectories into held gradients when nothing else
        is due; or "never".
      num_turn_caches: trajectories of every replica whose turns may run so at one time; 0 is as
        "never", for comparisons.
      max_logprob_gap: a larger |learner - sampler| log-probability stops the run, unless the
        objective weighs the one against the other.
    """

    mesh: tuple[int, ...] = mutable((1, 1, 1))
    pool_size: int = 8
    pool_memory: str = "device"
    buckets: tuple[int, ...] = (16, 32, 64)
    tokens_per_step: int = 256
    pairs_per_call: int = 2
    pack_tokens: int = 0
    held_gradients: int = 2
    prompt_buckets: tuple[int, ...] = ()
    prompt_slots: int = 16
    min_shared_tokens: int = 32
    objective: str = "grpo"
    objective_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reduction: str = "ordered"
    stream_turns: str = "never"
    num_turn_caches: int = 2
    max_logprob_gap: float = mutable(0.5)

    def __post_init__(self) -> None:
        whole = tuple(max(1, size) for size in (*self.mesh, 1, 1, 1)[:3])
        check(
            self.mesh == whole,
            "learner.mesh",
            self.mesh,
            "three numbers of at least 1: devices along data, fsdp, tensor",
            f'For instance --config.learner.mesh="{whole}".',
        )
        expected = "0 or more buffers, or -1 for as many as fit"
        check(self.pool_size >= -1, "learner.pool_size", self.pool_size, expected)
        is_number = self.prompt_slots >= 1 or self.prompt_slots == -1
        expected = "at least 1, or -1 for as many as fit"
        check(is_number, "learner.prompt_slots", self.prompt_slots, expected)
        check_choice("learner.pool_memory", self.pool_memory, ("device", "pinned_host"))
        for key in ("held_gradients", "pack_tokens", "num_turn_caches"):
            check(getattr(self, key) >= 0, f"learner.{key}", getattr(self, key), "0 or more")
        for key in ("pairs_per_call", "min_shared_tokens"):
            check(getattr(self, key) >= 1, f"learner.{key}", getattr(self, key), "at least 1")
        self._check_reduction()
        expected = "a positive number of nats"
        check(self.max_logprob_gap > 0, "learner.max_logprob_gap", self.max_logprob_gap, expected)
        self._check_lengths()

    @property
    def has_turns(self) -> bool:
        """Whether turns can run ahead of their content."""
        return self.stream_turns == "idle" and self.num_turn_caches > 0

    def _check_reduction(self) -> None:
        check_choice("learner.stream_turns", self.stream_turns, ("never", "idle"))
        check_choice("learner.reduction", self.reduction, ("ordered", "exact"))
        if self.reduction == "exact":
            expected = (
                "at least 1 or -1 with learner.reduction = 'exact', where every gradient goes "
                "through a pair"
            )
            check(self.pool_size != 0, "learner.pool_size", self.pool_size, expected)
            expected = (
                "0 with learner.reduction = 'exact': packed gradients differ in their last bits"
            )
            check(self.pack_tokens == 0, "learner.pack_tokens", self.pack_tokens, expected)
            check(
                self.stream_turns == "never",
                "learner.stream_turns",
                self.stream_turns,
                "'never' with learner.reduction = 'exact': the last bits of a gradient depend on "
                "which turns ran ahead",
                "Or set learner.reduction = 'ordered'.",
            )
        check(
            not self.has_turns or self.held_gradients > 0,
            "learner.held_gradients",
            self.held_gradients,
            "at least 1 with learner.stream_turns = 'idle': a turn is differentiated into one",
            "Or set learner.stream_turns = 'never'.",
        )

    def _check_lengths(self) -> None:
        is_ladder = (
            bool(self.buckets)
            and list(self.buckets) == sorted(set(self.buckets))
            and self.buckets[0] >= 2
        )
        expected = "ascending lengths of at least 2"
        check(is_ladder, "learner.buckets", self.buckets, expected, "For instance (16, 32, 64).")
        check(
            self.pack_tokens == 0 or self.pack_tokens >= self.buckets[0],
            "learner.pack_tokens",
            self.pack_tokens,
            f"0 (packs nothing), or at least the shortest of learner.buckets = {self.buckets}",
        )
        most = max(self.buckets[-1], MAX_LANES * self.buckets[0])
        check(
            self.buckets[-1] <= self.tokens_per_step <= most,
            "learner.tokens_per_step",
            self.tokens_per_step,
            f"at least the longest bucket, {self.buckets[-1]} tokens, and at most {most}: "
            f"{MAX_LANES} trajectories of the shortest bucket a call",
        )
        check(
            list(self.prompt_buckets) == sorted(set(self.prompt_buckets))
            and min(self.prompt_buckets, default=1) >= 1
            and max(self.prompt_buckets, default=1) <= self.buckets[-1],
            "learner.prompt_buckets",
            self.prompt_buckets,
            f"ascending lengths from 1 to that of the longest bucket, {self.buckets[-1]}",
        )
        longest = max(self.prompt_buckets, default=self.min_shared_tokens)
        check(
            self.min_shared_tokens <= longest,
            "learner.min_shared_tokens",
            self.min_shared_tokens,
            f"at most the longest of learner.prompt_buckets, {longest}: else none is shared",
            "Lower it, or lengthen learner.prompt_buckets.",
        )
