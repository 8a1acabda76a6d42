"""`SlotTable`: which session holds which row, and where its turn stands. Host logic only.

Invariants:
  * A session keeps one slot from its first turn until it is closed; a slot belongs to one session.
  * A session has at most one turn. First turns without a slot wait in order of arrival.
  * A turn moves WAITING -> EXTENDING -> GENERATING -> ENDED; it may end from any state.
  * `Session.token_ids` are all tokens of the trajectory so far; the first `num_cached` have valid
    K/V. A row that a closed session left live is overwritten when its slot is given again.
Called by the decode thread of `worker.py` alone, and by tests without a device.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from thundersync_jax.serving.decode_state import MAX_STOP_IDS, Piece, Sampled
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import (
    FinishReason,
    SampleRequest,
    SampleResult,
    SamplingParams,
)


class TurnState(enum.Enum):
    WAITING = "waiting for a slot"
    EXTENDING = "extending its row"
    GENERATING = "generating"
    ENDED = "ended"


_NEXT_STATES = {
    TurnState.WAITING: {TurnState.EXTENDING, TurnState.ENDED},
    TurnState.EXTENDING: {TurnState.GENERATING, TurnState.ENDED},
    TurnState.GENERATING: {TurnState.ENDED},
    TurnState.ENDED: set[TurnState](),
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Turn:
    """One request on its way. `started_s` is when it had a slot and began to be served."""

    request: SampleRequest
    state: TurnState = TurnState.WAITING
    started_s: float = 0.0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    policy_versions: list[int] = dataclasses.field(default_factory=list)

    def move(self, state: TurnState) -> None:
        if state not in _NEXT_STATES[self.state]:
            raise AssertionError(f"a turn cannot go from {self.state.name} to {state.name}")
        self.state = state


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """One trajectory. `slot` is -1 until its first turn is given one."""

    slot: int = -1
    token_ids: tuple[int, ...] = ()
    num_cached: int = 0
    turn: Turn | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A turn that ended with a result."""

    turn: Turn
    result: SampleResult


