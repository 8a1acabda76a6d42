"""In any order of turns, cancellations and device calls, a turn's tokens follow from its context.

The device is a fake whose next token is a hand-computable function of what its row holds, so a
wrong piece, a stale entry, a row given to two sessions, or a row restored from the wrong place
changes a result. Rows go through device and host memory of every size, none included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from thundersync_jax.serving.decode_state import Piece, Sampled
from thundersync_jax.serving.sessions import Turn
from thundersync_jax.serving.slots import Finished, SlotTable
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import FinishReason, SampleRequest, SamplingParams
from thundersync_jax.transport.text_stream import TextStream

NUM_SLOTS, ROW_LENGTH, VOCAB, STEPS, STOP = 3, 12, 10, 2, 3
BUCKETS = (2, 5)
ROW_BYTES = 2 * ROW_LENGTH
KEYS = [TrajectoryKey(step=0, group=i // 3, index=i) for i in range(7)]


def next_token(row: tuple[int, ...]) -> int:
    return (7 * sum(row) + len(row)) % VOCAB


def expected_turn(
    context: tuple[int, ...], max_tokens: int, stop_strings: tuple[str, ...] = ()
) -> tuple[tuple[int, ...], FinishReason]:
    tokens: tuple[int, ...] = ()
    while len(context + tokens) < ROW_LENGTH and len(tokens) < max_tokens:
        tokens += (next_token(context + tokens),)
        if tokens[-1] == STOP or any(stop in digits(tokens) for stop in stop_strings):
            return tokens, FinishReason.STOP
    is_full = len(context + tokens) == ROW_LENGTH
    return tokens, FinishReason.CONTEXT if is_full else FinishReason.LENGTH


def digits(token_ids: tuple[int, ...]) -> str:
    return "".join(str(token) for token in token_ids)


class FakeDevice:
    """Rows of tokens with the rules of `decode_state`: pieces are placed, live rows sample."""

    token_bytes = 2

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = [()] * NUM_SLOTS
        self.budget: dict[int, int] = {}  # live slot -> tokens left
        self.num_run = 0
        self.num_taken = 0
        self.pieces: list[list[Piece]] = []

    def extend(self, pieces: list[Piece]) -> None:
        assert len({piece.slot for piece in pieces}) == len(pieces)
        for piece in pieces:
            row = self.rows[piece.slot]
            assert piece.start <= len(row), "an entry that was never written is read"
            self.rows[piece.slot] = row[: piece.start] + tuple(piece.token_ids)
            self.budget.pop(piece.slot, None)
            self.num_run += len(piece.token_ids)
            if piece.is_last:
                self.budget[piece.slot] = piece.sampling.max_tokens
        self.pieces.append(pieces)

    def take_row(self, slot: int) -> tuple[int, ...]:
        self.num_taken += 1
        return self.rows[slot]

    def put_row(self, row: tuple[int, ...], slot: int) -> None:
        self.rows[slot] = row

    def row_to_host(self, row: tuple[int, ...], length: int) -> tuple[int, ...]:
        assert length <= len(row)
        return row[:length]

    def generate(self, slots: list[int], until_ended: int) -> Sampled:
        self.budget = {slot: left for slot, left in self.budget.items() if slot in slots}
        assert set(self.budget) == set(slots), "a turn generates in a row that is not live"
        tokens = np.zeros((NUM_SLOTS, STEPS), np.int32)
        is_sampled, goes_on = np.zeros((2, NUM_SLOTS, STEPS), bool)
        for step in range(STEPS):
            if len(slots) - len(self.budget) >= until_ended:
                break
            for slot in list(self.budget):
                token = next_token(self.rows[slot])
                tokens[slot, step], is_sampled[slot, step] = token, True
                self.budget[slot] -= 1
                is_full = len(self.rows[slot]) + 1 == ROW_LENGTH
                if token == STOP or self.budget[slot] == 0 or is_full:
                    del self.budget[slot]
                    continue
                goes_on[slot, step] = True
                self.rows[slot] += (token,)
        return Sampled(
            token_ids=tokens,
            logprobs=-tokens.astype(np.float32),
            policy_versions=np.full_like(tokens, 4),
            is_sampled=is_sampled,
            goes_on=goes_on,
        )


def make_table(
    device: FakeDevice,
    *,
    device_rows: int = 9,
    host_tokens: int = 999,
    patience_s: float = 1e9,
    decode: Callable[[Sequence[int]], str] | None = digits,
) -> SlotTable:
    return SlotTable(
        device,
        num_slots=NUM_SLOTS,
        row_length=ROW_LENGTH,
        vocab_size=VOCAB,
        extend_buckets=BUCKETS,
        parked_bytes=device_rows * ROW_BYTES,
        host_bytes=host_tokens * device.token_bytes,
        patience_s=patience_s,
        make_stream=None if decode is None else lambda: TextStream(decode),
    )


def run_once(
    table: SlotTable, device: FakeDevice, now_s: float = 0.0, num_rows: int = 2
) -> list[Finished]:
    """One turn of the decode thread's loop."""
    finished = table.start_turns(now_s)
    if pieces := table.next_pieces(num_rows):
        assert len(pieces) <= num_rows
        assert all(1 <= len(piece.token_ids) <= BUCKETS[-1] for piece in pieces)
        device.extend(pieces)
        table.extended(pieces)
    if slots := table.generating_slots:
        finished += table.record(device.generate(slots, table.until_ended), now_s)
    return finished


