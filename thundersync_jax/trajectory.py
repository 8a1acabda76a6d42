"""Records that cross every boundary of the system: tasks, turns, tokens, trajectories.

Invariants:
  * Token ids, action mask, log-probabilities and policy versions of a trajectory have one length;
    they are appended together by `TrajectoryBuilder` and checked again whenever a
    `TrajectoryTokens` is made.
  * Action tokens are exactly the tokens the policy sampled. Everything else (tool output, template
    text) is an observation: mask False, log-probability 0, version `OBSERVATION_VERSION`.
  * A trajectory is one sequence after its prompt, or *segments*: each is a sequence of its own
    after the prompt, where a chat template rewrote what had been said before. Every token knows
    its own segment's tokens only.
  * A trajectory ends in exactly one of a finite reward or a failure. A failure has no reward: it is
    never a zero.

This module imports numpy only, so that environments, sandboxes and the coordinator start without
jax.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

OBSERVATION_VERSION = -1

MAX_REWARD = 1e15  # the norm of a gradient squares it: in float32 that is finite below 1e19


class TrajectoryError(ValueError):
    """A trajectory, reward or token record that breaks an invariant of this module."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class TrajectoryKey:
    """Names one attempt of one run: train step, group within the step, index within the group."""

    step: int
    group: int
    index: int

    def __str__(self) -> str:
        return f"step {self.step} group {self.group} index {self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem of a data set.

    Attributes:
      task_id: unique within its split.
      instruction: what the agent is asked to do.
      files: path -> content of the files that the agent's sandbox starts with.
      metadata: what the grader needs; JSON values only.
    """

    task_id: str
    instruction: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A parsed request of the policy.

    Attributes:
      name: the tool.
      arguments: its words in order, of a call that is a command line.
      keywords: JSON values by name, of a call that is JSON.
    """

    name: str
    arguments: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