class SlotTable:
    """Sessions, slots and turns of one decode batch."""

    def __init__(self, *, num_slots: int, row_length: int, vocab_size: int) -> None:
        self._row_length = row_length
        self._vocab_size = vocab_size
        self._sessions: dict[TrajectoryKey, Session] = {}
        self._waiting: collections.deque[Session] = collections.deque()
        self._free = list(range(num_slots - 1, -1, -1))  # the lowest slot is taken first
        self._extending: list[Session] = []
        self._generating: list[Session] = []

    @property
    def open_sessions(self) -> tuple[TrajectoryKey, ...]:
        return tuple(self._sessions)

    @property
    def has_work(self) -> bool:
        """Whether `start_turns`, an extension or a generation could make progress now."""
        return bool(self._extending or self._generating or (self._waiting and self._free))

    @property
    def is_generating(self) -> bool:
        return bool(self._generating)

    @property
    def num_decoding(self) -> int:
        """Turns that occupy the device."""
        return len(self._extending) + len(self._generating)

    def submit(self, turn: Turn, now_s: float) -> None:
        """Accepts a turn, or raises ServingError and leaves table and session as they were."""
        key, asked = turn.request.session, turn.request.context_ids
        session = self._sessions.get(key, Session())
        if session.turn is not None:
            raise ServingError(f"{key} already has a turn, which is {session.turn.state.value}")
        _check_sampling(key, turn.request.sampling)
        known = session.token_ids
        if asked[: len(known)] != known:
            raise ServingError(
                f"{key}: context_ids differ from the {len(known)} tokens its row holds at "
                f"index {_first_difference(asked, known)}; a turn may only append. Release the "
                "session to start over"
            )
        if not 0 < len(asked) <= self._row_length:
            raise ServingError(
                f"{key}: a context of {len(asked)} tokens; a row holds 1 to {self._row_length} "
                "(model.max_context)"
            )
        new = asked[len(known) :]
        if new and not 0 <= min(new) <= max(new) < self._vocab_size:
            raise ServingError(
                f"{key}: token ids from {min(new)} to {max(new)} are outside the vocabulary of "
                f"{self._vocab_size}"
            )
        session.turn = turn
        self._sessions[key] = session
        if session.slot < 0:
            self._waiting.append(session)
        else:
            self._begin(session, now_s)

    def close(self, key: TrajectoryKey) -> Turn | None:
        """Frees the session's slot; returns the turn that this ended. Ignores unknown keys."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        turn, session.turn = session.turn, None
        if turn is not None:
            for sessions in (self._waiting, self._extending, self._generating):
                if session in sessions:
                    sessions.remove(session)
            turn.move(TurnState.ENDED)
        if session.slot >= 0:
            self._free.append(session.slot)
        return turn

    def start_turns(self, now_s: float) -> list[Finished]:
        """Gives free slots to waiting turns, and ends turns whose row is full already."""
        while self._waiting and self._free:
            session = self._waiting.popleft()
            session.slot = self._free.pop()
            self._begin(session, now_s)
        full = [s for s in self._extending if len(_request(s).context_ids) == self._row_length]
        self._extending = [s for s in self._extending if s not in full] if full else self._extending
        return [self._finish(session, now_s) for session in full]

    def take_pieces(self, longest: int) -> list[Piece]:
        """The next piece of every turn that extends. The caller runs them before it generates."""
        pieces = []
        for session in self._extending:
            request = _request(session)
            begin = session.num_cached
            end = min(begin + longest, len(request.context_ids))
            session.num_cached = end
            pieces.append(
                Piece(
                    slot=session.slot,
                    start=begin,
                    token_ids=request.context_ids[begin:end],
                    is_last=end == len(request.context_ids),
                    sampling=request.sampling,
                )
            )
        self._begin_generating()
        return pieces

    def record(self, sampled: Sampled, now_s: float) -> list[Finished]:
        """Adds what one `generate` sampled to the turns, and ends those that do not go on."""
        token_ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        versions = sampled.policy_versions.tolist()
        counts = sampled.is_sampled.sum(axis=1).tolist()
        goes_on = (sampled.goes_on.sum(axis=1) == sampled.is_sampled.sum(axis=1)).tolist()
        finished, remaining = [], []
        for session in self._generating:
            slot, turn = session.slot, _turn(session)
            count = counts[slot]
            turn.token_ids += token_ids[slot][:count]
            turn.logprobs += logprobs[slot][:count]
            turn.policy_versions += versions[slot][:count]
            if goes_on[slot]:
                remaining.append(session)
            else:
                finished.append(self._finish(session, now_s))
        self._generating = remaining
        return finished

    def _begin(self, session: Session, now_s: float) -> None:
        turn = _turn(session)
        turn.started_s = now_s
        turn.move(TurnState.EXTENDING)
        self._extending.append(session)

    def _begin_generating(self) -> None:
        remaining = []
        for session in self._extending:
            turn = _turn(session)
            if session.num_cached == len(turn.request.context_ids):
                turn.move(TurnState.GENERATING)
                self._generating.append(session)
            else:
                remaining.append(session)
        self._extending = remaining

    def _finish(self, session: Session, now_s: float) -> Finished:
        turn = _turn(session)
        turn.move(TurnState.ENDED)
        session.turn = None
        context_ids = turn.request.context_ids
        session.token_ids = context_ids + tuple(turn.token_ids)
        if turn.token_ids:
            # The last token was not run through the model.
            session.num_cached = len(session.token_ids) - 1
        if turn.token_ids and turn.token_ids[-1] in turn.request.sampling.stop_ids:
            reason = FinishReason.STOP
        elif len(session.token_ids) == self._row_length:
            reason = FinishReason.CONTEXT
        else:
            reason = FinishReason.LENGTH
        result = SampleResult(
            token_ids=tuple(turn.token_ids),
            logprobs=tuple(turn.logprobs),
            policy_versions=tuple(turn.policy_versions),
            finish_reason=reason,
            slot=session.slot,
            started_s=turn.started_s,
            ended_s=now_s,
        )
        return Finished(turn=turn, result=result)


def _turn(session: Session) -> Turn:
    assert session.turn is not None
    return session.turn


def _request(session: Session) -> SampleRequest:
    return _turn(session).request


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _check_sampling(key: TrajectoryKey, sampling: SamplingParams) -> None:
    is_possible = (
        sampling.max_tokens >= 1
        and sampling.temperature >= 0
        and sampling.top_k >= 0
        and 0 < sampling.top_p <= 1
        and len(sampling.stop_ids) <= MAX_STOP_IDS
    )
    if not is_possible:
        raise ServingError(
            f"{key}: {sampling} cannot be served: expected max_tokens >= 1, temperature >= 0, "
            f"top_k >= 0, 0 < top_p <= 1 and at most {MAX_STOP_IDS} stop_ids"
        )