def run_all(table: SlotTable, device: FakeDevice) -> list[Finished]:
    finished = []
    while table.has_work:
        finished += run_once(table, device)
    return finished


class SlotMachine(RuleBasedStateMachine):
    @initialize(device_rows=st.integers(0, 3), host_tokens=st.sampled_from([0, 4, 15, 60]))
    def open(self, device_rows: int, host_tokens: int) -> None:
        self.device = FakeDevice()
        self.table = make_table(self.device, device_rows=device_rows, host_tokens=host_tokens)
        self.max_device_bytes = device_rows * ROW_BYTES
        self.max_host_bytes = host_tokens * self.device.token_bytes
        self.known: dict[TrajectoryKey, tuple[int, ...]] = {}  # open sessions
        self.running: list[Turn] = []  # in order of submission
        self.now = 0.0

    @rule(
        key=st.sampled_from(KEYS),
        observation=st.lists(st.integers(0, 2), max_size=5),
        max_tokens=st.integers(1, 5),
        stop=st.sampled_from([(), ("5",), ("71", "09")]),
    )
    def submit(
        self, key: TrajectoryKey, observation: list[int], max_tokens: int, stop: tuple[str, ...]
    ) -> None:
        context = self.known.get(key, ()) + tuple(observation)
        turn = make_turn(key, context, max_tokens, stop)
        is_busy = any(t.request.session == key for t in self.running)
        if is_busy or not 0 < len(context) <= ROW_LENGTH:
            with pytest.raises(ServingError, match="step 0 group"):
                self.table.submit(turn, self.now)
            return
        self.table.submit(turn, self.now)
        self.known.setdefault(key, ())
        self.running.append(turn)

    @rule(key=st.sampled_from(KEYS))
    def close(self, key: TrajectoryKey) -> None:
        ended = self.table.close(key)
        want = [turn for turn in self.running if turn.request.session == key]
        assert [turn for turn in [ended] if turn is not None] == want
        self.running = [turn for turn in self.running if turn not in want]
        self.known.pop(key, None)

    @rule(num_rows=st.integers(1, 3))
    def run_once(self, num_rows: int) -> None:
        self.now += 1
        for end in run_once(self.table, self.device, self.now, num_rows):
            asked, result = end.turn.request, end.result
            want = expected_turn(
                asked.context_ids, asked.sampling.max_tokens, asked.sampling.stop_strings
            )
            assert (result.token_ids, result.finish_reason) == want
            assert result.logprobs == tuple(-float(t) for t in result.token_ids)
            assert result.policy_versions == (4,) * len(result.token_ids)
            assert 0 <= end.turn.started_s <= result.ended_s == self.now
            self.known[asked.session] = asked.context_ids + result.token_ids
            self.running.remove(end.turn)

    @precondition(lambda self: self.running)
    @rule()
    def run_to_the_end(self) -> None:
        """Every turn ends by itself, whoever keeps a session open."""
        for _ in range(200):
            if not self.running:
                return
            assert self.table.has_work
            self.run_once(2)
        raise AssertionError(f"turns never ended: {self.running}")

    @precondition(lambda self: not self.known)
    @rule()
    def publish(self) -> None:
        self.table.forget_rows()
        assert self.table._store.device_bytes == self.table._store.host_bytes == 0

    @invariant()
    def nothing_is_held_twice_and_no_budget_is_exceeded(self) -> None:
        table = self.table
        assert set(table.open_sessions) == set(self.known)
        held = [s.slot for s in table._sessions.values() if s.slot >= 0]
        assert sorted(held + table._free) == list(range(NUM_SLOTS))
        assert set(table._idle) == {
            s.slot for s in table._sessions.values() if s.slot >= 0 and s.turn is None
        } | {s.slot for s in table._full if s.slot >= 0}
        assert table._store.device_bytes <= self.max_device_bytes
        assert table._store.host_bytes <= self.max_host_bytes
        stored = {n for n in (*table._store._on_device, *table._store._on_host)}
        assert not {s.key for s in table._sessions.values() if s.slot >= 0} & stored
        assert {n for n in stored if isinstance(n, TrajectoryKey)} <= set(self.known)
        counts = table.statistics
        assert counts.tokens_prefilled == self.device.num_run
        assert counts.rows_resumed <= counts.rows_parked


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def make_turn(
    key: TrajectoryKey,
    context: tuple[int, ...],
    max_tokens: int = 1,
    stop_strings: tuple[str, ...] = (),
) -> Turn:
    sampling = SamplingParams(
        max_tokens=max_tokens, stop_ids=frozenset({STOP}), stop_strings=stop_strings
    )
    return Turn(request=SampleRequest(session=key, context_ids=context, sampling=sampling))


