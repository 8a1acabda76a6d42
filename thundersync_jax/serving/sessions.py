"""`Session` and `Turn`: what one trajectory has asked for, what it got, and when a turn ends.

A turn moves as `_NEXT_STATES` says; it may end from any state. `Session.token_ids` are all tokens
of the trajectory so far. Host logic only; called by `slots.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.messages import (
    FinishReason,
    SampleRequest,
    SampleResult,
)
from thundersync_jax.transport.text_stream import TextStream

MakeStream = Callable[[], TextStream]


class TurnState(enum.Enum):
    HELD = "waiting for new weights"
    WAITING = "waiting for a slot"
    EXTENDING = "extending its row"
    GENERATING = "generating"
    ENDED = "ended"


_NEXT_STATES = {
    TurnState.HELD: {TurnState.WAITING, TurnState.ENDED},
    TurnState.WAITING: {TurnState.HELD, TurnState.EXTENDING, TurnState.ENDED},
    TurnState.EXTENDING: {TurnState.GENERATING, TurnState.ENDED},
    TurnState.GENERATING: {TurnState.ENDED},
    TurnState.ENDED: set[TurnState](),
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """One request on its way. `started_s` is when it had a slot and began to be served."""

    request: SampleRequest
    state: TurnState = TurnState.WAITING
    submitted_s: float = 0.0
    started_s: float = 0.0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    policy_versions: list[int] = dataclasses.field(default_factory=list)
    _stream: TextStream | None = None
    _tail: str = ""  # of its text: what may begin a stop string

    def move(self, state: TurnState) -> None:
        if state not in _NEXT_STATES[self.state]:
            raise AssertionError(f"a turn cannot go from {self.state.name} to {state.name}")
        self.state = state

    def cut_at_stop_string(self, num_new: int, make_stream: MakeStream) -> bool:
        """Ends with the token that completes a stop string, if one of the last `num_new` does."""
        stops = self.request.sampling.stop_strings
        if not stops:
            return False
        self._stream = self._stream or make_stream()
        total, num_kept = len(self.token_ids), max(map(len, stops)) - 1
        for end in range(total - num_new + 1, total + 1):
            text = self._tail + self._stream.push(self.token_ids[end - 1 : end])
            if any(stop in text for stop in stops):
                for values in (self.token_ids, self.logprobs, self.policy_versions):
                    del values[end:]
                return True
            self._tail = text[len(text) - min(num_kept, len(text)) :]
        return False


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """One trajectory.

    Attributes:
      prompt_ids: the context of its first turn.
      token_ids: of the trajectory so far, without those of a turn that has not ended.
      slot: -1 while it holds none.
      num_cached: tokens whose keys and values are valid in its slot, or in the stored row of its
        name; without either it is what the row had.
    """

    key: TrajectoryKey
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    slot: int = -1
    num_cached: int = 0
    turn: Turn | None = None

    @property
    def running(self) -> Turn:
        """The turn, which there must be."""
        assert self.turn is not None
        return self.turn

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Of the running turn."""
        return self.running.request.context_ids

    def finish(self, now_s: float, reason: FinishReason) -> SampleResult:
        """Ends the turn with what it has sampled."""
        turn = self.running
        turn.move(TurnState.ENDED)
        self.turn = None
        self.token_ids = turn.request.context_ids + tuple(turn.token_ids)
        if turn.token_ids:
            # The last token was not run through the model, or its entry is written again.
            self.num_cached = len(self.token_ids) - 1
        return SampleResult(
            token_ids=tuple(turn.token_ids),
            logprobs=tuple(turn.logprobs),
            policy_versions=tuple(turn.policy_versions),
            finish_reason=reason,
            slot=self.slot,
            started_s=turn.started_s,
            ended_s=now_s,
        )
