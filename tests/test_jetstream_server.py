"""The served engine's own corners: an engine that raises, messages that are no turns, the Driver's
free slots, and the form of a turn on the wire.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import CONFIG, ROW_LENGTH, SERVING, policy, request

from thundersync_jax.errors import ConfigError
from thundersync_jax.serving.jetstream_compat import jetstream_pb2, jetstream_pb2_grpc
from thundersync_jax.serving.jetstream_server import DrivenEngine, FreeSlots, PolicyServer
from thundersync_jax.serving.remote_client import RemotePolicyClient
from thundersync_jax.serving.request_check import check_request
from thundersync_jax.serving.supervision import is_serving, reserved_port
from thundersync_jax.serving.wire import (
    decode_request,
    decode_tokens,
    encode_request,
    encode_tokens,
)
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SamplingParams

pytestmark = pytest.mark.optimized

TIMEOUT_S = 30.0
MAX_OPEN_TURNS = 9


class BrokenEngine(DrivenEngine):
    """Fails in one of its calls, once it is told to, when `is_due` lets it."""

    broken: str = ""
    is_due = threading.Event()

    def prefill(self, **arguments: Any) -> Any:
        self._check("prefill")
        return super().prefill(**arguments)

    def generate(self, *arguments: Any) -> Any:
        self._check("generate")
        return super().generate(*arguments)

    def _check(self, name: str) -> None:
        if self.broken == name:
            assert self.is_due.wait(TIMEOUT_S)
            raise RuntimeError("the device is gone")


@pytest.fixture
def engine() -> BrokenEngine:
    engine = BrokenEngine(CONFIG, SERVING, ROW_LENGTH)
    engine.warm_up(with_prefill=True)
    engine.weights.publish(policy(), 7)
    engine.is_due.clear()
    return engine


@pytest.fixture
def address(engine: BrokenEngine) -> Iterator[str]:
    """Of a server of `engine` in this process."""
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    with reserved_port(0) as port:
        server = PolicyServer(engine, port, max_open_turns=MAX_OPEN_TURNS)
        server.start()
        engine.server = server
        assert (logging.getLogger().level, logging.getLogger().handlers) == before
        yield f"127.0.0.1:{port}"
        assert server.close(TIMEOUT_S)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_an_engine_that_raises_is_named_in_every_open_turn_and_ends_its_server(
    engine: BrokenEngine, address: str, call: str
) -> None:
    async def main() -> None:
        client = RemotePolicyClient(address, timeout_s=TIMEOUT_S, max_context=ROW_LENGTH)
        client.start()
        assert set((await client.sample(request(0, (1, 2)))).policy_versions) == {7}
        assert is_serving(address, 5.0)
        engine.broken = call
        turns = [
            asyncio.create_task(client.sample(request(i, (1, 2)))) for i in range(MAX_OPEN_TURNS)
        ]
        await asyncio.sleep(0.2)
        with pytest.raises(
            ServingError, match=r"index 99: the server at .* did not take .*try again"
        ):
            await client.sample(request(99, (1, 2)))
        engine.is_due.set()
        for i, error in enumerate(await asyncio.gather(*turns, return_exceptions=True)):
            assert re.search(f"index {i}: .*the device is gone", str(error)), error
        with pytest.raises(ServingError, match=r"index 0: .*the device is gone"):
            await client.sample(request(0, (1, 2)))
        await client.close()

    run(main)
    assert engine.server.wait(TIMEOUT_S)
    assert isinstance(engine.server.failure, RuntimeError)
    assert f"{call} thread" in str(engine.server.failure.__notes__)
    assert not is_serving(address, 5.0)


def test_messages_that_are_no_turns_are_refused(engine: BrokenEngine, address: str) -> None:
    """Each of these would end JetStream's process, or be answered with nonsense."""
    good = encode_request(request(0, (1, 2)))
    header = json.loads(good.session_cache)
    text = jetstream_pb2.DecodeRequest(text_content={"text": "hello"}, max_tokens=3)

    def changed(**sampling: Any) -> Any:
        values = header | {"sampling": header["sampling"] | sampling}
        return jetstream_pb2.DecodeRequest(
            session_cache=json.dumps(values), token_content=good.token_content, max_tokens=3
        )

    async def main() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            for message in (
                jetstream_pb2.DecodeRequest(),
                text,
                jetstream_pb2.DecodeRequest(token_content=good.token_content, max_tokens=3),
                jetstream_pb2.DecodeRequest(
                    session_cache="cache", token_content=good.token_content, max_tokens=3
                ),
                changed(seed="3"),
                changed(seed=1.5),
                changed(top_k=2**40),
                changed(stop_ids=[2**40]),
                changed(temperature="hot"),
                changed(temperature=None),
                changed(unknown=1),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Decode(message, timeout=TIMEOUT_S):
                        pass
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, message
            messages = [m async for m in stub.Decode(good, timeout=TIMEOUT_S)]
            assert len(messages) == 1  # a turn is one message

    run(main)


def test_a_session_has_one_turn_in_flight(engine: BrokenEngine, address: str) -> None:
    async def main() -> None:
        client = RemotePolicyClient(address, timeout_s=TIMEOUT_S, max_context=ROW_LENGTH)
        client.start()
        first = asyncio.create_task(client.sample(request(0, (1, 2))))
        await asyncio.sleep(0)
        with pytest.raises(ServingError, match="index 0 already has a turn"):
            await client.sample(request(0, (1, 2)))
        await first
        with pytest.raises(ServingError, match=r"index 1: .*int32"):
            await client.sample(request(1, (1, 2**40)))
        await client.close()
        with pytest.raises(ServingError, match="index 0: the client is not open"):
            await client.sample(request(0, (1, 2)))

    run(main)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port} "), reserved_port(port):
            pass


