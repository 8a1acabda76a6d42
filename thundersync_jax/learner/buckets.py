"""Static shapes for trajectories of any length: a ladder of padded lengths, and padding in numpy.

Padding happens on the host because padding on the device would compile one program per length.
Everything after the last action token has an exactly zero gradient and is trimmed first.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from thundersync_jax.losses.score import token_weights
from thundersync_jax.trajectory import TrajectoryTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One trajectory as the learner differentiates it: inputs and shifted targets, trimmed, not yet
    padded.

    Attributes:
      tokens, targets: int32 [T]; position t predicts targets[t].
      weights: float32 [T]; 0 where the target is not an action token.
      behavior_logprobs: float32 [T], aligned with `targets`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    behavior_logprobs: np.ndarray

    @property
    def num_positions(self) -> int:
        """Input positions to run; 0 when there is no action token."""
        return int(self.tokens.shape[0])


class Lanes(struct.PyTreeNode):
    """K examples padded to one bucket T, the input of one program call.

    Attributes:
      tokens, targets: int32 [K, T].
      weights, behavior_logprobs: float32 [K, T].
      num_positions: int32 [K]; 0 for an empty lane.
      num_lanes: int32 []; lanes from here on are empty and cost nothing.
    """

    tokens: jax.Array
    targets: jax.Array
    weights: jax.Array
    behavior_logprobs: jax.Array
    num_positions: jax.Array
    num_lanes: jax.Array


def make_example(prompt_ids: np.ndarray, tokens: TrajectoryTokens, normalizer: str) -> Example:
    """Joins prompt and trajectory, shifts targets, and trims what carries no gradient.

    Args:
      prompt_ids: int32 [P], P >= 1.
      tokens: what followed the prompt.
      normalizer: see `losses.score.token_weights`.
    """
    num_prompt = prompt_ids.shape[0]
    actions = np.flatnonzero(tokens.action_mask)
    end = num_prompt + int(actions[-1]) + 1 if actions.size else 1
    ids = np.concatenate([prompt_ids, tokens.token_ids])[:end].astype(np.int32)
    not_sampled = np.zeros(num_prompt, np.float32)
    weights = np.concatenate([not_sampled, token_weights(tokens.action_mask, normalizer)])[:end]
    logprobs = np.concatenate([not_sampled, tokens.behavior_logprobs])[:end]
    return Example(
        tokens=ids[:-1], targets=ids[1:], weights=weights[1:], behavior_logprobs=logprobs[1:]
    )


def bucket_of(num_positions: int, buckets: Sequence[int]) -> int:
    """The shortest bucket that holds `num_positions`; ValueError when none does."""
    at = bisect.bisect_left(buckets, num_positions)
    if at == len(buckets):
        raise ValueError(f"{num_positions} positions exceed the longest bucket {buckets[-1]}")
    return buckets[at]


def pad_lanes(examples: Sequence[Example], num_lanes: int, bucket: int) -> Lanes:
    """Pads at most `num_lanes` examples of at most `bucket` positions, on the host."""
    if len(examples) > num_lanes:
        raise ValueError(f"{len(examples)} examples do not fit {num_lanes} lanes")
    shape = (num_lanes, bucket)
    arrays: dict[str, Any] = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
        "behavior_logprobs": np.zeros(shape, np.float32),
    }
    num_positions = np.zeros(num_lanes, np.int32)
    for lane, example in enumerate(examples):
        num_positions[lane] = example.num_positions
        for name, array in arrays.items():
            array[lane, : example.num_positions] = getattr(example, name)
    arrays |= {"num_positions": num_positions, "num_lanes": np.asarray(len(examples), np.int32)}
    return Lanes(**arrays)


def lanes_shape(num_lanes: int, bucket: int) -> Lanes:
    """The abstract value of `pad_lanes`' result, for compilation ahead of time."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), pad_lanes([], num_lanes, bucket)
    )
