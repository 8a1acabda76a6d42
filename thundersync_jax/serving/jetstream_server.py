"""`PolicyServer`: JetStream's Driver and gRPC server over our engine, with one message a turn.

The Driver's prefill, generate and detokenize threads drive a `DrivenEngine`. Sessions hold no row:
every turn is a prefill of its whole context. Weights do not change while the server runs.

Invariants:
  * Nothing reaches a Driver thread that `check_request` refuses: an exception there ends the
    server, since its state is unknown. The requests that were open are told why, later ones are
    refused, and `failure` says it to the owner, who ends the process.
  * A client that vanished or ran over time gives its slot back at the next result of its row;
    before its prefill, it costs a prefill of one token.
  * Token ids come in and go out as they are: there is no tokenizer, and no BOS is added.

Owned by the process that `serve.py` supervises, and by tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import numpy as np

from thundersync_jax.serving.engine import PolicyEngine, PrefillInput
from thundersync_jax.serving.jetstream_compat import make_server, orchestrator, tokenizer_api
from thundersync_jax.serving.request_check import check_request, check_version
from thundersync_jax.serving.wire import COLUMNS_PER_TOKEN, decode_request
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest

_NO_LIMIT = 2**31 - 1  # the engine ends turns; the Driver's own count would cost one more step
_MAX_DETAILS = 2000  # characters; gRPC drops a status that outgrows its 8 KB of metadata
_MIN_RPC_THREADS = 64  # JetStream's own default


class TokenIds(tokenizer_api.Tokenizer):
    """The tokenizer of a server that has none: clients send and receive ids."""

    def encode(self, s: str, **kwargs: Any) -> Any:
        raise ServingError(f"the text {s[:40]!r} came; this server takes token ids")

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return ""

    @property
    def pad_id(self) -> int:
        return -1

    eos_id = bos_id = pad_id

    @property
    def stop_tokens(self) -> set[int]:
        return set()  # the engine ends turns; a stop id is an ordinary token here


class DrivenEngine(PolicyEngine):
    """What a Driver needs beside the Engine interface.

    Attributes:
      after_generate: called by the thread that generates, after every call.
    """

    after_generate: Callable[[], None] | None = None

    def build_tokenizer(self, metadata: Any) -> TokenIds:
        return TokenIds()

    def generate(self, params: Any, decode_state: Any, **limits: Any) -> tuple[Any, Any]:
        answer = super().generate(params, decode_state, **limits)
        if self.after_generate is not None:
            self.after_generate()
        return answer


class _Turn:
    """The return channel of one request: collects its columns and sends them as one message.

    Stands in for the orchestrator's AsyncMultifuture, which it fills at the end.
    """

    def __init__(self, request: Any, asked: SampleRequest, end: Callable[[_Turn], int]) -> None:
        self.asked = asked
        self._active = request
        self._channel = request.return_channel
        self._end = end
        self._columns: list[int] = []

    @property
    def is_abandoned(self) -> bool:
        """The client went away, or its deadline passed."""
        return self._channel.cancelled()

    def add_result(self, samples: list[Any]) -> None:
        self._columns += samples[0].token_ids
        if self.is_abandoned:
            self._active.complete[:] = True  # the Driver reads this next, and frees the slot

    def close(self) -> None:
        version = self._end(self)
        if len(self._columns) % COLUMNS_PER_TOKEN:
            # The Driver stops at the column that is not valid: the last token's version.
            self._columns.append(version)
        self._send(
            lambda: self._channel.add_result([orchestrator.ReturnSample([], self._columns)]),
            self._channel.close,
        )

    def fail(self, error: ServingError) -> None:
        self._send(lambda: self._channel.set_exception(error))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._channel

    def _send(self, *calls: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has no clients left
            for call in calls:
                call()


class FreeSlots(queue.Queue[int]):
    """Free slots of the Driver; what its detokenize thread gives back counts after `collect`.

    The generate thread asserts, once it took what slots it could fill, that one is taken. Given
    back at that moment, the last slot would end the process.
    """

    giver: int | None = None  # ident of the detokenize thread

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._given: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, item: int, block: bool = True, timeout: float | None = None) -> None:
        if threading.get_ident() == self.giver:
            self._given.put(item)
        else:
            super().put(item, block, timeout)

    def collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                super().put(self._given.get_nowait())


class PolicyDriver(orchestrator.Driver):
    """JetStream's Driver over one engine, which it prefills and generates with.

    Attributes:
      failure: what a thread died of; `live` is then False.
      ended: set when the Driver no longer serves.
    """

    def __init__(self, engine: DrivenEngine, max_open_turns: int) -> None:
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._engine = engine
        self._max_open_turns = max_open_turns
        self._lock = threading.Lock()
        self._open_turns: set[_Turn] = set()
        params = engine.load_params()
        super().__init__(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,  # both on one device: a prefix is not transferred
        )

    # The Driver's constructor makes its queues of slots and starts its threads.

    @property
    def _generate_slots(self) -> list[FreeSlots]:
        return self._slots

    @_generate_slots.setter
    def _generate_slots(self, queues: list[queue.Queue[int]]) -> None:
        self._slots = [FreeSlots(slots.maxsize) for slots in queues]
        self._engine.after_generate = self._slots[0].collect

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Checks a request and queues it; raises ServingError and leaves the others alone.

        Raises queue.Full, which the servicer answers with RESOURCE_EXHAUSTED, when too many wait.
        """
        asked = decode_request(request.history_path, request.max_tokens, request.prefill_content)
        check_request(
            asked,
            row_length=self._engine.row_length,
            vocab_size=self._engine.config.vocab_size,
        )
        check_version(asked, self._engine.weights.current().version)
        request.return_channel = turn = _Turn(request, asked, self._end)
        request.max_tokens = _NO_LIMIT
        with self._lock:
            if not self.live:
                raise ServingError(f"{asked.session}: {self._reason()}")
            if len(self._open_turns) >= self._max_open_turns:
                raise queue.Full
            self._open_turns.add(turn)
        if len(asked.context_ids) == self._engine.row_length:
            turn.close()  # the row is full at the start: a turn of no tokens
        else:
            super().place_request_on_prefill_queue(request)

    def refuse_everything(self) -> None:
        """Ends open turns with the reason; later ones are refused."""
        with self._lock:
            self.live = False
            turns = tuple(self._open_turns)
            self._open_turns.clear()
        for turn in turns:
            turn.fail(ServingError(f"{turn.asked.session}: {self._reason()}"))
        self.ended.set()

    def _process_prefill_content(
        self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> tuple[PrefillInput, int]:
        turn = request.return_channel
        asked, token_ids = turn.asked.sampling, turn.asked.context_ids
        if turn.is_abandoned:
            asked, token_ids = dataclasses.replace(asked, max_tokens=1), token_ids[:1]
        content = PrefillInput(token_ids=np.asarray(token_ids, np.int32), sampling=asked)
        return content, len(token_ids)

    def _prefill_thread(self, idx: int) -> None:
        with self._ending_the_server("prefill"):
            super()._prefill_thread(idx)

    def _transfer_thread(self, idx: int) -> None:
        with self._ending_the_server("transfer"):
            super()._transfer_thread(idx)

    def _generate_thread(self, idx: int) -> None:
        with self._ending_the_server("generate"):
            super()._generate_thread(idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._slots[idx].giver = threading.get_ident()
        with self._ending_the_server("detokenize"):
            super()._detokenize_thread(idx)

    @contextlib.contextmanager
    def _ending_the_server(self, name: str) -> Iterator[None]:
        """A thread's outermost frame: JetStream would kill the process before a client knows."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"in the Driver's {name} thread")
            if self.live:
                self.failure = error
                self.refuse_everything()

    def _end(self, turn: _Turn) -> int:
        """Takes an ended turn off the books; returns the version of the weights it was sampled by.

        It is that of all its tokens: weights do not change while a turn is open.
        """
        with self._lock:
            self._open_turns.discard(turn)
        return self._engine.weights.current().version

    def _reason(self) -> str:
        if self.failure is not None:
            return f"the engine failed, and its server ends: {self.failure!r}"
        return "the server was closed"


class TurnServicer(orchestrator.LLMOrchestrator):
    """JetStream's servicer, with refusals and failures as gRPC statuses."""

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in super().Decode(request, context):
                yield response
        except ServingError as error:
            is_refusal = self._driver.live
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT if is_refusal else grpc.StatusCode.UNAVAILABLE,
                str(error)[:_MAX_DETAILS],
            )

    def _get_prefill_content(self, request: Any) -> tuple[list[int], bool]:
        content = request.WhichOneof("content")
        if content != "token_content":
            raise ServingError(f"content = {content}: this server takes token_content")
        return super()._get_prefill_content(request)


class PolicyServer:
    """Serves an engine that is warm and has weights, on 127.0.0.1:port.

    Args:
      max_open_turns: turns that run or wait; more are refused as RESOURCE_EXHAUSTED.
    """

    def __init__(self, engine: DrivenEngine, port: int, *, max_open_turns: int = 4096) -> None:
        self._engine = engine
        self._port = port
        self._max_open_turns = max_open_turns
        self._driver: PolicyDriver | None = None
        self._server: Any = None

    def start(self) -> None:
        self._driver = PolicyDriver(self._engine, self._max_open_turns)
        threads = max(self._driver.get_total_concurrent_requests(), _MIN_RPC_THREADS)
        self._server = make_server(self._driver, TurnServicer, port=self._port, threads=threads)
        self._server.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the server ended by itself within `timeout_s`; `failure` says of what."""
        assert self._driver is not None
        return self._driver.ended.wait(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        return None if self._driver is None else self._driver.failure

    def close(self, timeout_s: float) -> bool:
        """Fails open turns by name and ends all threads; False when one still runs."""
        assert self._driver is not None
        self._driver.refuse_everything()
        # JetStream's stop has no deadline; an engine call that never returns would hold it.
        stop = threading.Thread(target=self._stop, name="stop", daemon=True)
        stop.start()
        stop.join(timeout_s)
        return not stop.is_alive()

    def _stop(self) -> None:
        self._server.stop()
        self._server._loop.close()  # JetStream leaves it open