TOKEN_ARRAYS = (
    "token_ids",
    "action_mask",
    "behavior_logprobs",
    "policy_versions",
    "reference_logprobs",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectoryTokens:
    """The tokens of one trajectory after its prompt.

    Attributes:
      token_ids: int32 [T].
      action_mask: bool [T]; True where the policy sampled the token.
      behavior_logprobs: float32 [T]; log-probability under the distribution that sampled the token,
        0 elsewhere.
      policy_versions: int32 [T]; version of the weights that sampled the token, OBSERVATION_VERSION
        elsewhere.
      reference_logprobs: float32 [T]; log-probability of action tokens under the reference policy;
        None where nobody asked it.
      segment_starts: where segments begin, but for the first: in order, above 0 and below T.
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    behavior_logprobs: np.ndarray
    policy_versions: np.ndarray
    reference_logprobs: np.ndarray | None = None
    segment_starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in (
            ("token_ids", np.int32),
            ("action_mask", np.bool_),
            ("behavior_logprobs", np.float32),
            ("policy_versions", np.int32),
        ):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        if self.reference_logprobs is not None:
            scores = np.asarray(self.reference_logprobs, np.float32)
            object.__setattr__(self, "reference_logprobs", scores)
        arrays = {name: getattr(self, name) for name in TOKEN_ARRAYS}
        lengths = {name: array.shape for name, array in arrays.items() if array is not None}
        if self.token_ids.ndim != 1 or len(set(lengths.values())) != 1:
            raise TrajectoryError(f"token arrays must be [T] of one length, got shapes {lengths}")
        starts = (0, *self.segment_starts, self.token_ids.size)
        if self.segment_starts and any(a >= b for a, b in itertools.pairwise(starts)):
            raise TrajectoryError(
                f"segments begin at {self.segment_starts} of {self.token_ids.size} tokens: "
                "expected places in order, each with a token"
            )
        self._check_logprobs("behavior_logprobs", "the engine reports one per sampled token")
        self._check_logprobs("reference_logprobs", "the reference policy gives every token one")

    def _check_logprobs(self, name: str, source: str) -> None:
        array = getattr(self, name)
        sampled = np.zeros(0) if array is None else array[self.action_mask]
        is_bad = ~np.isfinite(sampled) | (sampled > 1e-3)
        if np.any(is_bad):
            raise TrajectoryError(
                f"{name} of action tokens must be finite and at most 0, got "
                f"{sampled[is_bad][:4].tolist()}; {source}"
            )

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_action_tokens(self) -> int:
        return int(np.count_nonzero(self.action_mask))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredTurn:
    """One turn for the learner: its tokens, and what a teacher said of them.

    Attributes:
      tokens: what the policy read since the turn before, and what it sampled.
      teacher_logprobs: float64 [T]; of action tokens finite and at most 0, of others anything. None
        for a turn that no teacher scored; in distillation it is only read by later ones.
    """

    tokens: TrajectoryTokens
    teacher_logprobs: np.ndarray | None

    def __post_init__(self) -> None:
        if self.teacher_logprobs is None:
            return
        scores = np.asarray(self.teacher_logprobs, np.float64)
        object.__setattr__(self, "teacher_logprobs", scores)
        if scores.shape != (self.tokens.num_tokens,):
            raise TrajectoryError(
                f"the teacher gave scores of shape {scores.shape} for a turn of "
                f"{self.tokens.num_tokens} tokens: expected one a token"
            )
        of_actions = scores[self.tokens.action_mask]
        wrong = of_actions[~(np.isfinite(of_actions) & (of_actions <= 1e-3))]
        if wrong.size:
            raise TrajectoryError(
                f"the teacher's log-probabilities of action tokens hold {wrong[:4].tolist()}: "
                "expected finite numbers of at most 0. Look at the teacher's weights and dtype"
            )


class TrajectoryBuilder:
    """Appends ids, mask, log-probabilities and versions together, so they cannot drift."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._action_mask: list[bool] = []
        self._behavior_logprobs: list[float] = []
        self._policy_versions: list[int] = []
        self._segment_starts: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def segment_ids(self) -> tuple[int, ...]:
        """The tokens of the present segment."""
        return tuple(self._token_ids[self._segment_starts[-1] if self._segment_starts else 0 :])

    @property
    def num_segments(self) -> int:
        return 1 + len(self._segment_starts)

    @property
    def policy_version(self) -> int:
        """The newest that sampled a token; OBSERVATION_VERSION before the first."""
        return max(self._policy_versions, default=OBSERVATION_VERSION)

    def begin_segment(self) -> None:
        """What is appended from now on follows the prompt alone."""
        self._segment_starts.append(len(self))

    def append_action(
        self, token_ids: Sequence[int], logprobs: Sequence[float], policy_versions: Sequence[int]
    ) -> None:
        """Appends sampled tokens with what the sampler said of them; all three have one length."""
        if not len(token_ids) == len(logprobs) == len(policy_versions):
            raise TrajectoryError(
                "an action needs one log-probability and one version per token, got "
                f"{len(token_ids)} ids, {len(logprobs)} log-probabilities, {len(policy_versions)} "
                "versions"
            )
        self._token_ids.extend(token_ids)
        self._action_mask.extend([True] * len(token_ids))
        self._behavior_logprobs.extend(logprobs)
        self._policy_versions.extend(policy_versions)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample."""
        self._token_ids.extend(token_ids)
        self._action_mask.extend([False] * len(token_ids))
        self._behavior_logprobs.extend([0.0] * len(token_ids))
        self._policy_versions.extend([OBSERVATION_VERSION] * len(token_ids))

    def build(self) -> TrajectoryTokens:
        return TrajectoryTokens(
            token_ids=np.asarray(self._token_ids, np.int32),
            action_mask=np.asarray(self._action_mask, np.bool_),
            behavior_logprobs=np.asarray(self._behavior_logprobs, np.float32),
            policy_versions=np.asarray(self._policy_versions, np.int32),
            segment_starts=tuple(self._segment_starts),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One policy emission and the observation it caused.

    Attributes:
      num_action_tokens: tokens sampled in this turn.
      action_text: their text, for people and parsers; never encoded again.
      observation_text: what the environment answered.
      error: why its tool call is none; "" for a turn without a call, and for one whose call is.
      started_s, sampled_s, ended_s: seconds since the run's clock began: request, last token,
        observation.
      slot: the serving row that sampled the turn.
    """

    num_action_tokens: int
    action_text: str
    observation_text: str
    started_s: float
    sampled_s: float
    ended_s: float
    slot: int = -1
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """The content of one trajectory, final, before its verdict.

    Attributes:
      stop_reason: why the agent stopped: "done", "max_turns", "max_tokens" or "context".
    """

    key: TrajectoryKey
    task_id: str
    prompt_ids: tuple[int, ...]
    tokens: TrajectoryTokens
    turns: tuple[Turn, ...]
    stop_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The one terminal event of a trajectory: a finite reward, or the reason why there is none."""

    reward: float | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failure is None):
            raise TrajectoryError(
                f"a verdict is a reward or a failure, got reward={self.reward!r} and "
                f"failure={self.failure!r}"
            )
        if self.reward is not None:
            check_reward(self.reward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectoryRecord:
    """One trajectory of a finished step; times are seconds of the run's clock.

    Attributes:
      rollout: None when the attempt failed before its content was final.
      dispatched_s: None when the step's deadline passed before its group opened.
      content_s: when `rollout` became final, None without it.
      terminal_s: when the verdict was known.
      scored_turns: in order, as far as they were scored, also of an attempt that failed.
    """

    key: TrajectoryKey
    task_id: str
    prompt_ids: tuple[int, ...]
    rollout: Rollout | None
    verdict: Verdict
    dispatched_s: float | None
    content_s: float | None
    terminal_s: float
    scored_turns: tuple[ScoredTurn, ...] = ()


def check_reward(reward: float) -> float:
    """Returns `reward` as a float; raises TrajectoryError unless it is a finite number that
    gradients in float32 can be weighted with.
    """
    if isinstance(reward, bool) or not isinstance(reward, (int, float, np.integer, np.floating)):
        raise TrajectoryError(
            f"a reward must be a finite number, got {reprlib.repr(reward)} of type "
            f"{type(reward).__name__}: return float(...) of it, or report a broken attempt as a "
            "failure (a grader raises)"
        )
    try:
        value = float(reward)  # before it is compared: a float16 would round the limit to infinity
    except OverflowError:
        value = math.inf if reward > 0 else -math.inf
    if not -MAX_REWARD <= value <= MAX_REWARD:  # NaN compares with nothing
        raise TrajectoryError(
            f"a reward must be finite and at most {MAX_REWARD:g} in size, got {value:g}: scale the "
            "rewards down, and report a broken attempt as a failure, not as a number (a "
            "grader raises)"
        )
    return value
