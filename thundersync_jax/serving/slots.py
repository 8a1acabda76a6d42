"""`SlotTable`: which session holds which slot, and where its turn stands. Host logic only.

Invariants:
  * A session has at most one turn, and a slot while that runs. Afterwards the slot is idle: the
    next turn of the session begins in it at once, unless another turn has taken it.
  * Waiting turns take free slots, then the idle slot used least recently, whose row is stored; a
    stored row comes back with its session's next turn, and one that was lost is prefilled again.
  * They are served by (step, group) and then as they arrived: few groups are under way at a time.
    One that has waited for `patience_s` goes before, so that none starves.
  * The first session of a prompt prefills it, and is its source until it is closed. First turns
    with the same prompt wait for that, begin with a copy and run the last token alone. The copy is
    stored when the second session takes it: a prompt that is not shared costs nothing.
  * The first `num_cached` tokens of a session have valid K/V. An extension is never empty: the last
    token of a context is always run. A row that a closed session left is written again.
Called by the decode thread of `worker.py` alone, and by tests without a device.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.serving.decode_state import Piece, Sampled
from thundersync_jax.serving.request_check import check_request
from thundersync_jax.serving.rows import RowDevice, RowStore
from thundersync_jax.serving.sessions import MakeStream, Session, Turn, TurnState
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import FinishReason, SampleResult, ServingStatistics

# While turns wait, a generation ends once num_slots / ENDED_SHARE rows have.
ENDED_SHARE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """A turn that ended by itself."""

    turn: Turn
    result: SampleResult | ServingError


class SlotTable:
    """Sessions, slots, turns and stored rows of one decode batch."""

    def __init__(
        self,
        device: RowDevice,
        *,
        num_slots: int,
        row_length: int,
        vocab_size: int,
        extend_buckets: Sequence[int],
        parked_bytes: int,
        host_bytes: int,
        patience_s: float,
        make_stream: MakeStream | None = None,
    ) -> None:
        self._device = device
        self._num_slots = num_slots
        self._row_length = row_length
        self._vocab_size = vocab_size
        self._buckets = tuple(extend_buckets)
        self._patience_s = patience_s
        self._make_stream = make_stream
        self._store = RowStore(
            device, row_length=row_length, device_bytes=parked_bytes, host_bytes=host_bytes
        )
        self._sessions: dict[TrajectoryKey, Session] = {}
        self._free = list(range(num_slots - 1, -1, -1))  # the lowest slot is taken first
        self._idle: dict[int, Session] = {}  # by slot, the one used least recently first
        self._sources: dict[tuple[int, ...], Session] = {}  # by prompt
        self._waiting: list[Session] = []  # in order of arrival
        self._extending: list[Session] = []  # in order of their start
        self._generating: list[Session] = []
        self._full: list[Session] = []  # whose context leaves no room for a token
        self._counts = ServingStatistics(num_slots=num_slots)

    @property
    def open_sessions(self) -> tuple[TrajectoryKey, ...]:
        return tuple(self._sessions)

    def is_open(self, key: TrajectoryKey) -> bool:
        return key in self._sessions

    @property
    def has_work(self) -> bool:
        """Whether there is a turn: then one of them can make progress."""
        return bool(self._waiting or self._extending or self._generating or self._full)

    @property
    def generating_slots(self) -> list[int]:
        return [session.slot for session in self._generating]

    @property
    def until_ended(self) -> int:
        """After how many ended rows the next generation should stop."""
        return until_ended(self._num_slots, is_waiting=bool(self._waiting))

    @property
    def statistics(self) -> ServingStatistics:
        store = self._store
        return dataclasses.replace(
            self._counts,
            rows_to_host=store.num_to_host,
            rows_dropped=store.num_dropped,
            max_rows_stored=store.max_rows,
        )

    def count(self, **more: float) -> None:
        """Adds to fields of the statistics."""
        sums = {name: getattr(self._counts, name) + value for name, value in more.items()}
        self._counts = dataclasses.replace(self._counts, **sums)

    @property
    def num_decoding(self) -> int:
        """Turns that occupy the device."""
        return len(self._extending) + len(self._generating)

    def submit(self, turn: Turn, now_s: float) -> None:
        """Accepts a turn, or raises ServingError and leaves table and session as they were."""
        key, context_ids = turn.request.session, turn.request.context_ids
        session = self._sessions.get(key, Session(key=key, prompt_ids=context_ids))
        if session.turn is not None:
            raise ServingError(f"{key} already has a turn, which is {session.turn.state.value}")
        check_request(
            turn.request,
            session.token_ids,
            row_length=self._row_length,
            vocab_size=self._vocab_size,
            has_text=self._make_stream is not None,
        )
        turn.submitted_s = now_s
        session.turn = turn
        self._sessions[key] = session
        self.count(tokens_appended=len(context_ids) - len(session.token_ids))
        if len(context_ids) == self._row_length:
            self._full.append(session)
        elif session.slot >= 0:
            del self._idle[session.slot]
            self._begin(session, now_s)
        else:
            self._waiting.append(session)

    def close(self, key: TrajectoryKey) -> Turn | None:
        """Frees what the session holds; returns the turn that this ended. Ignores unknown keys."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        turn, session.turn = session.turn, None
        if turn is not None:
            for sessions in (self._waiting, self._extending, self._generating, self._full):
                if session in sessions:
                    sessions.remove(session)
            turn.move(TurnState.ENDED)
        if self._sources.get(session.prompt_ids) is session:
            if any(waiting.prompt_ids == session.prompt_ids for waiting in self._waiting):
                self._prompt_row(session.prompt_ids)
            del self._sources[session.prompt_ids]
        if session.slot >= 0:
            self._idle.pop(session.slot, None)
            self._free.append(session.slot)
        self._store.discard(key)
        return turn

    def forget_rows(self) -> None:
        """Drops what other weights have computed. No session may be open."""
        assert not self._sessions
        self._store.clear()

    def start_turns(self, now_s: float) -> list[Finished]:
        """Gives slots to waiting turns, and ends those whose row is full already."""
        full, self._full = self._full, []
        for session in full:
            session.running.started_s = now_s
        finished = [self._finish(session, now_s, FinishReason.CONTEXT) for session in full]
        if self._waiting and (self._free or self._idle):
            for session in sorted(self._waiting, key=lambda s: self._rank(s.running, now_s)):
                if not (self._free or self._idle):
                    break
                if not self._waits_for_prompt(session):
                    self._waiting.remove(session)
                    self._give_slot(session)
                    self._begin(session, now_s)
        return finished

    def next_pieces(self, max_pieces: int) -> list[Piece]:
        """Pieces for one extension call: the oldest turn's, and those that need no longer bucket.

        The caller runs them and then calls `extended`.
        """
        if not self._extending:
            return []
        limit = self._buckets[-1]
        counts = [min(len(s.context_ids) - s.num_cached, limit) for s in self._extending]
        longest = self._buckets[bisect.bisect_left(self._buckets, counts[0])]
        chosen = [s for s, n in zip(self._extending, counts, strict=True) if n <= longest]
        return [self._piece(session, longest) for session in chosen[:max_pieces]]

    def extended(self, pieces: Sequence[Piece]) -> None:
        """The pieces have been run: turns whose context is complete generate next."""
        by_slot = {session.slot: session for session in self._extending}
        for piece in pieces:
            session = by_slot[piece.slot]
            session.num_cached = piece.start + len(piece.token_ids)
            if piece.is_last:
                self._extending.remove(session)
                session.running.move(TurnState.GENERATING)
                self._generating.append(session)
        self.count(tokens_prefilled=sum(len(piece.token_ids) for piece in pieces))

    def record(self, sampled: Sampled, now_s: float) -> list[Finished]:
        """Adds what one generation sampled to the turns, and ends those that do not go on."""
        token_ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
        versions = sampled.policy_versions.tolist()
        counts = sampled.is_sampled.sum(axis=1).tolist()
        goes_on = (sampled.goes_on.sum(axis=1) == sampled.is_sampled.sum(axis=1)).tolist()
        finished: list[Finished] = []
        num_sampled = 0
        for session in tuple(self._generating):
            slot, turn = session.slot, session.running
            count, num_before = counts[slot], len(turn.token_ids)
            turn.token_ids += token_ids[slot][:count]
            turn.logprobs += logprobs[slot][:count]
            turn.policy_versions += versions[slot][:count]
            end = self._end_of(session, count, goes_on[slot])
            num_sampled += len(turn.token_ids) - num_before
            if isinstance(end, ServingError):
                self.close(session.key)
                finished.append(Finished(turn=turn, result=end))
            elif end is not None:
                self._generating.remove(session)
                self._idle[slot] = session
                finished.append(self._finish(session, now_s, end))
        num_steps = int(sampled.is_sampled.any(axis=0).sum())
        self.count(tokens_sampled=num_sampled, decode_steps=num_steps)
        return finished

    def _rank(self, turn: Turn, now_s: float) -> tuple[int, ...]:
        """The least goes first; the sort keeps the order of arrival."""
        if now_s - turn.submitted_s > self._patience_s:
            return (0,)
        key = turn.request.session
        return (1, key.step, key.group)

    def _begin(self, session: Session, now_s: float) -> None:
        session.running.started_s = now_s
        session.running.move(TurnState.EXTENDING)
        self._extending.append(session)

    def _waits_for_prompt(self, session: Session) -> bool:
        source = self._sources.get(session.prompt_ids)
        return source is not None and not session.token_ids and _is_prefilling(source)

    def _give_slot(self, session: Session) -> None:
        """Takes a slot for the session and puts into it what there is of its row."""
        own, prompt_ids = self._store.pop(session.key), session.prompt_ids
        # Before a slot is vacated: it may be the source's.
        prompt = self._prompt_row(prompt_ids) if own is None else None
        session.slot = self._free.pop() if self._free else self._vacate()
        if own is not None:
            self._device.put_row(own, session.slot)
            self.count(rows_resumed=1)
        elif prompt is not None:
            self._device.put_row(prompt, session.slot)
            session.num_cached = min(len(prompt_ids), len(session.context_ids) - 1)
            self.count(prompts_shared=1)
        else:
            session.num_cached = 0
            if len(prompt_ids) > self._buckets[0]:
                self._sources[prompt_ids] = session

    def _prompt_row(self, prompt_ids: tuple[int, ...]) -> KVCache | None:
        """A row that begins with the prompt; one of a slot is stored as the prompt's own."""
        stored = self._store.get(prompt_ids)
        source = self._sources.get(prompt_ids)
        if stored is not None or source is None:
            return stored
        if source.slot < 0:
            return self._store.get(source.key)
        if _is_prefilling(source):
            return None
        row = self._device.take_row(source.slot)
        self._store.put(prompt_ids, len(prompt_ids), lambda: row)
        return row

    def _vacate(self) -> int:
        """Stores the row of the idle slot that was used least recently."""
        slot = next(iter(self._idle))
        session = self._idle.pop(slot)
        session.slot = -1
        take = functools.partial(self._device.take_row, slot)
        self.count(rows_parked=self._store.put(session.key, session.num_cached, take))
        return slot

    def _piece(self, session: Session, longest: int) -> Piece:
        context_ids, begin = session.context_ids, session.num_cached
        end = min(begin + longest, len(context_ids))
        return Piece(
            slot=session.slot,
            start=begin,
            token_ids=context_ids[begin:end],
            is_last=end == len(context_ids),
            sampling=session.running.request.sampling,
        )

    def _end_of(
        self, session: Session, num_new: int, goes_on: bool
    ) -> FinishReason | ServingError | None:
        """Why the turn ends with its newest tokens, or None; cuts it at a stop string."""
        turn = session.running
        try:
            stream = self._make_stream
            is_cut = stream is not None and turn.cut_at_stop_string(num_new, stream)
        except (ValueError, LookupError, TypeError) as error:
            return ServingError(f"{session.key}: its tokens cannot be decoded: {error!r}")
        if is_cut or turn.token_ids[-1] in turn.request.sampling.stop_ids:
            return FinishReason.STOP
        if goes_on:
            return None
        is_full = len(session.context_ids) + len(turn.token_ids) == self._row_length
        return FinishReason.CONTEXT if is_full else FinishReason.LENGTH

    def _finish(self, session: Session, now_s: float, reason: FinishReason) -> Finished:
        turn = session.running
        self.count(turns_ended=1)
        return Finished(turn=turn, result=session.finish(now_s, reason))


def _is_prefilling(source: Session) -> bool:
    return source.num_cached < len(source.prompt_ids)


def until_ended(num_slots: int, *, is_waiting: bool) -> int:
    """How many rows must end for a generation to stop before its last step."""
    return max(1, num_slots // ENDED_SHARE) if is_waiting else num_slots
