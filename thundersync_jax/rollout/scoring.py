"""A frozen policy's scores of one attempt's turns, while the attempt goes on.

Invariants:
  * Turns are scored one after the other, each as soon as it is sampled: the scorer works while the
    tool does.
  * `on_scores` hears every turn once, in order, before `finish` returns.
  * What breaks on the scorer's side is an AttemptError: at the next turn, or at the latest in
    `finish`. Turns that were heard before stand.
  * The scorer's session is released by `close`, whatever happened.

Who calls it: `rollout.RolloutRunner` makes one an attempt; `agent.Agent` gives it turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from thundersync_jax.rollout.phases import AttemptError
from thundersync_jax.trajectory import (
    ScoredTurn,
    TrajectoryError,
    TrajectoryKey,
    TrajectoryTokens,
)
from thundersync_jax.transport.client import ScoreClient, ServingError
from thundersync_jax.transport.messages import ScoreRequest

TurnListener = Callable[[TrajectoryKey, ScoredTurn], None]
ScoreListener = Callable[[TrajectoryTokens, Sequence[float]], None]


class TurnScoring:
    """Scores the turns of one attempt.

    Args:
      on_scores: gets a turn's tokens and their log-probabilities; raises TrajectoryError for what
        no policy can have said.
    """

    def __init__(
        self,
        client: ScoreClient,
        key: TrajectoryKey,
        prompt_ids: tuple[int, ...],
        on_scores: ScoreListener,
    ) -> None:
        self._client = client
        self._key = key
        self._context_ids = prompt_ids
        self._on_scores = on_scores
        self._turns: asyncio.Queue[TrajectoryTokens | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._score_all(), name=f"scoring of {self._key}")

    def submit(self, tokens: TrajectoryTokens) -> None:
        """Queues a turn. Raises AttemptError when one before it could not be scored."""
        if self._task is not None and self._task.done():
            self._task.result()
        self._turns.put_nowait(tokens)

    async def finish(self) -> None:
        """Waits for the scores of every turn, each for at most the client's own deadline."""
        assert self._task is not None
        self._turns.put_nowait(None)
        await self._task

    async def close(self) -> None:
        """Ends the scoring in progress, and the scorer's session."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # heard by `submit` or `finish`, or of no interest any more
        await self._client.release(self._key)

    async def _score_all(self) -> None:
        while (tokens := await self._turns.get()) is not None:
            first = len(self._context_ids)
            self._context_ids += tuple(tokens.token_ids.tolist())
            request = ScoreRequest(session=self._key, context_ids=self._context_ids, first=first)
            try:
                result = await self._client.score(request)
                self._on_scores(tokens, result.logprobs)
            except (ServingError, TrajectoryError) as error:
                raise AttemptError(f"scoring {self._key} failed: {error}") from error
