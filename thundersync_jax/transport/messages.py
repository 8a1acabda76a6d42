"""What crosses the boundary between rollouts, serving, learner and coordinator.

Frozen records of host values only: no device arrays, no callables. numpy is the heaviest import.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from thundersync_jax.trajectory import TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn.

    Attributes:
      temperature: 0 is greedy (log-probabilities are then those of temperature 1).
      top_k, top_p: truncation; 0 and 1.0 turn it off. Log-probabilities are those of the truncated
        distribution.
      stop_ids: a sampled stop id ends the turn, is returned, and keeps its log-probability.
      max_tokens: the most tokens to sample; a host number that never enters a compiled shape.
      seed: with the position of each token it determines the draw, whatever slot or batch serves
        it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int = 32
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One turn of one trajectory.

    Attributes:
      session: names the trajectory; its K/V row is kept between turns until `PolicyClient.release`.
      context_ids: all tokens so far, prompt included. What the session already holds must be its
        beginning.
    """

    session: TrajectoryKey
    context_ids: tuple[int, ...]
    sampling: SamplingParams


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop id was sampled; it is the last token
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the row is full


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The tokens of one turn; the three tuples have one length, which is 0 only when the row was
    full at the start.

    Attributes:
      slot: the row that served the request, for the timeline.
      started_s, ended_s: `time.monotonic()` when a slot was given and when the last token reached
        the host.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    slot: int
    started_s: float
    ended_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Asks for the log-probabilities of given tokens under another model.

    Attributes:
      session: names the trajectory; what its row holds is kept until `ScoreClient.release`.
      context_ids: all tokens so far, prompt included. What was scored before in the session must be
        its beginning.
      first: index in context_ids of the first token that is asked for, at least 1: nothing precedes
        token 0.
    """

    session: TrajectoryKey
    context_ids: tuple[int, ...]
    first: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """The answer to a `ScoreRequest`.

    Attributes:
      logprobs: of context_ids[first:], each given all tokens before it.
      policy_version: of the weights, the same for all of them.
      num_run: tokens that went through the model for this answer.
      started_s, ended_s: `time.monotonic()` when it was accepted and when the last log-probability
        reached the host.
    """

    logprobs: tuple[float, ...]
    policy_version: int
    num_run: int
    started_s: float
    ended_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkItem:
    """One completed learner program call.

    Attributes:
      path: "direct", "stream", "ahead", "bind", "close", "prompt_forward", "prompt_backward" or
        "update".
      started_s, ended_s: `time.monotonic()`; the end is seen by a host that blocked on the outputs.
    """

    path: str
    bucket: int
    num_trajectories: int
    started_s: float
    ended_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What one `Learner.update` did.

    Attributes:
      policy_version: of the weights after the update; unchanged when `is_empty`.
      is_empty: no trajectory had a gradient: parameters, moments, schedule and version are as
        before.
      reward_mean: over trajectories that have a reward; NaN without any.
      grad_norm: of the normalised gradient before clipping.
      logprob_gap_mean, logprob_gap_max: |learner - sampler| log-probability over the action tokens
        that ran; NaN without any.
      paths: final path of every trajectory that has a reward; num_held counts those that waited for
        a buffer.
    """

    policy_version: int
    is_empty: bool
    reward_mean: float
    num_groups: int
    num_trajectories: int
    num_failed: int
    zero_variance_groups: int
    action_tokens: int
    grad_norm: float
    logprob_gap_mean: float
    logprob_gap_max: float
    learning_rate: float
    paths: Mapping[str, int]
    num_held: int
