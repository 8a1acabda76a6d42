"""Static shapes for trajectories of any length: ladders of padded lengths, and padding in numpy.

Padding happens on the host because padding on the device would compile one program per length.
Everything after the last action token has an exactly zero gradient and is trimmed first. With a
shared prompt a trajectory is its *branch*: it begins with the prompt's last token and attends to
the keys and values of the tokens before, which its group computed once.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from thundersync_jax.losses.objective import Objective, term_weights, token_weights
from thundersync_jax.trajectory import TrajectoryTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One trajectory as the learner differentiates it: inputs and shifted targets, not yet padded.

    Attributes:
      tokens, targets: int32 [T]; position t predicts targets[t].
      weights: float32 [T] of the score; 0 where the target is not an action token.
      behavior_logprobs: float32 [T], aligned with `targets`.
      term_weights: float32 [M, T] of the objective's M term sums; None without any.
      reference_logprobs: float32 [T]; None unless a term needs them.
      prefix_length: tokens before these, whose keys and values the group shares; 0 without.
      segment_starts: positions at which a trajectory begins again after what it shares, in order;
        what comes before is not seen from there on.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    behavior_logprobs: np.ndarray
    term_weights: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    prefix_length: int = 0
    segment_starts: tuple[int, ...] = ()

    @property
    def action_mask(self) -> np.ndarray:
        """bool [T]: the targets that some sum counts."""
        counted = self.weights != 0
        return counted if self.term_weights is None else counted | self.term_weights.any(axis=0)

    @property
    def num_positions(self) -> int:
        """Input positions to run; 0 when there is no action token."""
        return int(self.tokens.shape[0])

    @property
    def positions(self) -> np.ndarray:
        """int32 [T]: of each token in its own segment, the prefix counted."""
        bounds = (0, *self.segment_starts, self.num_positions)
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        return self.prefix_length + np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])


class Lanes(struct.PyTreeNode):
    """R x K lanes padded to one bucket T, the input of one program call.

    Attributes:
      tokens, targets: int32 [R, K, T].
      positions: int32 [R, K, T]; the first of every trajectory, and of each of its segments, is the
        length of its prefix.
      segment_ids: int32 [R, K, T]; 1, 2, ... for the trajectories of a lane, 0 for padding.
      weights: [R, K, T] in at least float32: a packed lane's hold its advantages too.
      behavior_logprobs: float32 [R, K, T].
      action_mask: bool [R, K, T]; the target is an action token.
      prefix_length: int32 [R, K].
      slot: int32 [R, K]; the prompt slot of the lane's group, if it has a prefix.
      adjoint_slot: int32 [R, K]; where the prompt's share of the gradient goes: the same slot, or
        that of a held gradient. Of a segment, where its residuals are kept.
      num_lanes: int32 [R], all equal; lanes from here on are empty on every replica and cost
        nothing.
      advantages: [R, K, T] as `weights`; None unless the objective streams by GROUP.
      term_weights: [R, K, M, T] as `weights`; None without term sums.
      reference_logprobs: float32 [R, K, T]; None unless a term needs them.
    """

    tokens: jax.Array
    targets: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    weights: jax.Array
    behavior_logprobs: jax.Array
    action_mask: jax.Array
    prefix_length: jax.Array
    slot: jax.Array
    adjoint_slot: jax.Array
    num_lanes: jax.Array
    advantages: jax.Array | None = None
    term_weights: jax.Array | None = None
    reference_logprobs: jax.Array | None = None


class Prompts(struct.PyTreeNode):
    """One prompt a replica, padded to one bucket P.

    Attributes:
      tokens: int32 [R, P].
      length: int32 [R]; 0 where the replica has none.
      slot: int32 [R].
    """

    tokens: jax.Array
    length: jax.Array
    slot: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaneItem:
    """What goes into one lane.

    Attributes:
      examples: of one prefix; more than one are packed.
      scales: factors of their token weights.
      advantages: A of each where the score reads it, otherwise none.
    """

    examples: tuple[Example, ...]
    scales: tuple[float, ...] = (1.0,)
    advantages: tuple[float, ...] = ()
    slot: int = 0
    adjoint_slot: int = 0


def make_example(
    prompt_ids: np.ndarray,
    tokens: TrajectoryTokens,
    objective: Objective,
    *,
    is_shared: bool = False,
) -> Example:
    """Joins prompt and trajectory, shifts targets, and trims what carries no gradient.

    Args:
      prompt_ids: int32 [P], P >= 1.
      tokens: what followed the prompt.
      is_shared: leave out what comes before the prompt's last token.

    Raises:
      ValueError: reference log-probabilities are missing, or the objective's token weights invalid.
    """
    if objective.needs_reference and tokens.reference_logprobs is None:
        raise ValueError(
            f"objective {objective.name!r} reads a reference policy, and the trajectory has no "
            "reference_logprobs: give them with its tokens"
        )
    num_prompt = prompt_ids.shape[0]
    begin = num_prompt - 1 if is_shared and tokens.num_action_tokens else 0
    ids = np.concatenate([prompt_ids, tokens.token_ids]).astype(np.int32)
    sequences = [
        np.concatenate([np.arange(begin, num_prompt), num_prompt + np.arange(*part)])
        for part in _trimmed_segments(tokens)
    ]
    nothing = np.zeros(0, np.intp)
    inputs = np.concatenate([nothing, *(sequence[:-1] for sequence in sequences)])
    targets = np.concatenate([nothing, *(sequence[1:] for sequence in sequences)])
    ends = itertools.accumulate(len(sequence) - 1 for sequence in sequences)

    def targeted(values: np.ndarray) -> np.ndarray:
        """[..., tokens] with zeros for the prompt, at the targets."""
        zeros = np.zeros((*values.shape[:-1], num_prompt), values.dtype)
        return np.concatenate([zeros, values], axis=-1)[..., targets]

    reference = tokens.reference_logprobs if objective.needs_reference else None
    terms = term_weights(objective, tokens.action_mask) if objective.term_sums else None
    return Example(
        tokens=ids[inputs],
        targets=ids[targets],
        weights=targeted(token_weights(objective, tokens.action_mask)),
        behavior_logprobs=targeted(tokens.behavior_logprobs),
        term_weights=None if terms is None else targeted(terms),
        reference_logprobs=None if reference is None else targeted(reference),
        prefix_length=begin,
        segment_starts=tuple(ends)[:-1],
    )


def _trimmed_segments(tokens: TrajectoryTokens) -> list[tuple[int, int]]:
    """The ranges of a trajectory's segments up to their last action tokens, where they have any."""
    bounds = (0, *tokens.segment_starts, tokens.num_tokens)
    found = []
    for begin, end in itertools.pairwise(bounds):
        actions = np.flatnonzero(tokens.action_mask[begin:end])
        if actions.size:
            found.append((begin, begin + int(actions[-1]) + 1))
    return found


