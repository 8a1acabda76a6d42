"""What streaming turns costs beyond one forward and one backward pass of every segment."""

from __future__ import annotations

from thundersync_jax.learner.turn_schedule import SegmentKind, SegmentLane
from thundersync_jax.model.presets import TransformerConfig

BACKWARD_PASSES = 2  # a backward pass in forward passes: a product for each of two operands


class ReplayCount:
    """Of one step.

    Attributes:
      num_tokens: positions that ran in calls which are there only because turns stream.
      num_flops: of these calls' matrix products, less what the segment would have cost anyway, by
        `TransformerConfig.forward_flops`: without padding and rematerialization.
    """

    def __init__(self, model: TransformerConfig) -> None:
        self._model = model
        self.num_tokens = 0
        self.num_flops = 0

    def add(self, kind: SegmentKind, lane: SegmentLane) -> None:
        """Counts a lane that was run."""
        segment, example = lane.segment, lane.example
        if kind not in (SegmentKind.FORWARD, SegmentKind.REPLAY, SegmentKind.REPLAY_KEPT):
            return
        assert segment is not None
        self.num_tokens += example.num_positions
        passes = 1 if kind is SegmentKind.FORWARD else 0
        if kind is not SegmentKind.FORWARD and segment.is_scored:  # it ran with its score before
            passes = 1 + BACKWARD_PASSES
        if kind is SegmentKind.REPLAY_KEPT:
            passes -= 1
        flops = self._model.forward_flops(example.num_positions, example.prefix_length)
        self.num_flops += passes * flops
