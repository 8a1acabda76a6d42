"""`ServingWorker`: the co-located decode loop behind `PolicyClient`, one thread, always batching.

Invariants:
  * The decode thread alone touches the `DecodeState`, the `SlotTable` and the `WeightStore`; others
    send it commands through one queue, which it empties between two device calls. Its users bound
    the queue: a session has at most one turn.
  * Every accepted turn gets one answer, on its caller's event loop: a result or a ServingError.
  * A session is a lease on the weights of its first turn, from then to its release: new weights
    come in while no session is open, so no trajectory mixes versions. While they wait, turns of
    open sessions go on and turns of new ones are held.
  * An exception in the thread ends the worker: it is given to every waiter, and to the owner by
    `publish` and `close`.
Made and owned by a main; used by rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import time
from collections.abc import Iterable

from thundersync_jax.model.transformer import Params
from thundersync_jax.serving.batch import DecodeBatch
from thundersync_jax.serving.command_thread import CommandThread, answer_of, settle
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.request_check import check_types, check_version
from thundersync_jax.serving.sessions import MakeStream, Turn, TurnState
from thundersync_jax.serving.slots import Finished, SlotTable
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SampleRequest, SampleResult, ServingStatistics

# A turn that has waited for this share of its deadline goes before those of lower groups.
PATIENCE = 0.25

_Future = asyncio.Future[SampleResult]


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
    deadline_s: float
    refusal: queue.SimpleQueue[ServingError | None]


_Command = _Submit | _Release | _Publish


class ServingWorker:
    """Samples turns of many sessions on one engine. Implements `transport.client.PolicyClient`.

    Args:
      make_stream: text of tokens as they come, for requests with stop strings.
    """

    def __init__(self, engine: PolicyEngine, make_stream: MakeStream | None = None) -> None:
        serving = engine.serving
        self._engine = engine
        self._timeout_s = serving.request_timeout_s
        self._batch = DecodeBatch(engine)
        self._table = SlotTable(
            self._batch,
            num_slots=serving.num_slots,
            row_length=engine.row_length,
            vocab_size=engine.config.vocab_size,
            extend_buckets=engine.extend_buckets,
            parked_bytes=serving.parked_bytes,
            host_bytes=serving.host_bytes,
            patience_s=PATIENCE * self._timeout_s,
            make_stream=make_stream,
        )
        self._publishing: _Publish | None = None
        self._held: list[Turn] = []  # of new sessions, while new weights wait
        self._futures: dict[Turn, _Future] = {}
        self._thread: CommandThread[_Command] = CommandThread(
            name="decode thread",
            timeout_s=self._timeout_s,
            serve=self._serve,
            refuse=self._refuse,
        )

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
        self._thread.close()

    def publish(self, params: Params, version: int) -> None:
        """Copies new weights into the engine, once the open sessions are released.

        Blocks until that is done, so it is called outside the event loop unless no session is open.
        Raises ServingError, and changes nothing, when sessions are open for longer than
        `serving.publish_timeout_s`, or while another version is being published.
        """
        patience_s = self._engine.serving.publish_timeout_s
        refusal: queue.SimpleQueue[ServingError | None] = queue.SimpleQueue()
        deadline_s = time.monotonic() + patience_s
        command = _Publish(params=params, version=version, deadline_s=deadline_s, refusal=refusal)
        self._thread.send(command)
        try:
            error = refusal.get(timeout=patience_s + self._timeout_s)
        except queue.Empty:
            raise ServingError(
                f"weights of version {version} were not taken within "
                f"{patience_s + self._timeout_s} s: a call of the device did not return"
            ) from None
        if error is not None:
            raise error

    def statistics(self) -> ServingStatistics:
        """What the loop has done so far."""
        return self._table.statistics

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one turn. Its cancellation or deadline closes the session and frees its slot."""
        check_types(request)
        turn, future = Turn(request=request), asyncio.get_running_loop().create_future()
        self._thread.send(_Submit(turn=turn, future=future))
        return await answer_of(
            future,
            timeout_s=self._timeout_s,
            release=lambda: self.release(request.session),
            over_time=lambda: f"{request.session}: it was {turn.state.value} and had no turn",
        )

    async def release(self, session: TrajectoryKey) -> None:
        """Frees the session's row; a turn in flight gets a ServingError."""
        with contextlib.suppress(ServingError):  # a worker that ended holds no rows
            self._thread.send(_Release(session=session))

    # Below: the decode thread.

    def _serve(self) -> None:
        self._batch.start()
        while self._thread.apply_commands(self._apply, wait_s=self._idle_s()):
            began_s = time.monotonic()
            self._advance_publish(began_s)
            self._answer(self._table.start_turns(began_s))
            self._extend()
            if slots := self._table.generating_slots:
                sampled = self._batch.generate(slots, self._table.until_ended)
                self._answer(self._table.record(sampled, time.monotonic()))
            self._table.count(busy_s=time.monotonic() - began_s)

    def _extend(self) -> None:
        """Runs extensions: all until a row generates, and then few, because that row waits."""
        serving, num_calls = self._engine.serving, 0
        while num_calls < serving.extend_calls or not self._table.generating_slots:
            pieces = self._table.next_pieces(serving.extend_rows)
            if not pieces:
                return
            self._batch.extend(pieces)
            self._table.extended(pieces)
            num_calls += 1

    def _apply(self, command: _Command) -> None:
        match command:
            case _Submit():
                self._submit(command)
            case _Release():
                self._release(command.session)
            case _Publish():
                self._publish(command)

    def _idle_s(self) -> float | None:
        """How long there is nothing to do unless a command comes; None: for ever."""
        if self._table.has_work:
            return 0
        if self._publishing is not None:
            return max(0, self._publishing.deadline_s - time.monotonic())
        return None

    def _submit(self, command: _Submit) -> None:
        turn = command.turn
        self._futures[turn] = command.future
        if self._publishing is not None and not self._table.is_open(turn.request.session):
            turn.move(TurnState.HELD)
            self._held.append(turn)
        else:
            self._admit(turn)

    def _admit(self, turn: Turn) -> None:
        request = turn.request
        try:
            check_version(request, self._engine.weights.current().version)
            self._table.submit(turn, time.monotonic())
        except ServingError as error:
            self._settle(turn, error)

    def _release(self, session: TrajectoryKey) -> None:
        ended = [turn for turn in self._held if turn.request.session == session]
        self._held = [turn for turn in self._held if turn not in ended]
        if running := self._table.close(session):
            ended.append(running)
        for turn in ended:
            self._settle(turn, ServingError(f"{session} was released during its turn"))

    def _publish(self, command: _Publish) -> None:
        if self._publishing is None:
            self._publishing = command
            return
        command.refusal.put(
            ServingError(
                f"version {command.version} cannot be published while version "
                f"{self._publishing.version} waits for open sessions: one at a time"
            )
        )

    def _advance_publish(self, now_s: float) -> None:
        """Swaps the weights if no session is open, and gives up at the deadline."""
        publish, sessions = self._publishing, self._table.open_sessions
        if publish is None or (sessions and now_s < publish.deadline_s):
            return
        refusal = None
        if sessions:
            named = ", ".join(str(key) for key in sessions[:4])
            refusal = ServingError(
                f"version {publish.version} was not published: after "
                f"{self._engine.serving.publish_timeout_s} s (serving.publish_timeout_s) "
                f"{len(sessions)} sessions are still open ({named}). Release them"
            )
        else:
            try:
                self._engine.weights.publish(publish.params, publish.version)
            except ServingError as error:
                refusal = error
            else:
                self._table.forget_rows()
                self._table.count(num_publishes=1)
        self._publishing = None
        publish.refusal.put(refusal)
        held, self._held = self._held, []
        for turn in held:
            turn.move(TurnState.WAITING)
            self._admit(turn)

    def _settle(self, turn: Turn, answer: SampleResult | ServingError) -> None:
        settle([(self._futures.pop(turn), answer)])

    def _answer(self, finished: Iterable[Finished]) -> None:
        settle([(self._futures.pop(ended.turn), ended.result) for ended in finished])

    def _refuse(self, unseen: Iterable[_Command], error: ServingError) -> None:
        settle([(future, error) for future in self._futures.values()])
        self._futures.clear()
        self._batch.close()
        if self._publishing is not None:
            self._publishing.refusal.put(error)
        for command in unseen:
            match command:
                case _Submit():
                    settle([(command.future, error)])
                case _Publish():
                    command.refusal.put(error)
