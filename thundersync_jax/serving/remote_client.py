"""`RemotePolicyClient`: a `PolicyClient` of a `PolicyServer` in another process, over gRPC.

Every turn is one call with a deadline, answered by one message. While the server is away a call
waits for it until that deadline; one that was running when the server died fails at once, and its
connection is given up before that is said, so that what is sent next waits for the next server.
Sessions cost nothing there: each turn prefills its whole context again, and `release` only ends a
turn that is in flight.
Used from one asyncio loop; made and closed there by a main.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc

from thundersync_jax.serving.jetstream_compat import jetstream_pb2_grpc
from thundersync_jax.serving.wire import decode_tokens, encode_request
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import FinishReason, SampleRequest, SampleResult

_CHANNEL_OPTIONS = (
    # A restarted server is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_GIVE_UP_S = 1.0  # the most that a broken connection may take to be known as one
_NO_SLOT = -1  # the protocol has no field for the row that served a turn


class RemotePolicyClient:
    """Samples turns at `address`. Implements `transport.client.PolicyClient`.

    Args:
      timeout_s: of every call, connection included; above 0.
      max_context: the server's model.max_context, by which a full row is told from a spent budget.
    """

    def __init__(self, address: str, *, timeout_s: float, max_context: int) -> None:
        if not timeout_s > 0:
            raise ServingError(f"timeout_s = {timeout_s}: expected seconds above 0")
        self._address = address
        self._timeout_s = timeout_s
        self._max_context = max_context
        self._channel: Any = None
        self._calls: dict[TrajectoryKey, Any] = {}

    def start(self) -> None:
        """Opens the channel; called on the loop that samples."""
        self._channel = grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        self._stub = jetstream_pb2_grpc.OrchestratorStub(self._channel)

    async def close(self) -> None:
        """Ends turns in flight and closes the channel; a second time it does nothing."""
        channel, self._channel = self._channel, None
        for session in tuple(self._calls):
            await self.release(session)
        if channel is not None:
            await channel.close()

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one turn; its cancellation frees the slot. Raises ServingError."""
        session = request.session
        if self._channel is None:
            raise ServingError(f"{session}: the client is not open: start() first, close() last")
        if session in self._calls:
            raise ServingError(f"{session} already has a turn in flight at {self._address}")
        started_s = time.monotonic()
        message = encode_request(request)
        call = self._stub.Decode(message, timeout=self._timeout_s, wait_for_ready=True)
        self._calls[session] = call
        columns: list[int] = []
        try:
            async for response in call:
                columns += response.stream_content.samples[0].token_ids
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self._give_up_connection()
            raise ServingError(self._explain(session, error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ServingError(f"{session} was released during its turn") from None
        finally:
            call.cancel()  # after the answer it does nothing
            del self._calls[session]
        token_ids, logprobs, policy_versions = decode_tokens(columns)
        return SampleResult(
            token_ids=token_ids,
            logprobs=logprobs,
            policy_versions=policy_versions,
            finish_reason=self._finish_reason(request, token_ids),
            slot=_NO_SLOT,
            started_s=started_s,
            ended_s=time.monotonic(),
        )

    async def release(self, session: TrajectoryKey) -> None:
        """Ends the session's turn if one is in flight."""
        call = self._calls.get(session)
        if call is not None:
            call.cancel()

    async def _give_up_connection(self) -> None:
        """Returns once the channel is not ready, or is again: a call that is sent while it still
        looks ready goes to the server that is gone.
        """
        ready, channel = grpc.ChannelConnectivity.READY, self._channel
        # UsageError: the client was closed meanwhile.
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):
            async with asyncio.timeout(_GIVE_UP_S):
                if channel is not None and channel.get_state() is ready:
                    await channel.wait_for_state_change(ready)

    def _finish_reason(self, request: SampleRequest, token_ids: tuple[int, ...]) -> FinishReason:
        if token_ids and token_ids[-1] in request.sampling.stop_ids:
            return FinishReason.STOP
        if len(request.context_ids) + len(token_ids) == self._max_context:
            return FinishReason.CONTEXT
        return FinishReason.LENGTH

    def _explain(self, session: TrajectoryKey, error: grpc.aio.AioRpcError) -> str:
        """What became of a call, and of which session."""
        cause = error.details()
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                return f"refused by {self._address}: {cause}"  # names the session
            case grpc.StatusCode.CANCELLED | grpc.StatusCode.RESOURCE_EXHAUSTED:
                return (
                    f"{session}: the server at {self._address} did not take the turn ({cause}): "
                    "it does so when too many are open, try again with fewer at a time"
                )
            case grpc.StatusCode.UNAVAILABLE:
                return f"{session}: the server at {self._address} is gone: {cause}"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                state = self._channel.get_state()
                if state is grpc.ChannelConnectivity.READY:
                    return f"{session}: no turn from {self._address} within {self._timeout_s} s"
                return (
                    f"{session}: no server at {self._address} within {self._timeout_s} s (the "
                    f"connection is {state.name}): is it started?"
                )
            case code:
                return f"{session}: {self._address} answered {code.name}: {cause}"
