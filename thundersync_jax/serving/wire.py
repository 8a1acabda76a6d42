"""A turn over JetStream's protocol: what its messages have no field for, and where it goes instead.

  * DecodeRequest: `token_content` the context, `max_tokens` the turn's, `session_cache` a JSON
    object of the session and the other sampling parameters.
  * DecodeResponse: one message a turn; `token_ids` holds three int32 a token, which are id, bits of
    the float32 log-probability, and policy version.

Used by the server, which trusts no client, and by `remote_client.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from thundersync_jax.serving.jetstream_compat import jetstream_pb2
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SamplingParams

COLUMNS_PER_TOKEN = 3  # id, bits of the log-probability, policy version

# What reading a header can raise; the last two of a huge number and of a deep nesting.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def encode_request(request: SampleRequest) -> Any:
    """The DecodeRequest of a turn; ServingError where a number has no place in it."""
    sampling = dataclasses.asdict(request.sampling)
    max_tokens = sampling.pop("max_tokens")
    try:
        header = {
            "session": dataclasses.astuple(request.session),
            "sampling": sampling | {"stop_ids": sorted(request.sampling.stop_ids)},
            "policy_version": request.policy_version,
        }
        content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=request.context_ids)
        return jetstream_pb2.DecodeRequest(
            session_cache=json.dumps(header), max_tokens=max_tokens, token_content=content
        )
    except (ValueError, TypeError) as error:
        raise ServingError(
            f"{request.session}: context_ids and max_tokens = {max_tokens} must be int32, stop_ids "
            f"integers ({error})"
        ) from error


def decode_request(header: str, max_tokens: int, token_ids: Sequence[int]) -> SampleRequest:
    """The request of the fields that `encode_request` filled; ServingError when it is none."""
    try:
        values = json.loads(header)
        step, group, index = (_exactly(int, part) for part in values["session"])
        sampling = dict(values["sampling"])
        stop_ids = frozenset(_exactly(int, stop_id) for stop_id in sampling.pop("stop_ids"))
        stop_strings = tuple(_exactly(str, stop) for stop in sampling.pop("stop_strings"))
        for name in ("top_k", "seed"):
            _exactly(int, sampling[name])
        for name in ("temperature", "top_p"):
            sampling[name] = float(sampling[name])
        version = values["policy_version"]
        return SampleRequest(
            session=TrajectoryKey(step=step, group=group, index=index),
            context_ids=tuple(token_ids),
            policy_version=None if version is None else _exactly(int, version),
            sampling=SamplingParams(
                **sampling, stop_ids=stop_ids, stop_strings=stop_strings, max_tokens=max_tokens
            ),
        )
    except _MALFORMED as error:
        raise ServingError(
            f"session_cache = {header[:200]!r} is not the header of a turn "
            f"({type(error).__name__}: {error}); serving/wire.py makes it"
        ) from error


def encode_tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], policy_versions: Sequence[int]
) -> list[int]:
    """The columns of a turn, as the engine's ResultTokens hold them."""
    bits = np.asarray(logprobs, np.float32).view(np.int32)
    return np.stack([token_ids, bits, policy_versions], axis=1).ravel().tolist()


def decode_tokens(columns: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Token ids, log-probabilities and policy versions of a turn, of one length."""
    if len(columns) % COLUMNS_PER_TOKEN:
        raise ServingError(
            f"{len(columns)} columns came, which is no multiple of {COLUMNS_PER_TOKEN}: is it "
            "another server?"
        )
    rows = np.asarray(columns, np.int32).reshape(-1, COLUMNS_PER_TOKEN)
    logprobs = np.ascontiguousarray(rows[:, 1]).view(np.float32)
    return tuple(rows[:, 0].tolist()), tuple(logprobs.tolist()), tuple(rows[:, 2].tolist())


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
