"""A trajectory as it arrives by turns, cut into the segments that `turn_replay.py` differentiates.

Invariants:
  * A segment is a range of *input* positions. It ends one token before the last action token of its
    turn: that token is an input of the next segment only, so every target is predicted once. A turn
    without action tokens opens no segment; the next one begins with its tokens.
  * The segments of a trajectory are consecutive and begin with the prompt.
  * What follows the last scored target carries no gradient and is never run.
  * `_TRANSITIONS` is the only table of what a segment goes through.

No jax: `turn_schedule.py` picks the next call from these records, the distiller runs it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from thundersync_jax.learner.buckets import Example
from thundersync_jax.losses.opd import distillation_weights
from thundersync_jax.trajectory import ScoredTurn


class SegmentStage(enum.Enum):
    WAITING = "not run"
    FORWARDED = "its keys and values are in the cache"
    STREAMED = "its score is in the batch sum too; its ledger grows"
    DONE = "differentiated with everything that depends on it"


_TRANSITIONS = {
    SegmentStage.WAITING: {SegmentStage.FORWARDED, SegmentStage.STREAMED, SegmentStage.DONE},
    SegmentStage.FORWARDED: {SegmentStage.DONE},
    SegmentStage.STREAMED: {SegmentStage.DONE},
    SegmentStage.DONE: set[SegmentStage](),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualPlace:
    """Where the residuals of a segment lie: (prefix bucket, bucket), and which of that shape."""

    replica: int
    shape: tuple[int, int]
    index: int


@dataclasses.dataclass(eq=False, kw_only=True)
class Segment:
    """One range of input positions; its first is `example.prefix_length`.

    Attributes:
      is_scored: some target of it has a weight.
      residuals: from its run to its replay, where they are kept.
    """

    example: Example
    is_scored: bool
    residuals: ResidualPlace | None = None
    stage: SegmentStage = SegmentStage.WAITING

    def advance(self, stage: SegmentStage) -> None:
        if stage not in _TRANSITIONS[self.stage]:
            raise AssertionError(f"a segment cannot go from {self.stage.name} to {stage.name}")
        self.stage = stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlace:
    """Where a trajectory's keys, values and ledger lie."""

    replica: int
    index: int


# (turn, action mask of the turns before it) -> weights of its tokens; 0 trains on none of them.
Weigh = Callable[[ScoredTurn, np.ndarray], np.ndarray]


def taught(turn: ScoredTurn, mask_before: np.ndarray) -> np.ndarray:
    """The weights of distillation; a turn without scores teaches nothing."""
    tokens = turn.tokens
    if turn.teacher_logprobs is None:
        return np.zeros(tokens.num_tokens)
    return distillation_weights(tokens.action_mask, turn.teacher_logprobs, tokens.behavior_logprobs)


class TurnSequence:
    """One trajectory while its turns arrive.

    Args:
      weigh: the weights of a turn's tokens, known with the turn.

    Attributes:
      name: for messages.
      segments: in order; only the last may have no scored target after it.
      num_scored_tokens: action tokens that the teacher scored.
      is_closed: no turn follows.
      is_done: closed, and its whole gradient is in the batch sum.
      cache: while its turns stream.
      buffer: index, among those that turns reach on its replica, of the sum for its gradient.
    """

    def __init__(self, name: str, prompt_ids: np.ndarray, weigh: Weigh = taught) -> None:
        self.name = name
        self._weigh = weigh
        self.segments: list[Segment] = []
        self.num_scored_tokens = 0
        self.is_closed = False
        self.is_done = False
        self.cache: CachePlace | None = None
        self.buffer = 0
        self._num_prompt = int(prompt_ids.shape[0])
        self._ids = prompt_ids.astype(np.int32)
        self._mask = np.zeros(0, np.bool_)
        self._weights = np.zeros(self._num_prompt)
        self._logprobs = np.zeros(self._num_prompt, np.float32)

    @property
    def token_ids(self) -> np.ndarray:
        """What followed the prompt, int32 [T]."""
        return self._ids[self._num_prompt :]

    @property
    def weights(self) -> np.ndarray:
        """Of `token_ids`, float64 [T]."""
        return self._weights[self._num_prompt :]

    @property
    def num_tokens(self) -> int:
        """Of prompt and turns."""
        return int(self._ids.shape[0])

    @property
    def teacher_kl(self) -> float:
        """Sum over scored tokens of log b - log q, the estimate of KL(policy | teacher)."""
        return -float(np.sum(self._weights))

    def add(self, turn: ScoredTurn) -> None:
        """Appends a turn."""
        tokens, mask = turn.tokens, turn.tokens.action_mask
        weights = self._weigh(turn, self._mask)
        if turn.teacher_logprobs is not None:
            self.num_scored_tokens += tokens.num_action_tokens
        self._mask = np.concatenate([self._mask, mask])
        num_before = self._ids.shape[0]
        self._ids = np.concatenate([self._ids, tokens.token_ids])
        self._weights = np.concatenate([self._weights, weights])
        self._logprobs = np.concatenate([self._logprobs, tokens.behavior_logprobs])
        actions = np.flatnonzero(mask)
        if actions.size:
            self._cut(num_before + int(actions[-1]))

    def to_run(self) -> list[Segment]:
        """The segments up to the last scored one: all that a gradient depends on."""
        scored = [at for at, segment in enumerate(self.segments) if segment.is_scored]
        return self.segments[: scored[-1] + 1] if scored else []

    def whole(self) -> Example:
        """The segments to run as one."""
        last = self.to_run()[-1].example
        return self._example(0, last.prefix_length + last.num_positions)

    def _cut(self, end: int) -> None:
        """A segment from the end of the one before up to the input before position `end`."""
        begin = 0
        if self.segments:
            last = self.segments[-1].example
            begin = last.prefix_length + last.num_positions
        example = self._example(begin, end)
        self.segments.append(Segment(example=example, is_scored=bool(np.any(example.weights))))

    def _example(self, begin: int, end: int) -> Example:
        targets = slice(begin + 1, end + 1)
        return Example(
            tokens=self._ids[begin:end],
            targets=self._ids[targets],
            weights=self._weights[targets],
            behavior_logprobs=self._logprobs[targets],
            prefix_length=begin,
        )
