"""What a learner refuses of prompts and token ids: who, the value, what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thundersync_jax.learner.groups import LearnerError


def check_prompt(
    task_id: str, prompt_ids: Sequence[int], *, vocab_size: int, longest: int
) -> np.ndarray:
    """The prompt as int32 [P]; LearnerError for an empty or over-long one, or foreign ids."""
    prompt = np.asarray(prompt_ids)
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype.kind not in "iu":
        raise LearnerError(
            f"task {task_id!r}: a prompt is a list of at least one token id, got {prompt_ids!r}"
        )
    check_ids(f"task {task_id!r}", prompt, vocab_size)
    if prompt.size > longest:
        raise LearnerError(
            f"task {task_id!r}: a prompt of {prompt.size} tokens exceeds the longest bucket "
            f"{longest}; shorten it or extend learner.buckets"
        )
    return prompt.astype(np.int32)


def check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        outside = ids[(ids < 0) | (ids >= vocab_size)].tolist()
        raise LearnerError(
            f"{name}: token ids {outside[:4]} are outside the vocabulary of {vocab_size}: the "
            "tokenizer's must not exceed the model's"
        )


def check_length(name: str, num_positions: int, longest: int) -> None:
    if num_positions > longest:
        raise LearnerError(
            f"{name}: {num_positions + 1} tokens exceed the longest bucket {longest} + 1; shorten "
            "it, or extend learner.buckets, and model.max_context with them"
        )
