"""Which requests a row can serve: one check for both decode loops, and its part for the scorer.

Called before a request changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from thundersync_jax.serving.decode_state import MAX_STOP_IDS
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SamplingParams

_INT32_MAX = 2**31 - 1


def check_request(
    request: SampleRequest,
    known: tuple[int, ...] = (),
    *,
    row_length: int,
    vocab_size: int,
    has_text: bool = False,
) -> None:
    """Raises ServingError for a turn that cannot follow the `known` tokens of its session.

    has_text: stop strings can be looked for.
    """
    _check_sampling(request.session, request.sampling, has_text)
    check_context(
        request.session, request.context_ids, known, row_length=row_length, vocab_size=vocab_size
    )


def check_context(
    session: TrajectoryKey,
    context_ids: tuple[int, ...],
    known: tuple[int, ...],
    *,
    row_length: int,
    vocab_size: int,
    least: int = 1,
) -> None:
    """Raises ServingError unless `least` tokens or more that follow the known ones fit in a row."""
    if context_ids[: len(known)] != known:
        raise ServingError(
            f"{session}: context_ids differ at index {_first_difference(context_ids, known)} from "
            f"the {len(known)} tokens that the session has; a request may only append. Release the "
            "session to start over"
        )
    if not least <= len(context_ids) <= row_length:
        raise ServingError(
            f"{session}: a context of {len(context_ids)} tokens; a row takes {least} to "
            f"{row_length} (model.max_context)"
        )
    new = context_ids[len(known) :]
    if new and not 0 <= min(new) <= max(new) < vocab_size:
        raise ServingError(
            f"{session}: token ids from {min(new)} to {max(new)} are outside the vocabulary of "
            f"{vocab_size}"
        )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _check_sampling(session: TrajectoryKey, sampling: SamplingParams, has_text: bool) -> None:
    is_possible = (
        1 <= sampling.max_tokens <= _INT32_MAX
        and 0 <= sampling.temperature < math.inf
        and 0 <= sampling.top_k <= _INT32_MAX
        and 0 < sampling.top_p <= 1
        and len(sampling.stop_ids) <= MAX_STOP_IDS
        and all(0 <= stop_id <= _INT32_MAX for stop_id in sampling.stop_ids)
        and all(sampling.stop_strings)
    )
    if not is_possible:
        raise ServingError(
            f"{session}: {sampling} cannot be served: expected max_tokens >= 1, a finite "
            f"temperature >= 0, top_k >= 0, 0 < top_p <= 1, at most {MAX_STOP_IDS} stop_ids >= 0, "
            "int32 all of them, and no empty stop string"
        )
    if sampling.stop_strings and not has_text:
        raise ServingError(
            f"{session}: stop_strings = {sampling.stop_strings!r} need text, and this server has "
            "ids only: ask for stop_ids, or give ServingWorker a decode function"
        )
