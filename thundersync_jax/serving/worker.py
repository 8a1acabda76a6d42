"""`ServingWorker`: the co-located decode loop behind `PolicyClient`, one thread, always batching.

Invariants:
  * The decode thread alone touches the `DecodeState`, the `SlotTable` and the `WeightStore`; others
    send it commands through one queue, which it empties between two device calls. Its users bound
    the queue: a session has at most one turn.
  * Every accepted turn gets one answer, on its caller's event loop: a result or a ServingError.
  * Weights change only while no session is open, so no trajectory mixes versions.
  * An exception in the thread ends the worker: it is given to every waiter, and to the owner by
    `publish` and `close`.
Made and owned by a main; used by rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterable

from thundersync_jax.model.transformer import Params
from thundersync_jax.serving.decode_state import DecodeState
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.slots import Finished, SlotTable, Turn
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SampleResult

_Future = asyncio.Future[SampleResult]
_Answer = tuple[_Future, SampleResult | ServingError]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Submit:
    turn: Turn
    future: _Future


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Release:
    """Closes a session, ending its turn if it has one."""

    session: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Publish:
    params: Params
    version: int
    refusal: queue.SimpleQueue[ServingError | None]


class _Close:
    """Ends the thread."""


_Command = _Submit | _Release | _Publish | _Close


class ServingWorker:
    """Samples turns of many sessions on one engine. Implements `transport.client.PolicyClient`."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._timeout_s = engine.serving.request_timeout_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._table = SlotTable(
            num_slots=engine.serving.num_slots,
            row_length=engine.row_length,
            vocab_size=engine.config.vocab_size,
        )
        self._futures: dict[Turn, _Future] = {}
        self._is_open = True  # commands are taken; changed under the lock, so that none is lost
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._failure: BaseException | None = None

    @property
    def num_decoding(self) -> int:
        """Turns that occupy the device at this moment; read from any thread."""
        return self._table.num_decoding

    def warm_up(self) -> None:
        """Compiles what the loop needs; `start` does it otherwise."""
        self._engine.warm_up()

    def start(self) -> None:
        self.warm_up()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, failing turns in flight; raises what the thread died of."""
        with contextlib.suppress(ServingError):
            self._send(_Close())
        if self._thread.ident is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise ServingError(f"the decode thread did not end within {self._timeout_s} s")
        self._raise_failure()

    def publish(self, params: Params, version: int) -> None:
        """Copies new weights into the engine; blocks until that is done.

        Raises ServingError, and changes nothing, while a session is open.
        """
        refusal: queue.SimpleQueue[ServingError | None] = queue.SimpleQueue()
        self._send(_Publish(params=params, version=version, refusal=refusal))
        try:
            error = refusal.get(timeout=self._timeout_s)
        except queue.Empty:
            raise ServingError(
                f"weights of version {version} were not taken within {self._timeout_s} s"
            ) from None
        if error is not None:
            raise error

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one turn. Its cancellation or deadline closes the session and frees its slot."""
        turn, future = Turn(request=request), asyncio.get_running_loop().create_future()
        self._send(_Submit(turn=turn, future=future))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await future
        except asyncio.CancelledError:
            await self.release(request.session)
            raise
        except TimeoutError:
            await self.release(request.session)
            raise ServingError(
                f"{request.session}: no turn within {self._timeout_s} s "
                f"(serving.request_timeout_s); it was {turn.state.value}"
            ) from None

    async def release(self, session: TrajectoryKey) -> None:
        """Frees the session's row; a turn in flight gets a ServingError."""
        with contextlib.suppress(ServingError):  # a worker that ended holds no rows
            self._send(_Release(session=session))

    def _send(self, command: _Command) -> None:
        with self._lock:
            self._raise_failure()
            if not (self._is_open and self._thread.is_alive()):
                raise ServingError("the decode thread is not running: start() first, close() last")
            self._commands.put(command)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ServingError(f"the decode thread ended: {self._failure!r}") from self._failure

    # Below: the decode thread.

    def _run(self) -> None:
        reason = "the serving worker was closed"
        try:
            self._serve()
        except BaseException as error:  # outermost frame: kept for every waiter and for the owner
            self._failure = error
            reason = f"the decode thread ended: {error!r}"
        self._refuse_everything(reason)

    def _serve(self) -> None:
        state = self._engine.init_decode_state()
        while self._apply_commands():
            self._answer(self._table.start_turns(time.monotonic()))
            state = self._extend(state)
            if self._table.is_generating:
                state, results = self._engine.generate(self._engine.weights, state)
                sampled = self._engine.unpack(results)
                self._answer(self._table.record(sampled, time.monotonic()))

    def _extend(self, state: DecodeState) -> DecodeState:
        pieces = self._table.take_pieces(self._engine.extend_buckets[-1])
        pieces.sort(key=lambda piece: len(piece.token_ids))  # pieces of one bucket share a call
        rows = self._engine.serving.extend_rows
        for begin in range(0, len(pieces), rows):
            state = self._engine.extend(self._engine.weights, state, pieces[begin : begin + rows])
        return state

    def _apply_commands(self) -> bool:
        """Applies what has arrived, waiting for it only when there is nothing to do."""
        is_first = not self._table.has_work
        while True:
            try:
                command = self._commands.get(block=is_first)
            except queue.Empty:
                return True
            is_first = False
            match command:
                case _Submit():
                    self._submit(command)
                case _Release():
                    self._release(command.session)
                case _Publish():
                    command.refusal.put(self._publish(command))
                case _Close():
                    return False

    def _submit(self, command: _Submit) -> None:
        try:
            self._engine.weights.current()
            self._table.submit(command.turn, time.monotonic())
        except ServingError as error:
            _settle_on_loop([(command.future, error)])
        else:
            self._futures[command.turn] = command.future

    def _release(self, session: TrajectoryKey) -> None:
        turn = self._table.close(session)
        if turn is not None:
            error = ServingError(f"{session} was released during its turn")
            _settle_on_loop([(self._futures.pop(turn), error)])

    def _publish(self, command: _Publish) -> ServingError | None:
        sessions = self._table.open_sessions
        if sessions:
            named = ", ".join(str(key) for key in sessions[:4])
            return ServingError(
                f"version {command.version} cannot be published while {len(sessions)} sessions are "
                f"open ({named}): release them first"
            )
        try:
            self._engine.weights.publish(command.params, command.version)
        except ServingError as error:
            return error
        return None

    def _answer(self, finished: Iterable[Finished]) -> None:
        _settle_on_loop([(self._futures.pop(f.turn), f.result) for f in finished])

    def _refuse_everything(self, reason: str) -> None:
        with self._lock:
            self._is_open = False
        _settle_on_loop([(future, ServingError(reason)) for future in self._futures.values()])
        self._futures.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                match self._commands.get_nowait():
                    case _Submit(future=future):
                        _settle_on_loop([(future, ServingError(reason))])
                    case _Publish(refusal=refusal):
                        refusal.put(ServingError(reason))


def _settle_on_loop(answers: list[_Answer]) -> None:
    """Hands a batch of answers to the event loop that waits for them."""
    if answers:
        # A closed loop has no waiters left.
        with contextlib.suppress(RuntimeError):
            answers[0][0].get_loop().call_soon_threadsafe(_settle, answers)


def _settle(answers: list[_Answer]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, ServingError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
