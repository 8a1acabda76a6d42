"""Who hears of an attempt's turns while the attempt goes on: a frozen policy that scores them, or a
listener alone.

Invariants:
  * Turns are scored one after the other, each as soon as it is sampled: the scorer works while the
    tool does.
  * `on_turn` hears every turn once, in order, before `finish` returns.
  * What breaks on the scorer's side is an AttemptError: at the next turn, or at the latest in
    `finish`. Turns that were heard before stand.
  * The scorer's session is released by `close`, whatever happened.

`UnscoredTurns` hands every turn on as it is sampled.

Who calls it: `rollout.RolloutRunner` makes one an attempt; `agent.Agent` gives it turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from thundersync_jax.rollout.phases import AttemptError
from thundersync_jax.trajectory import (
    Rollout,
    ScoredTurn,
    TrajectoryError,
    TrajectoryKey,
    TrajectoryTokens,
)
from thundersync_jax.transport.client import ScoreClient, ServingError
from thundersync_jax.transport.messages import ScoreRequest

TurnListener = Callable[[TrajectoryKey, ScoredTurn], None]


class TurnSink(Protocol):
    """Takes the turns of one attempt."""

    def submit(self, tokens: TrajectoryTokens, *, begins_segment: bool) -> None:
        """A turn has been sampled; it follows the prompt alone where it `begins_segment`."""

    def complete(self, rollout: Rollout) -> Rollout:
        """The content with what was said of its turns, once all are finished."""


class UnscoredTurns:
    """Hands every turn on at once."""

    def __init__(self, key: TrajectoryKey, on_turn: TurnListener) -> None:
        self._key = key
        self._on_turn = on_turn

    def submit(self, tokens: TrajectoryTokens, *, begins_segment: bool) -> None:
        _check_one_segment(self._key, begins_segment)
        self._on_turn(self._key, ScoredTurn(tokens=tokens, teacher_logprobs=None))

    def complete(self, rollout: Rollout) -> Rollout:
        return rollout


class TurnScoring:
    """Scores the turns of one attempt.

    Args:
      on_turn: hears of each what a teacher said of it. None: the scores are a reference policy's,
        which `complete` gives to the content.
    """

    def __init__(
        self,
        client: ScoreClient,
        key: TrajectoryKey,
        prompt_ids: tuple[int, ...],
        on_turn: TurnListener | None,
    ) -> None:
        self._client = client
        self._key = key
        self._prompt_ids = prompt_ids
        self._context_ids = prompt_ids
        self._on_turn = on_turn
        self._reference: list[TrajectoryTokens] = []
        self._turns: asyncio.Queue[tuple[TrajectoryTokens, bool] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._score_all(), name=f"scoring of {self._key}")

    def submit(self, tokens: TrajectoryTokens, *, begins_segment: bool) -> None:
        """Queues a turn. Raises AttemptError when one before it could not be scored."""
        if self._on_turn is not None:
            _check_one_segment(self._key, begins_segment)
        if self._task is not None and self._task.done():
            self._task.result()
        self._turns.put_nowait((tokens, begins_segment))

    async def finish(self) -> None:
        """Waits for the scores of every turn, each for at most the client's own deadline."""
        assert self._task is not None
        self._turns.put_nowait(None)
        await self._task

    def complete(self, rollout: Rollout) -> Rollout:
        """The content with what the reference said of it, 0 where nothing was sampled; a teacher's
        is as it was. After `finish`.
        """
        if self._on_turn is not None:
            return rollout
        tokens = rollout.tokens
        scores = np.concatenate([turn.reference_logprobs for turn in self._reference])
        scores = np.where(tokens.action_mask, scores, 0.0)
        tokens = dataclasses.replace(tokens, reference_logprobs=scores)
        return dataclasses.replace(rollout, tokens=tokens)

    async def close(self) -> None:
        """Ends the scoring in progress, and the scorer's session."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # heard by `submit` or `finish`, or of no interest any more
        await self._client.release(self._key)

    async def _score_all(self) -> None:
        while (turn := await self._turns.get()) is not None:
            tokens, begins_segment = turn
            if begins_segment:
                await self._client.release(self._key)  # a session's context only grows
                self._context_ids = self._prompt_ids
            first = len(self._context_ids)
            self._context_ids += tuple(tokens.token_ids.tolist())
            request = ScoreRequest(session=self._key, context_ids=self._context_ids, first=first)
            try:
                result = await self._client.score(request)
                self._hear(tokens, np.asarray(result.logprobs, np.float64))
            except (ServingError, TrajectoryError) as error:
                raise AttemptError(f"scoring {self._key} failed: {error}") from error

    def _hear(self, tokens: TrajectoryTokens, scores: np.ndarray) -> None:
        """Raises TrajectoryError for scores that no policy can have given."""
        if self._on_turn is None:
            self._reference.append(dataclasses.replace(tokens, reference_logprobs=scores))
        else:
            self._on_turn(self._key, ScoredTurn(tokens=tokens, teacher_logprobs=scores))


def _check_one_segment(key: TrajectoryKey, begins_segment: bool) -> None:
    """Who learns from turns as they come knows trajectories of one segment only."""
    if begins_segment:
        raise AttemptError(
            f"the chat template rewrote what {key} had said, and its turns are streamed or taught "
            "as they come: set config.chat.history = 'append', or learner.stream_turns = 'never' "
            "and no opd.teacher"
        )
