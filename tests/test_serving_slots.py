"""In any order of turns, cancellations and device calls, a turn's tokens follow from its context.

The device is a fake whose next token is a hand-computable function of what its row holds, so a
wrong piece, a stale entry, or a row given to two sessions changes a result.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thundersync_jax.serving.decode_state import Piece, Sampled
from thundersync_jax.serving.slots import Finished, SlotTable, Turn, TurnState
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import FinishReason, SampleRequest, SamplingParams

NUM_SLOTS, ROW_LENGTH, VOCAB, STEPS, STOP = 3, 12, 10, 2, 3
KEYS = [TrajectoryKey(step=0, group=0, index=i) for i in range(5)]


def next_token(row: tuple[int, ...]) -> int:
    return (7 * sum(row) + len(row)) % VOCAB


def expected_turn(
    context: tuple[int, ...], max_tokens: int
) -> tuple[tuple[int, ...], FinishReason]:
    tokens: tuple[int, ...] = ()
    while len(context + tokens) < ROW_LENGTH and len(tokens) < max_tokens:
        tokens += (next_token(context + tokens),)
        if tokens[-1] == STOP:
            return tokens, FinishReason.STOP
    is_full = len(context + tokens) == ROW_LENGTH
    return tokens, FinishReason.CONTEXT if is_full else FinishReason.LENGTH


class FakeDevice:
    """Rows of tokens with the rules of `decode_state`: pieces are placed, live rows sample."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = [()] * NUM_SLOTS
        self.budget: dict[int, int] = {}  # live slot -> tokens left

    def extend(self, piece: Piece) -> None:
        assert piece.start <= len(self.rows[piece.slot])
        self.rows[piece.slot] = self.rows[piece.slot][: piece.start] + tuple(piece.token_ids)
        self.budget.pop(piece.slot, None)
        if piece.is_last:
            self.budget[piece.slot] = piece.sampling.max_tokens

    def generate(self) -> Sampled:
        tokens = np.zeros((NUM_SLOTS, STEPS), np.int32)
        is_sampled, goes_on = np.zeros((2, NUM_SLOTS, STEPS), bool)
        for slot in list(self.budget):
            for step in range(STEPS):
                token = next_token(self.rows[slot])
                tokens[slot, step], is_sampled[slot, step] = token, True
                self.budget[slot] -= 1
                is_full = len(self.rows[slot]) + 1 == ROW_LENGTH
                if token == STOP or self.budget[slot] == 0 or is_full:
                    del self.budget[slot]
                    break
                goes_on[slot, step] = True
                self.rows[slot] += (token,)
        return Sampled(
            token_ids=tokens,
            logprobs=-tokens.astype(np.float32),
            policy_versions=np.full_like(tokens, 4),
            is_sampled=is_sampled,
            goes_on=goes_on,
        )


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(num_slots=NUM_SLOTS, row_length=ROW_LENGTH, vocab_size=VOCAB)
        self.device = FakeDevice()
        self.known: dict[TrajectoryKey, tuple[int, ...]] = {}  # open sessions
        self.slots: dict[TrajectoryKey, int] = {}
        self.running: list[Turn] = []  # in order of submission
        self.now = 0.0

    @rule(
        key=st.sampled_from(KEYS),
        observation=st.lists(st.integers(0, VOCAB - 1), max_size=5),
        max_tokens=st.integers(1, 5),
    )
    def submit(self, key: TrajectoryKey, observation: list[int], max_tokens: int) -> None:
        context = self.known.get(key, ()) + tuple(observation)
        turn = make_turn(key, context, max_tokens)
        is_busy = any(t.request.session == key for t in self.running)
        if is_busy or not 0 < len(context) <= ROW_LENGTH:
            with pytest.raises(ServingError, match="step 0 group 0"):
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
        assert all(turn.state is TurnState.ENDED for turn in want)
        self.running = [turn for turn in self.running if turn not in want]
        self.known.pop(key, None)
        self.slots.pop(key, None)

    @rule(longest=st.integers(1, 6))
    def run_once(self, longest: int) -> None:
        """One turn of the decode thread's loop."""
        self.now += 1
        self.check(self.table.start_turns(self.now))
        for piece in self.table.take_pieces(longest):
            assert 1 <= len(piece.token_ids) <= longest
            self.device.extend(piece)
        if self.table.is_generating:
            self.check(self.table.record(self.device.generate(), self.now))

    @precondition(lambda self: self.running)
    @rule()
    def run_to_the_end(self) -> None:
        """A turn waits only while every slot is held by a session between turns: none is lost."""
        for _ in range(200):
            if not self.running:
                return
            if not self.table.has_work:
                assert len(self.slots) == NUM_SLOTS
                assert all(self.is_idle(key) for key in self.slots)
                self.close(min(self.slots))
            self.run_once(4)
        raise AssertionError(f"turns never ended: {self.running}")

    def is_idle(self, key: TrajectoryKey) -> bool:
        return all(turn.request.session != key for turn in self.running)

    def check(self, finished: list[Finished]) -> None:
        for end in finished:
            asked, result = end.turn.request, end.result
            want = expected_turn(asked.context_ids, asked.sampling.max_tokens)
            assert (result.token_ids, result.finish_reason) == want
            assert result.logprobs == tuple(-float(t) for t in result.token_ids)
            assert result.policy_versions == (4,) * len(result.token_ids)
            assert 0 <= end.turn.started_s <= result.ended_s == self.now
            assert self.slots.setdefault(asked.session, result.slot) == result.slot
            self.known[asked.session] = asked.context_ids + result.token_ids
            self.running.remove(end.turn)

    @invariant()
    def slots_are_distinct_and_waiting_is_first_come_first_served(self) -> None:
        assert len(set(self.slots.values())) == len(self.slots)
        assert set(self.table.open_sessions) == set(self.known)
        first_turns = [t for t in self.running if t.request.session not in self.slots]
        is_waiting = [turn.state is TurnState.WAITING for turn in first_turns]
        assert is_waiting == sorted(is_waiting)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def make_turn(key: TrajectoryKey, context: tuple[int, ...], max_tokens: int = 1) -> Turn:
    sampling = SamplingParams(max_tokens=max_tokens, stop_ids=frozenset({STOP}))
    return Turn(request=SampleRequest(session=key, context_ids=context, sampling=sampling))


def test_a_context_that_does_not_append_is_refused_with_the_index() -> None:
    table, device = SlotTable(num_slots=1, row_length=9, vocab_size=VOCAB), FakeDevice()
    table.submit(make_turn(KEYS[0], (1, 2)), 0.0)
    table.start_turns(0.0)
    [piece] = table.take_pieces(9)
    device.extend(piece)
    [end] = table.record(device.generate(), 1.0)
    assert end.result.token_ids == (next_token((1, 2)),)
    with pytest.raises(ServingError, match=r"3 tokens its row holds at index 1"):
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
    ],
)
def test_impossible_requests_are_refused_by_name(change: dict[str, object], words: str) -> None:
    table = SlotTable(num_slots=1, row_length=9, vocab_size=VOCAB)
    good = make_turn(KEYS[1], (1, 2)).request
    with pytest.raises(ServingError, match=f"(?s)step 0 group 0 index 1.*{words}"):
        table.submit(Turn(request=dataclasses.replace(good, **change)), 0.0)
    assert table.open_sessions == ()