def test_a_prompt_is_prefilled_once_for_all_members_of_a_group() -> None:
    device = FakeDevice()
    table = make_table(device)
    prompt = (1, 2, 0, 1, 2, 0, 1)
    for key in KEYS:
        table.submit(make_turn(key, prompt), 0.0)
    finished = run_all(table, device)
    assert {end.result.token_ids for end in finished} == {(next_token(prompt),)}
    assert device.num_run == len(prompt) + len(KEYS) - 1
    assert table.statistics.prompts_shared == len(KEYS) - 1


def test_prompts_that_nobody_shares_and_those_of_one_short_call_are_not_copied() -> None:
    device = FakeDevice()
    table = make_table(device)
    for key, prompt in zip(KEYS, ((1, 2, 0), (1, 2, 1), (1, 2)), strict=False):
        table.submit(make_turn(key, prompt), 0.0)
    run_all(table, device)
    table.close(KEYS[0])
    table.submit(make_turn(KEYS[3], (1, 2)), 0.0)
    run_all(table, device)
    assert device.num_taken == 0


def test_a_source_that_is_closed_leaves_its_prompt_to_those_that_wait() -> None:
    device = FakeDevice()
    table = make_table(device)
    prompt = (1, 2, 0, 1)
    table.submit(make_turn(KEYS[0], prompt), 0.0)
    run_all(table, device)
    table.submit(make_turn(KEYS[1], prompt), 0.0)
    table.close(KEYS[0])
    run_all(table, device)
    assert device.num_run == len(prompt) + 1


def test_a_prompt_whose_first_session_is_cancelled_is_prefilled_by_the_next() -> None:
    device = FakeDevice()
    table = make_table(device)
    for key in KEYS[:3]:
        table.submit(make_turn(key, (1, 2, 0, 1, 2, 0, 1)), 0.0)
    run_once(table, device)
    assert table.generating_slots == [] and len(device.pieces[-1]) == 1
    table.close(KEYS[0])
    assert len(run_all(table, device)) == 2


def test_a_row_that_was_lost_is_prefilled_from_its_prompts_row() -> None:
    """Room for one row: each parked row pushes out another, and all tokens stay right."""
    device = FakeDevice()
    table = make_table(device, device_rows=1, host_tokens=0)
    contexts = {key: (1, 2, key.index % 3) for key in KEYS}
    for _ in range(3):
        for key, context in contexts.items():
            table.submit(make_turn(key, context), 0.0)
        for end in run_all(table, device):
            key, result = end.turn.request.session, end.result
            assert result.token_ids == (next_token(contexts[key]),)
            contexts[key] += (*result.token_ids, 1)
    counts = table.statistics
    assert counts.rows_dropped > 0 and counts.max_rows_stored == 1


def test_a_session_that_returns_soon_keeps_its_slot_and_the_least_recent_one_loses_it() -> None:
    device = FakeDevice()
    table = make_table(device)
    for key in KEYS[:3]:
        table.submit(make_turn(key, (key.index,)), 0.0)
    ends = {end.turn.request.session: end.result for end in run_all(table, device)}
    table.submit(make_turn(KEYS[0], (0, *ends[KEYS[0]].token_ids)), 1.0)
    [again] = run_all(table, device)
    assert again.result.slot == ends[KEYS[0]].slot
    table.submit(make_turn(KEYS[5], (1,)), 2.0)
    [new] = run_all(table, device)
    assert new.result.slot == ends[KEYS[1]].slot
    assert table.statistics.rows_parked == 1


def test_a_closed_session_frees_its_slot_at_once() -> None:
    device = FakeDevice()
    table = make_table(device)
    for key in KEYS[:4]:
        table.submit(make_turn(key, (1, 1), 9), 0.0)
    run_once(table, device, num_rows=3)
    assert len(table.generating_slots) == 3
    table.close(KEYS[1])
    table.start_turns(1.0)
    [piece] = table.next_pieces(3)
    assert piece.slot == 1 and not table._waiting


