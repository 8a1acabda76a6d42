"""`ScoreTable`: which session's tokens have been scored, and which sessions hold a row. Host logic.

Invariants:
  * A session has at most one request. Requests that need a row and have none wait in order of
    arrival; a row is taken from the session without a request that was used least recently.
  * A request moves WAITING -> RUNNING -> ENDED; new weights move it back to WAITING.
  * `Session.token_ids[:num_cached]` are in its row, and `logprobs[i]` is that of token_ids[i + 1].
    A token is run to score the one after it, so the last of a context is not run yet: whatever
    follows is scored by running it then.
  * What was scored stays when the row is lost: then the tokens are run again, for their keys and
    values only.
Called by the thread of `scorer.py` alone, and by tests without a device.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from thundersync_jax.serving.request_check import check_context
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import ScoreRequest, ScoreResult


class ScoringState(enum.Enum):
    WAITING = "waiting for a row"
    RUNNING = "running its tokens"
    ENDED = "ended"


_NEXT_STATES = {
    ScoringState.WAITING: {ScoringState.RUNNING, ScoringState.ENDED},
    ScoringState.RUNNING: {ScoringState.WAITING, ScoringState.ENDED},
    ScoringState.ENDED: set[ScoringState](),
}


@dataclasses.dataclass(kw_only=True, eq=False)
class Scoring:
    """One request on its way. `started_s` is when it was accepted."""

    request: ScoreRequest
    state: ScoringState = ScoringState.WAITING
    started_s: float = 0.0
    num_run: int = 0

    def move(self, state: ScoringState) -> None:
        if state not in _NEXT_STATES[self.state]:
            raise AssertionError(f"a scoring cannot go from {self.state.name} to {state.name}")
        self.state = state


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """One trajectory. `row` is -1 while it holds none."""

    token_ids: tuple[int, ...] = ()
    logprobs: list[float] = dataclasses.field(default_factory=list)
    row: int = -1
    num_cached: int = 0
    scoring: Scoring | None = None

    @property
    def is_scored(self) -> bool:
        return len(self.logprobs) == len(self.token_ids) - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScorePiece:
    """Consecutive tokens of one session to run; `targets[i]` is the token after `token_ids[i]`."""

    session: Session
    start: int
    token_ids: Sequence[int]
    targets: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A request that ended with a result."""

    scoring: Scoring
    result: ScoreResult


class ScoreTable:
    """Sessions, rows and requests of one scorer."""

    def __init__(self, *, num_rows: int, row_length: int, vocab_size: int) -> None:
        self._num_rows = num_rows
        self._row_length = row_length
        self._vocab_size = vocab_size
        self._sessions: dict[TrajectoryKey, Session] = {}
        self._free = list(range(num_rows - 1, -1, -1))  # the lowest row is taken first
        self._active: list[Session] = []  # with a request, in order of arrival
        self._idle: list[Session] = []  # with a row and no request, least recently used first

    @property
    def has_work(self) -> bool:
        return bool(self._active)

    def submit(self, scoring: Scoring, now_s: float) -> None:
        """Accepts a request, or raises ServingError and leaves its session as it was."""
        request = scoring.request
        session = self._sessions.get(request.session, Session())
        if session.scoring is not None:
            raise ServingError(
                f"{request.session} already has a request, which is {session.scoring.state.value}"
            )
        self._check(request, session.token_ids)
        self._sessions[request.session] = session
        session.token_ids, session.scoring = request.context_ids, scoring
        scoring.started_s = now_s
        if session in self._idle:
            self._idle.remove(session)
            scoring.move(ScoringState.RUNNING)
        self._active.append(session)

    def close(self, key: TrajectoryKey) -> Scoring | None:
        """Forgets a session; returns the request that this ended. Ignores unknown keys."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        for sessions in (self._active, self._idle):
            if session in sessions:
                sessions.remove(session)
        if session.row >= 0:
            self._free.append(session.row)
        scoring, session.scoring = session.scoring, None
        if scoring is not None:
            scoring.move(ScoringState.ENDED)
        return scoring

    def forget(self) -> None:
        """New weights: what was run or scored with others is run again when it is asked for."""
        for session in self._sessions.values():
            session.logprobs, session.num_cached, session.row = [], 0, -1
            if session.scoring is not None and session.scoring.state is ScoringState.RUNNING:
                session.scoring.move(ScoringState.WAITING)
        self._idle.clear()
        self._free = list(range(self._num_rows - 1, -1, -1))

    def take_pieces(self, longest: int) -> list[ScorePiece]:
        """The next piece of every request that has a row; `record` follows for each."""
        self._give_rows()
        pieces = []
        for session in self._active:
            if session.row < 0 or session.is_scored:
                continue
            start = session.num_cached
            end = min(start + longest, len(session.token_ids) - 1)
            piece = ScorePiece(
                session=session,
                start=start,
                token_ids=session.token_ids[start:end],
                targets=session.token_ids[start + 1 : end + 1],
            )
            pieces.append(piece)
        return pieces

    def record(self, piece: ScorePiece, logprobs: Sequence[float]) -> None:
        """Adds what a piece scored; of tokens that were scored before, the first answer stays."""
        session, count = piece.session, len(piece.token_ids)
        session.num_cached += count
        session.logprobs += logprobs[len(session.logprobs) - piece.start : count]
        if session.scoring is not None:
            session.scoring.num_run += count

    def finish(self, policy_version: int, now_s: float) -> list[Scored]:
        """Ends the requests whose tokens are all scored; their rows are idle from now on."""
        ended = [session for session in self._active if session.is_scored]
        self._active = [session for session in self._active if not session.is_scored]
        scored = []
        for session in ended:
            scoring = session.scoring
            assert scoring is not None
            scoring.move(ScoringState.ENDED)
            session.scoring = None
            if session.row >= 0:
                self._idle.append(session)
            result = ScoreResult(
                logprobs=tuple(session.logprobs[scoring.request.first - 1 :]),
                policy_version=policy_version,
                num_run=scoring.num_run,
                started_s=scoring.started_s,
                ended_s=now_s,
            )
            scored.append(Scored(scoring=scoring, result=result))
        self._give_rows()  # before the sessions that just ended can ask again
        return scored

    def _give_rows(self) -> None:
        for session in self._active:
            if session.row >= 0 or session.is_scored:
                continue
            if not self._free:
                if not self._idle:
                    return
                evicted = self._idle.pop(0)
                self._free.append(evicted.row)
                evicted.row, evicted.num_cached = -1, 0
            session.row = self._free.pop()
            assert session.scoring is not None
            session.scoring.move(ScoringState.RUNNING)

    def _check(self, request: ScoreRequest, known: tuple[int, ...]) -> None:
        key, asked, first = request.session, request.context_ids, request.first
        check_context(
            key, asked, known, row_length=self._row_length, vocab_size=self._vocab_size, least=2
        )
        if not 1 <= first < len(asked):
            raise ServingError(
                f"{key}: first = {first} in a context of {len(asked)} tokens; expected 1 to "
                f"{len(asked) - 1}: nothing precedes token 0"
            )
