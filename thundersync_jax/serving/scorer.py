"""`Scorer`: log-probabilities of given tokens under another model, behind `ScoreClient`.

The model is the teacher of on-policy distillation or a frozen reference. Owns its weights, its K/V
rows and the compiled programs that extend them; one thread, always batching.

Invariants:
  * The scoring thread alone touches the rows, the `ScoreTable` and the `WeightStore`; others send
    it commands, which it takes between two rounds. A round runs one piece of every session that
    has a row.
  * Every accepted request gets one answer, on its caller's event loop: a result or a ServingError.
  * A result is of one version: new weights are taken at any time, and what is in flight starts
    over. The program that runs a piece follows from the piece's length, not from its company.
  * Nothing compiles after `warm_up`. No array has the vocabulary of more than one chunk.
Made and owned by a main; used by rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.config_serving import ServingSection
from thundersync_jax.losses.logprobs import token_logprobs
from thundersync_jax.model import transformer
from thundersync_jax.model.kv_cache import KVCache, init_cache
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.command_thread import CommandThread, answer_of, settle
from thundersync_jax.serving.placement import lower_on, place_cache, replicate, serving_mesh
from thundersync_jax.serving.request_check import check_types
from thundersync_jax.serving.score_table import ScorePiece, ScoreTable, Scoring
from thundersync_jax.serving.weights import WeightStore
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import ScoreRequest, ScoreResult

_Future = asyncio.Future[ScoreResult]


@flax.struct.dataclass
class ScoreBatch:
    """Tokens to run in R rows, and those that follow them.

    Attributes:
      tokens, targets: int32 [R, C].
      rows: int32 [R], distinct; num_rows marks an unused entry.
      starts, counts: int32 [R]; the piece is tokens[:count], at positions start, start + 1, ...
    """

    tokens: jax.Array
    targets: jax.Array
    rows: jax.Array
    starts: jax.Array
    counts: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Submit:
    scoring: Scoring
    future: _Future


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Release:
    """Closes a session, ending its request if it has one."""

    session: TrajectoryKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Publish:
    params: transformer.Params
    version: int
    outcome: queue.SimpleQueue[ServingError | None]


_Command = _Submit | _Release | _Publish


def score_pieces(
    config: TransformerConfig,
    temperature: float,
    chunk: int,
    params: transformer.Params,
    cache: KVCache,
    batch: ScoreBatch,
) -> tuple[KVCache, jax.Array]:
    """Appends pieces to rows; the log-probability [R, C] of every target after its token."""
    offsets = jnp.arange(batch.tokens.shape[1])
    is_token = offsets < batch.counts[:, None]
    positions = jnp.where(is_token, batch.starts[:, None] + offsets, cache.length)
    hidden, cache = transformer.forward_cached(
        config, params, batch.tokens, positions, cache, batch.rows
    )
    kernel = transformer.output_kernel(config, params).astype(config.dtype)
    return cache, token_logprobs(
        hidden, kernel, batch.targets, temperature=temperature, chunk=chunk
    )


class Scorer:
    """Scores the tokens of many sessions. Implements `transport.client.ScoreClient`."""

    def __init__(
        self,
        config: TransformerConfig,
        section: ServingSection,
        max_context: int,
        *,
        temperature: float = 1.0,
        logprob_chunk: int = 16384,
        mesh: Mesh | None = None,
    ) -> None:
        """Args:
        section: num_slots rows; extend_rows and extend_buckets shape the programs.
        max_context: tokens of the longest context.
        temperature: of the distribution that is asked for, above 0.
        logprob_chunk: vocabulary entries whose logits exist at one time.
        mesh: one of `placement.serving_mesh`; by default of the first device.
        """
        if not temperature > 0:
            raise ServingError(f"a scorer of temperature {temperature}: expected above 0")
        self._config = config
        self._section = section
        self._row_length = max_context
        self._buckets = sorted({min(size, max_context) for size in section.extend_buckets})
        self._score = functools.partial(score_pieces, config, temperature, logprob_chunk)
        self._mesh = mesh or serving_mesh(config, jax.devices()[:1])
        self._weights = WeightStore(config, self._mesh)
        self._programs: dict[int, Callable[..., tuple[KVCache, jax.Array]]] = {}
        self._empty_cache: Callable[[], KVCache] | None = None
        self._table = ScoreTable(
            num_rows=section.num_slots, row_length=max_context, vocab_size=config.vocab_size
        )
        self._futures: dict[Scoring, _Future] = {}
        self._thread: CommandThread[_Command] = CommandThread(
            name="scoring thread",
            timeout_s=section.request_timeout_s,
            serve=self._serve,
            refuse=self._refuse,
        )

    def warm_up(self) -> None:
        """Compiles every program; `start` does it otherwise."""
        if self._empty_cache is not None:
            return
        for bucket in self._buckets:
            self._programs[bucket] = self.lowering(bucket)().compile()
        self._weights.compile()
        make, rows = self._make_rows, self._rows()
        self._empty_cache = lower_on(self._mesh, make, (), rows)().compile()

    def lowering(self, bucket: int) -> Callable[[], jax.stages.Lowered]:
        """Traces the program that scores pieces of up to `bucket` tokens."""
        rows, weights = self._rows(), self._weights.abstract
        batch = replicate(self._mesh, _pack([], self._section.extend_rows, bucket, unused_row=0))
        logprobs = replicate(self._mesh, jax.eval_shape(self._score, weights, rows, batch)[1])
        arguments, results = (weights, rows, batch), (rows, logprobs)
        return lower_on(self._mesh, self._score, arguments, results, donated=1)

    def _make_rows(self) -> KVCache:
        return init_cache(self._config, self._section.num_slots, self._row_length)

    def _rows(self) -> KVCache:
        """Their abstract value."""
        return place_cache(self._mesh, jax.eval_shape(self._make_rows))

    def start(self) -> None:
        self.warm_up()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, failing requests in flight; raises what the thread died of."""
        self._thread.close()

    def publish(self, params: transformer.Params, version: int) -> None:
        """Copies new weights into the scorer; blocks until that is done, or raises ServingError."""
        outcome: queue.SimpleQueue[ServingError | None] = queue.SimpleQueue()
        self._thread.send(_Publish(params=params, version=version, outcome=outcome))
        timeout_s = self._section.request_timeout_s
        try:
            error = outcome.get(timeout=timeout_s)
        except queue.Empty:
            raise ServingError(
                f"the scorer did not take weights of version {version} within {timeout_s} s"
            ) from None
        if error is not None:
            raise error

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Scores context_ids[first:]. Cancellation or the deadline closes the session."""
        check_types(request)
        scoring = Scoring(request=request)
        future: _Future = asyncio.get_running_loop().create_future()
        self._thread.send(_Submit(scoring=scoring, future=future))
        return await answer_of(
            future,
            timeout_s=self._section.request_timeout_s,
            release=lambda: self.release(request.session),
            over_time=lambda: f"{request.session}: it was {scoring.state.value} and not scored",
        )

    async def release(self, session: TrajectoryKey) -> None:
        """Frees the session's row; a request in flight gets a ServingError."""
        with contextlib.suppress(ServingError):  # a scorer that ended holds no rows
            self._thread.send(_Release(session=session))

    # Below: the scoring thread.

    def _serve(self) -> None:
        assert self._empty_cache is not None
        cache = self._empty_cache()
        while self._thread.apply_commands(self._apply, wait_s=0 if self._table.has_work else None):
            if self._table.has_work:
                cache = self._run_round(cache)
                version = self._weights.current().version
                finished = self._table.finish(version, time.monotonic())
                settle([(self._futures.pop(scored.scoring), scored.result) for scored in finished])

    def _run_round(self, cache: KVCache) -> KVCache:
        """One piece of every session that has a row; all calls start before one is waited for."""
        params = self._weights.current().params
        pieces = self._table.take_pieces(self._buckets[-1])
        calls = []
        for bucket, part in self._by_bucket(pieces):
            batch = _pack(
                part, self._section.extend_rows, bucket, unused_row=self._section.num_slots
            )
            cache, logprobs = self._programs[bucket](params, cache, batch)
            calls.append((part, logprobs))
        for part, logprobs in calls:
            for piece, row in zip(part, np.asarray(logprobs).tolist(), strict=False):
                self._table.record(piece, row)
        return cache

    def _by_bucket(self, pieces: Sequence[ScorePiece]) -> Iterable[tuple[int, list[ScorePiece]]]:
        """At most extend_rows pieces a call, each in the smallest bucket that holds it."""
        rows, shortest = self._section.extend_rows, 1
        for bucket in self._buckets:
            fitting = [piece for piece in pieces if shortest <= len(piece.token_ids) <= bucket]
            shortest = bucket + 1
            for begin in range(0, len(fitting), rows):
                yield bucket, fitting[begin : begin + rows]

    def _apply(self, command: _Command) -> None:
        match command:
            case _Submit():
                self._submit(command)
            case _Release():
                scoring = self._table.close(command.session)
                if scoring is not None:
                    error = ServingError(f"{command.session} was released while it was scored")
                    settle([(self._futures.pop(scoring), error)])
            case _Publish():
                try:
                    self._weights.publish(command.params, command.version)
                except ServingError as error:
                    command.outcome.put(error)
                else:
                    self._table.forget()
                    command.outcome.put(None)

    def _submit(self, command: _Submit) -> None:
        try:
            self._weights.current()
            self._table.submit(command.scoring, time.monotonic())
        except ServingError as error:
            settle([(command.future, error)])
        else:
            self._futures[command.scoring] = command.future

    def _refuse(self, unseen: Iterable[_Command], error: ServingError) -> None:
        settle([(future, error) for future in self._futures.values()])
        self._futures.clear()
        for command in unseen:
            match command:
                case _Submit():
                    settle([(command.future, error)])
                case _Publish():
                    command.outcome.put(error)


def _pack(
    pieces: Sequence[ScorePiece], num_rows: int, bucket: int, *, unused_row: int
) -> ScoreBatch:
    """Pads pieces in numpy to (num_rows, bucket)."""
    tokens, targets = np.zeros((2, num_rows, bucket), np.int32)
    rows = np.full(num_rows, unused_row, np.int32)
    starts, counts = np.zeros((2, num_rows), np.int32)
    for row, piece in enumerate(pieces):
        count = len(piece.token_ids)
        tokens[row, :count] = piece.token_ids
        targets[row, :count] = piece.targets
        rows[row], starts[row], counts[row] = piece.session.row, piece.start, count
    batch: Any = ScoreBatch
    return batch(tokens=tokens, targets=targets, rows=rows, starts=starts, counts=counts)