def test_slots_that_the_detokenize_thread_gives_back_wait_for_collect() -> None:
    slots = FreeSlots(2)
    slots.put(0)

    def give_back() -> None:
        slots.giver = threading.get_ident()
        slots.put(1)

    thread = threading.Thread(target=give_back)
    thread.start()
    thread.join(TIMEOUT_S)
    assert slots.qsize() == 1
    slots.collect()
    assert slots.qsize() == 2 and {slots.get(), slots.get()} == {0, 1}


IDS = st.integers(0, 2**31 - 1)
REQUESTS = st.builds(
    SampleRequest,
    session=st.builds(TrajectoryKey, step=IDS, group=IDS, index=IDS),
    context_ids=st.lists(IDS, min_size=1, max_size=5).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=st.just(0.0) | st.floats(1e-6, 1e3),
        top_k=IDS,
        top_p=st.floats(1e-6, 1),
        stop_ids=st.frozensets(IDS, max_size=8),
        max_tokens=st.integers(1, 2**31 - 1),
        seed=st.integers(),
    ),
    policy_version=st.none() | IDS,
)


@settings(deadline=None)
@given(REQUESTS)
def test_a_request_crosses_the_wire_unchanged(asked: SampleRequest) -> None:
    check_request(asked, row_length=5, vocab_size=2**31)
    message = jetstream_pb2.DecodeRequest.FromString(encode_request(asked).SerializeToString())
    token_ids = list(message.token_content.token_ids)
    assert decode_request(message.session_cache, message.max_tokens, token_ids) == asked


@settings(deadline=None)
@given(st.lists(st.tuples(IDS, st.floats(-1000, 0, width=32), IDS)))
def test_tokens_cross_the_wire_bit_for_bit(rows: list[tuple[int, float, int]]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    back = decode_tokens(encode_tokens(*columns))
    assert [list(column) for column in back] == columns


@settings(deadline=None)
@given(st.text() | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_a_header_that_is_none_is_a_serving_error(header: str) -> None:
    with pytest.raises(ServingError, match="session_cache"):
        decode_request(header, 1, [1])


def test_columns_of_another_server_are_a_serving_error() -> None:
    with pytest.raises(ServingError, match="4 columns"):
        decode_tokens(np.arange(4).tolist())
