"""What crosses the boundary between rollouts, serving, learner and coordinator.

Frozen records of host values only: no device arrays, no callables. numpy is the heaviest import.
"""

from __future__ import annotations

import dataclasses
import enum
import math
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
      stop_strings: the turn ends with the token that completes one of them in its decoded text;
        only where the server was given a decoder.
      max_tokens: the most tokens to sample; a host number that never enters a compiled shape.
      seed: with the position of each token it determines the draw, whatever slot or batch serves
        it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    max_tokens: int = 32
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One turn of one trajectory.

    Attributes:
      session: names the trajectory; its keys and values are kept between turns, where memory
        allows, until `PolicyClient.release`.
      context_ids: all tokens so far, prompt included. What the session already holds must be its
        beginning.
      policy_version: the version that must answer; None takes the present one. A session keeps the
        version of its first turn either way.
    """

    session: TrajectoryKey
    context_ids: tuple[int, ...]
    sampling: SamplingParams
    policy_version: int | None = None


class FinishReason(enum.Enum):
    STOP = "stop"  # the last token is a stop id, or completes a stop string
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the row is full


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The tokens of one turn; the three tuples have one length, which is 0 only when the row was
    full at the start.

    Attributes:
      slot: the row that served the request, for the timeline; -1 where none was needed.
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
class ServingStatistics:
    """What a decode loop has done since it started.

    Attributes:
      num_slots: rows of its batch.
      decode_steps: steps in which at least one row sampled.
      tokens_sampled: tokens that were returned, or will be.
      tokens_prefilled: context tokens that were run through the model.
      tokens_appended: context tokens that were new: prompts and observations. More were run where
        rows were dropped, fewer where a prompt was shared.
      turns_ended: turns that got a result.
      rows_parked: rows copied out of a slot that another turn took.
      rows_resumed: rows copied back into a slot.
      rows_to_host, rows_dropped: stored rows that moved to the host's memory, and that were lost.
      max_rows_stored: the most rows that were stored at one time, prompts included.
      prompts_shared: first turns that began with a copy of their prompt's row.
      num_publishes: versions of the weights taken.
      busy_s: time not spent waiting for requests.
    """

    num_slots: int
    decode_steps: int = 0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_appended: int = 0
    turns_ended: int = 0
    rows_parked: int = 0
    rows_resumed: int = 0
    rows_to_host: int = 0
    rows_dropped: int = 0
    max_rows_stored: int = 0
    prompts_shared: int = 0
    num_publishes: int = 0
    busy_s: float = 0.0

    @property
    def slot_utilization(self) -> float:
        """Tokens sampled over those that the steps had room for; NaN before the first step."""
        room = self.decode_steps * self.num_slots
        return self.tokens_sampled / room if room else float("nan")

    def since(self, before: ServingStatistics) -> ServingStatistics:
        """What was done after `before`; max_rows_stored stays that of the whole time."""
        kept = ("num_slots", "max_rows_stored")
        sums = {
            name: value - getattr(before, name)
            for name, value in dataclasses.asdict(self).items()
            if name not in kept
        }
        return dataclasses.replace(self, **sums)


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
      teacher_kl_mean: distillation: the mean over scored tokens of log b - log q, of the sampler b
        and the teacher q.
      reference_kl_k3_mean: the mean over action tokens of q / b - 1 - log(q / b), of the sampler b
        and the reference policy q: the k3 estimate of their KL divergence; NaN without a reference.
      num_by_turns: trajectories whose turns ran before their content was final: of those with a
        reward, or, in distillation, with a scored token.
      replayed_tokens: positions that ran once more than without turn streaming.
      replayed_flops: of the matrix products that ran for them, in closed form; see `ReplayCount`.
      num_promotions: leaves of exact sums that met a gradient beyond their grid.
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
    teacher_kl_mean: float = math.nan
    reference_kl_k3_mean: float = math.nan
    num_by_turns: int = 0
    replayed_tokens: int = 0
    replayed_flops: int = 0
    num_promotions: int = 0
