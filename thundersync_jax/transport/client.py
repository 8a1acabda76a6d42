"""`PolicyClient` and `ScoreClient`: how a rollout asks for tokens and for the log-probabilities of
tokens, whatever serves them.
"""

from __future__ import annotations

from typing import Protocol

from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.messages import (
    SampleRequest,
    SampleResult,
    ScoreRequest,
    ScoreResult,
)


class ServingError(RuntimeError):
    """A request that could not be served: the reason, and which session it was. Other sessions go
    on.
    """


class PolicyClient(Protocol):
    """Samples turns. Implementations are used from one asyncio loop and never block it."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one turn. Raises ServingError; then, and when it is cancelled, the session may be
        closed, and a caller that goes on begins it again.

        The first turn leases the weights: all turns until `release` are sampled from one version.
        """
        ...

    async def release(self, session: TrajectoryKey) -> None:
        """Frees what the session holds, and its lease. Unknown sessions are ignored: a trajectory
        may fail before its first turn.
        """
        ...


class ScoreClient(Protocol):
    """Scores given tokens under a teacher or a frozen reference. Used as `PolicyClient` is."""

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Scores the tokens of a session; cancelling the call ends the session. Raises
        ServingError.
        """
        ...

    async def release(self, session: TrajectoryKey) -> None:
        """Forgets the session and frees its row. Unknown sessions are ignored."""
        ...
