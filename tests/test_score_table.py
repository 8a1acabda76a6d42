"""`ScoreTable` against rows that remember what was written to them: whatever is asked, released and
published in whatever order, every answer is that of the session's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from serving_cases import key

from thundersync_jax.serving.score_table import ScoreTable, Scoring, ScoringState
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import ScoreRequest

pytestmark = pytest.mark.optimized

NUM_ROWS, ROW_LENGTH, NUM_SESSIONS = 2, 9, 5
TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=5)


def logprob(context: Sequence[int], version: int) -> float:
    """Of the last token, a number that no other context has."""
    return -float(sum((token + 1) * 5**i for i, token in enumerate(context)) + version / 8)


class ScoreTableMachine(RuleBasedStateMachine):
    """Five sessions on two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ScoreTable(num_rows=NUM_ROWS, row_length=ROW_LENGTH, vocab_size=4)
        self.rows: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self.version = 0
        self.contexts: dict[int, list[int]] = {}
        self.waiting: dict[int, Scoring] = {}

    @rule(index=st.integers(0, NUM_SESSIONS - 1), more=TOKENS, data=st.data())
    def ask(self, index: int, more: list[int], data: st.DataObject) -> None:
        context = [*self.contexts.get(index, []), *more]
        first = data.draw(st.integers(0, max(1, len(context))))
        request = ScoreRequest(session=key(index), context_ids=tuple(context), first=first)
        scoring = Scoring(request=request)
        is_good = 2 <= len(context) <= ROW_LENGTH and 1 <= first < len(context)
        if index in self.waiting or not is_good:
            with pytest.raises(ServingError, match=f"index {index}"):
                self.table.submit(scoring, 0.0)
        else:
            self.table.submit(scoring, 0.0)
            self.contexts[index], self.waiting[index] = context, scoring

    @rule(index=st.integers(0, NUM_SESSIONS - 1))
    def release(self, index: int) -> None:
        ended = self.table.close(key(index))
        assert ended is self.waiting.pop(index, None)
        assert ended is None or ended.state is ScoringState.ENDED
        self.contexts.pop(index, None)

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.table.forget()
        self.rows = [[9] * ROW_LENGTH for _ in range(NUM_ROWS)]  # of no use to the new weights

    @rule(longest=st.integers(1, 4))
    def run_a_round(self, longest: int) -> None:
        pieces = self.table.take_pieces(longest)
        assert len({piece.session.row for piece in pieces}) == len(pieces)
        assert all(1 <= len(piece.token_ids) <= longest for piece in pieces)
        for piece in pieces:
            row = self.rows[piece.session.row]
            row[piece.start :] = piece.token_ids
            context = [*row, piece.targets[-1]]
            assert tuple(context) == piece.session.token_ids[: len(context)]
            ends = range(piece.start + 2, len(context) + 1)
            padding = [0.0]  # a program's row is as long as its bucket
            values = [logprob(context[:end], self.version) for end in ends]
            self.table.record(piece, values + padding)
        for scored in self.table.finish(self.version, 0.0):
            request, result = scored.scoring.request, scored.result
            index, context = request.session.index, request.context_ids
            assert self.waiting.pop(index) is scored.scoring
            ends = range(request.first + 1, len(context) + 1)
            assert list(result.logprobs) == [logprob(context[:end], self.version) for end in ends]
            assert result.policy_version == self.version

    @rule()
    def everything_is_answered(self) -> None:
        for _ in range(ROW_LENGTH * NUM_SESSIONS):
            self.run_a_round(4)
        assert not self.waiting and not self.table.has_work

    @invariant()
    def work_is_what_waits(self) -> None:
        assert self.table.has_work == bool(self.waiting)


ScoreTableMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestScoreTable = ScoreTableMachine.TestCase