def bucket_of(num_positions: int, buckets: Sequence[int]) -> int:
    """The shortest bucket that holds `num_positions`; ValueError when none does."""
    at = bisect.bisect_left(buckets, num_positions)
    if at == len(buckets):
        raise ValueError(f"{num_positions} positions exceed the longest bucket {buckets[-1]}")
    return buckets[at]


def lanes_per_call(tokens_per_step: int, bucket: int) -> int:
    """K of a step of shape (K, T): K x T is about `tokens_per_step`."""
    return max(1, tokens_per_step // bucket)


def pad_lanes(
    replicas: Sequence[Sequence[LaneItem]],
    lanes_per_call: int,
    bucket: int,
    weight_dtype: Any = np.float32,
    *,
    objective: Objective | None = None,
) -> Lanes:
    """Pads every replica's lanes, at most `lanes_per_call` of at most `bucket` positions.

    Args:
      objective: says which of the optional arrays there are; without it none is.
    """
    longest = max(len(items) for items in replicas)
    if longest > lanes_per_call:
        raise ValueError(f"{longest} lanes do not fit a call of {lanes_per_call}")
    shape = (len(replicas), lanes_per_call)

    def zeros(*shape: int, dtype: Any = np.int32) -> Any:
        return np.zeros(shape, dtype)

    num_lanes: Any = np.full(len(replicas), longest, np.int32)
    optional: dict[str, Any] = {}
    if objective is not None and not objective.is_linear:
        optional["advantages"] = zeros(*shape, bucket, dtype=weight_dtype)
    if objective is not None and objective.term_sums:
        size = (*shape, len(objective.term_sums), bucket)
        optional["term_weights"] = zeros(*size, dtype=weight_dtype)
    if objective is not None and objective.needs_reference:
        optional["reference_logprobs"] = zeros(*shape, bucket, dtype=np.float32)
    lanes = Lanes(
        tokens=zeros(*shape, bucket),
        targets=zeros(*shape, bucket),
        positions=zeros(*shape, bucket),
        segment_ids=zeros(*shape, bucket),
        weights=zeros(*shape, bucket, dtype=weight_dtype),
        behavior_logprobs=zeros(*shape, bucket, dtype=np.float32),
        action_mask=zeros(*shape, bucket, dtype=np.bool_),
        prefix_length=zeros(*shape),
        slot=zeros(*shape),
        adjoint_slot=zeros(*shape),
        num_lanes=num_lanes,
        **optional,
    )
    for replica, items in enumerate(replicas):
        for at, item in enumerate(items):
            _fill_lane(lanes, (replica, at), item)
    return lanes


def _fill_lane(lanes: Any, lane: tuple[int, int], item: LaneItem) -> None:
    """Writes an item's examples one after the other into a lane."""
    begin = 0
    for number, (example, scale) in enumerate(zip(item.examples, item.scales, strict=True), 1):
        end = begin + example.num_positions
        part = (*lane, slice(begin, end))
        lanes.tokens[part] = example.tokens
        lanes.targets[part] = example.targets
        lanes.positions[part] = example.positions
        lanes.segment_ids[part] = number
        lanes.weights[part] = example.weights * lanes.weights.dtype.type(scale)
        lanes.behavior_logprobs[part] = example.behavior_logprobs
        lanes.action_mask[part] = example.action_mask
        if lanes.advantages is not None:
            lanes.advantages[part] = item.advantages[number - 1]
        if lanes.term_weights is not None:
            lanes.term_weights[(*lane, slice(None), slice(begin, end))] = example.term_weights
        if lanes.reference_logprobs is not None:
            lanes.reference_logprobs[part] = example.reference_logprobs
        begin = end
    lanes.prefix_length[lane] = item.examples[0].prefix_length
    lanes.slot[lane] = item.slot
    lanes.adjoint_slot[lane] = item.adjoint_slot


def pad_prompts(replicas: Sequence[tuple[np.ndarray, int] | None], bucket: int) -> Prompts:
    """Pads one (prefix ids, slot) a replica, or None for a replica that does nothing."""
    num_replicas = len(replicas)
    arrays: dict[str, Any] = {
        "tokens": np.zeros((num_replicas, bucket), np.int32),
        "length": np.zeros(num_replicas, np.int32),
        "slot": np.zeros(num_replicas, np.int32),
    }
    for replica, prompt in enumerate(replicas):
        if prompt is not None:
            ids, slot = prompt
            arrays["tokens"][replica, : len(ids)] = ids
            arrays["length"][replica] = len(ids)
            arrays["slot"][replica] = slot
    return Prompts(**arrays)