def test_low_groups_go_first_and_patience_ends() -> None:
    def order(patience_s: float) -> list[TrajectoryKey]:
        device = FakeDevice()
        table = make_table(device, patience_s=patience_s)
        arrivals = [KEYS[6], KEYS[3], KEYS[0], KEYS[4], KEYS[1], KEYS[2]]
        for at, key in enumerate(arrivals):
            table.submit(make_turn(key, (1, key.index)), float(at))
        table.start_turns(100.0)
        return [session.key for session in table._extending]

    assert order(patience_s=1e9) == [KEYS[0], KEYS[1], KEYS[2]]
    assert order(patience_s=99.5) == [KEYS[6], KEYS[0], KEYS[1]]
    assert order(patience_s=10.0) == [KEYS[6], KEYS[3], KEYS[0]]


def test_an_extension_call_takes_the_oldest_turn_and_pads_no_short_one_to_a_longer_bucket() -> None:
    device = FakeDevice()
    table = make_table(device)
    for key, length in zip(KEYS, (2, 9, 1), strict=False):
        table.submit(make_turn(key, (key.index,) * length), 0.0)
    table.start_turns(0.0)
    short = table.next_pieces(3)
    assert [piece.slot for piece in short] == [0, 2]
    device.extend(short)
    table.extended(short)
    [long] = table.next_pieces(3)
    assert (long.slot, len(long.token_ids), long.is_last) == (1, 5, False)


@pytest.mark.parametrize("length", range(1, STEPS * 2 + 1))
def test_a_stop_string_ends_a_turn_at_any_place_between_and_across_syncs(length: int) -> None:
    device = FakeDevice()
    table = make_table(device)
    context = (1, 1)
    free, _ = expected_turn(context, 6)
    stop = digits(free[max(0, length - 2) : length])
    want, _ = expected_turn(context, 6, (stop,))
    table.submit(make_turn(KEYS[0], context, 6, (stop,)), 0.0)
    [end] = run_all(table, device)
    assert (end.result.token_ids, end.result.finish_reason) == (want, FinishReason.STOP)
    context = (*context, *want, 2)
    table.submit(make_turn(KEYS[0], context), 1.0)
    [end] = run_all(table, device)
    assert end.result.token_ids == (next_token(context),)


def test_tokens_that_cannot_be_decoded_fail_their_turn_only() -> None:
    def decode(token_ids: tuple[int, ...]) -> str:
        raise IndexError("id 9 has no text")

    device = FakeDevice()
    table = make_table(device, decode=decode)
    table.submit(make_turn(KEYS[0], (1, 1), 4, ("x",)), 0.0)
    table.submit(make_turn(KEYS[1], (1, 1), 4), 0.0)
    answers = {end.turn.request.session: end.result for end in run_all(table, device)}
    assert "index 0" in str(answers[KEYS[0]]) and "no text" in str(answers[KEYS[0]])
    assert answers[KEYS[1]].token_ids == expected_turn((1, 1), 4)[0]
    assert table.open_sessions == (KEYS[1],)


def test_a_context_that_does_not_append_is_refused_with_the_index() -> None:
    device = FakeDevice()
    table = make_table(device)
    table.submit(make_turn(KEYS[0], (1, 2)), 0.0)
    [end] = run_all(table, device)
    assert end.result.token_ids == (next_token((1, 2)),)
    with pytest.raises(ServingError, match=r"at index 1 from the 3 tokens"):
        table.submit(make_turn(KEYS[0], (1, 5, 3, 4)), 1.0)
    table.submit(make_turn(KEYS[0], (1, 2, *end.result.token_ids)), 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_ids": ()}, "context of 0 tokens"),
        ({"context_ids": (1, VOCAB)}, "outside the vocabulary"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens >= 1"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(stop_ids=frozenset(range(9)))}, "at most 8 stop_ids"),
        ({"sampling": SamplingParams(stop_strings=("",))}, "no empty stop string"),
        ({"sampling": SamplingParams(stop_strings=("x",))}, "give ServingWorker a text stream"),
    ],
)
def test_impossible_requests_are_refused_by_name(change: dict[str, object], words: str) -> None:
    table = make_table(FakeDevice(), decode=None)
    good = make_turn(KEYS[1], (1, 2)).request
    with pytest.raises(ServingError, match=f"(?s)step 0 group 0 index 1.*{words}"):
        table.submit(Turn(request=dataclasses.replace(good, **change)), 0.0)
    assert table.open_sessions == ()
