"""Which requests a row can serve: one check for both decode loops, and its part for the scorer.

Called before a request changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from thundersync_jax.config_sampling import sampling_bounds
from thundersync_jax.serving.decode_state import MAX_STOP_IDS
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SamplingParams, ScoreRequest

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


def check_types(request: SampleRequest | ScoreRequest) -> None:
    """Raises ServingError for a value of another type than declared.

    It would fail in the middle of a batch, and every session of the batch with it, so it is checked
    where the caller is.
    """
    if not isinstance(request.session, TrajectoryKey):
        raise ServingError(f"session = {request.session!r}, expected a TrajectoryKey")
    integers: dict[str, Any] = {"context_ids": request.context_ids}
    if isinstance(request, ScoreRequest):
        integers |= {"first": (request.first,)}
    else:
        sampling, version = request.sampling, request.policy_version
        numbers = ("max_tokens", "top_k", "seed")
        integers |= {"stop_ids": sampling.stop_ids, "policy_version": (version or 0,)}
        integers |= {name: (getattr(sampling, name),) for name in numbers}
        _check_each(request.session, (int, float), temperature=(sampling.temperature,))
        _check_each(request.session, (int, float), top_p=(sampling.top_p,))
        _check_each(request.session, (str,), stop_strings=sampling.stop_strings)
    _check_each(request.session, (int,), **integers)
    if not isinstance(request.context_ids, tuple):
        raise ServingError(f"{request.session}: context_ids are no tuple: make them one")


def _check_each(session: TrajectoryKey, kinds: tuple[type, ...], **fields: Any) -> None:
    for name, values in fields.items():
        expected = " or ".join(kind.__name__ for kind in kinds)
        if isinstance(values, str) or not isinstance(values, Collection):
            raise ServingError(f"{session}: {name} = {values!r}, expected a tuple of {expected}")
        wrong = set(map(type, values)) - set(kinds)
        if wrong:
            first = next(value for value in values if type(value) in wrong)
            raise ServingError(f"{session}: {name} has {first!r}, expected {expected}")


def check_version(request: SampleRequest, version: int) -> None:
    """Raises ServingError for a turn that asks for other weights than those of `version`."""
    if request.policy_version not in (None, version):
        raise ServingError(
            f"{request.session} asks for version {request.policy_version}, and the weights are of "
            f"version {version}: release the session and begin it again"
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
    bounds = sampling_bounds(sampling.temperature, sampling.top_k, sampling.top_p)
    for name, (is_valid, expected) in bounds.items():
        if not is_valid:
            raise ServingError(
                f"{session}: {name} = {getattr(sampling, name)!r}, expected {expected}"
            )
    is_possible = (
        1 <= sampling.max_tokens <= _INT32_MAX
        and len(sampling.stop_ids) <= MAX_STOP_IDS
        and all(0 <= stop_id <= _INT32_MAX for stop_id in sampling.stop_ids)
        and all(sampling.stop_strings)
    )
    if not is_possible:
        raise ServingError(
            f"{session}: {sampling} cannot be served: expected max_tokens >= 1, at most "
            f"{MAX_STOP_IDS} stop_ids >= 0, int32 all of them, and no empty stop string"
        )
    if sampling.stop_strings and not has_text:
        raise ServingError(
            f"{session}: stop_strings = {sampling.stop_strings!r} need text, and this server has "
            "ids only: ask for stop_ids, or give ServingWorker a text stream"
        )
