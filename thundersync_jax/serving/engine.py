"""`PolicyEngine`: JetStream's Engine for our model, with programs compiled ahead of time.

Owns the compiled programs and the `WeightStore`; the `DecodeState` belongs to the caller and is
donated to every call that returns a new one. Our loop (`worker.py`) uses `extend` and `generate`,
JetStream's Driver `prefill`, `insert` and `generate`. Both sample the same tokens.

Deviations from JetStream's mock, each because 0.2.2 has no field for it:
  * One sampled token is three speculation columns: id, bits of its float32 log-probability, version
    of the weights. The third is valid only while the turn goes on: the token that ends a turn is
    kept, and the Driver stops after it.
  * `prefill` takes a `PrefillInput`, which carries the request's sampling parameters.
  * `params` is the engine's `WeightStore`; a Driver binds the argument once per thread.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.config_serving import ServingSection
from thundersync_jax.model import transformer
from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving import decode_state as programs
from thundersync_jax.serving.decode_state import (
    MAX_STOP_IDS,
    DecodeState,
    ExtendBatch,
    Piece,
    Prefix,
    Sampled,
)
from thundersync_jax.serving.jetstream_compat import engine_api, tokenizer_pb2
from thundersync_jax.serving.memory import check_memory
from thundersync_jax.serving.placement import lower_on, place_state, replicate, serving_mesh
from thundersync_jax.serving.sampling import SamplingRows
from thundersync_jax.serving.weights import WeightStore
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import SamplingParams

COLUMNS_PER_TOKEN = 3  # id, bits of the log-probability, policy version


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillInput:
    """The `padded_tokens` of `prefill`: token ids int32 [>= true_length], and how to sample."""

    token_ids: np.ndarray
    sampling: SamplingParams


class PolicyEngine(engine_api.Engine):
    """Slots of K/V rows, and the programs that extend, insert and sample them."""

    def __init__(
        self,
        config: TransformerConfig,
        serving: ServingSection,
        max_context: int,
        mesh: Mesh | None = None,
    ) -> None:
        """`mesh` is one of `placement.serving_mesh`; by default of the first device."""
        self.config = config
        self.serving = serving
        self.row_length = max_context
        self._mesh = mesh or serving_mesh(config, jax.devices()[:1])
        check_memory(list(self._mesh.devices.flat), config, serving, max_context)
        self.weights = WeightStore(config, self._mesh)
        # No piece is longer than a row.
        self.extend_buckets = sorted({min(size, max_context) for size in serving.extend_buckets})
        self._programs: dict[Any, Callable[..., Any]] = {}

    def warm_up(self, *, with_prefill: bool = False) -> None:
        """Compiles every program of the loop, and with_prefill those of JetStream's Driver.

        Nothing compiles afterwards. Programs that are there already are not compiled again.
        """
        missing = {
            name: lower
            for name, lower in self.lowerings(with_prefill=with_prefill).items()
            if name not in self._programs
        }
        with concurrent.futures.ThreadPoolExecutor() as pool:
            self._programs |= zip(missing, pool.map(_compile, missing.values()), strict=True)
        self.weights.compile()

    # What our own loop calls.

    def extend(
        self, params: WeightStore, decode_state: DecodeState, pieces: Sequence[Piece]
    ) -> DecodeState:
        """Appends at most `serving.extend_rows` pieces, of distinct slots, in one program call."""
        batch = self._pack(pieces, self.serving.extend_rows, unused_slot=self.serving.num_slots)
        program = self._program(("extend", batch.tokens.shape[1]))
        return program(params.current().params, decode_state, batch)

    def generate(
        self,
        params: WeightStore,
        decode_state: DecodeState,
        *,
        is_kept: np.ndarray | None = None,
        until_ended: int | None = None,
    ) -> tuple[DecodeState, Any]:
        """Samples up to `serving.steps_per_sync` tokens of every live slot.

        Args:
          is_kept: bool [num_slots]; the others stop before they sample. None keeps all.
          until_ended: ends the call as soon as so many rows have ended; None waits for all.
        """
        weights, num_slots = params.current(), self.serving.num_slots
        decode_state, data = self._program("generate")(
            weights.params,
            decode_state,
            np.int32(weights.version),
            np.ones(num_slots, bool) if is_kept is None else is_kept,
            np.int32(num_slots if until_ended is None else until_ended),
        )
        width = COLUMNS_PER_TOKEN * self.serving.steps_per_sync
        results = engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, width),
            valid_idx=(width, 2 * width),
            length_idx=(2 * width, 2 * width + 1),
            samples_per_slot=1,
        )
        return decode_state, results

    def unpack(self, results: Any) -> Sampled:
        """Blocks until a `generate` call is done and reads its columns."""
        data = np.asarray(results.data)
        shape = (data.shape[0], self.serving.steps_per_sync, COLUMNS_PER_TOKEN)
        tokens = data[:, slice(*results.tokens_idx)].reshape(shape)
        valid = data[:, slice(*results.valid_idx)].reshape(shape).astype(bool)
        return Sampled(
            token_ids=tokens[..., 0],
            logprobs=np.ascontiguousarray(tokens[..., 1]).view(np.float32),
            policy_versions=tokens[..., 2],
            is_sampled=valid[..., 0],
            goes_on=valid[..., 2],
        )

    def take_row(self, decode_state: DecodeState, slot: int) -> KVCache:
        """A copy of a slot's keys and values."""
        return self._program("take_row")(decode_state, np.int32(slot))

    def put_row(self, decode_state: DecodeState, row: KVCache, slot: int) -> DecodeState:
        """Copies a row of `take_row` or `row_to_host` into `slot`, whose turn an extension begins.

        A row of the host's memory has its valid entries only.
        """
        missing = self.row_length - row.length
        if missing:
            padding = [(0, 0), (0, 0), (0, missing), (0, 0), (0, 0)]
            row = jax.tree.map(lambda x: np.pad(x, padding), row)
        return self._program("put_row")(decode_state, row, np.int32(slot))

    def row_to_host(self, row: KVCache, length: int) -> KVCache:
        """The first `length` entries of a row in numpy; blocks until they are there."""
        return jax.tree.map(lambda x: np.asarray(x)[:, :, :length].copy(), row)

    # The rest of JetStream's interface.

    def prefill(
        self,
        *,
        params: WeightStore,
        existing_prefix: Prefix | None = None,
        padded_tokens: PrefillInput,
        true_length: int,
    ) -> Prefix:
        """Runs a prompt, or the continuation of a copy of `existing_prefix`, in pieces."""
        if existing_prefix is None:
            prefix = self._program("empty_prefix")()
        else:
            prefix = self._program("copy_prefix")(existing_prefix)
        start = int(prefix.length[0])
        if not 0 < true_length <= self.row_length - start:
            raise ServingError(
                f"a prefill of {true_length} tokens at position {start}: expected 1 to "
                f"{self.row_length - start} (max_context = {self.row_length})"
            )
        token_ids = padded_tokens.token_ids[:true_length].tolist()
        for piece in self.cut(0, start, token_ids, padded_tokens.sampling):
            batch = self._pack([piece], 1, unused_slot=1)
            program = self._program(("prefill", batch.tokens.shape[1]))
            prefix = program(params.current().params, prefix, batch)
        return prefix

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Copies a prefix into `slot` and begins its turn; the prefix may be inserted again."""
        return self._program("insert")(decode_state, prefix, np.int32(slot))

    def load_params(self, *args: Any, **kwargs: Any) -> WeightStore:
        """The store that `publish` fills; JetStream passes it back as `params`."""
        return self.weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        return self._program("empty_state")()

    def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def get_tokenizer(self) -> Any:
        """Ids in, ids out: there is no vocabulary file."""
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.serving.num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.row_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def cut(
        self, slot: int, start: int, token_ids: Sequence[int], sampling: SamplingParams
    ) -> list[Piece]:
        """Cuts context tokens into pieces of at most the longest bucket."""
        longest = self.extend_buckets[-1]
        return [
            Piece(
                slot=slot,
                start=start + offset,
                token_ids=token_ids[offset : offset + longest],
                is_last=offset + longest >= len(token_ids),
                sampling=sampling,
            )
            for offset in range(0, len(token_ids), longest)
        ]

    def _program(self, name: Any) -> Callable[..., Any]:
        if name not in self._programs:
            raise ServingError(f"program {name} is not compiled: call warm_up() first")
        return self._programs[name]

    def lowerings(self, *, with_prefill: bool) -> dict[Any, Callable[[], Any]]:
        """Name -> a function that traces the program; tracing happens in the compiling threads."""
        config, row_length, num_slots = self.config, self.row_length, self.serving.num_slots
        new_state = functools.partial(programs.empty_state, config, num_slots, row_length)
        new_prefix = functools.partial(programs.empty_prefix, config, row_length)
        small = functools.partial(replicate, self._mesh)
        weights = self.weights.abstract
        state = place_state(self._mesh, jax.eval_shape(new_state))
        prefix = place_state(self._mesh, jax.eval_shape(new_prefix))
        scalar = small(jax.ShapeDtypeStruct((), jnp.int32))
        kept = small(jax.ShapeDtypeStruct((num_slots,), jnp.bool_))
        width = 2 * COLUMNS_PER_TOKEN * self.serving.steps_per_sync + 1
        columns = small(jax.ShapeDtypeStruct((num_slots, width), jnp.int32))
        run_extend = functools.partial(programs.extend, config)
        run_prefill = functools.partial(programs.extend_prefix, config)
        arguments = weights, state, scalar, kept, scalar
        lower = functools.partial(lower_on, self._mesh)
        lowerings: dict[Any, Callable[[], Any]] = {
            "empty_state": lower(new_state, (), state),
            "generate": lower(self._generate_columns, arguments, (state, columns), donated=1),
            "take_row": lower(programs.take_row, (state, scalar), prefix.cache),
            "put_row": lower(programs.put_row, (state, prefix.cache, scalar), state, donated=0),
        }
        for bucket in self.extend_buckets:
            batch = small(self._abstract_batch(self.serving.extend_rows, bucket))
            lowerings["extend", bucket] = lower(
                run_extend, (weights, state, batch), state, donated=1
            )
        if with_prefill:
            copy = functools.partial(jax.tree.map, jnp.copy)
            lowerings["empty_prefix"] = lower(new_prefix, (), prefix)
            lowerings["copy_prefix"] = lower(copy, (prefix,), prefix)
            lowerings["insert"] = lower(programs.insert, (state, prefix, scalar), state, donated=0)
            for bucket in self.extend_buckets:
                batch = small(self._abstract_batch(1, bucket))
                lowerings["prefill", bucket] = lower(
                    run_prefill, (weights, prefix, batch), prefix, donated=1
                )
        return lowerings

    def _generate_columns(
        self,
        params: transformer.Params,
        state: DecodeState,
        version: jax.Array,
        is_kept: jax.Array,
        until_ended: jax.Array,
    ) -> tuple[DecodeState, jax.Array]:
        """`generate`, its records as the int32 columns of ResultTokens: [B, 6 steps + 1]."""
        num_steps = self.serving.steps_per_sync
        state, records = programs.generate(
            self.config, num_steps, params, state, is_kept, until_ended
        )
        bits = jax.lax.bitcast_convert_type(records.logprobs, jnp.int32)
        versions = jnp.full_like(records.tokens, version)
        is_sampled = records.is_sampled.astype(jnp.int32)
        tokens = jnp.stack([records.tokens, bits, versions], axis=-1)  # [steps, B, 3]
        valid = jnp.stack([is_sampled, is_sampled, records.goes_on.astype(jnp.int32)], axis=-1)
        rows = [x.swapaxes(0, 1).reshape(x.shape[1], -1) for x in (tokens, valid)]
        return state, jnp.concatenate([*rows, state.num_sampled[:, None]], axis=1)

    def _abstract_batch(self, num_rows: int, bucket: int) -> ExtendBatch:
        batch = _empty_batch(num_rows, bucket, unused_slot=0)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def _pack(self, pieces: Sequence[Piece], num_rows: int, *, unused_slot: int) -> ExtendBatch:
        """Pads pieces in numpy to (num_rows, the smallest bucket that holds the longest)."""
        longest = max(len(piece.token_ids) for piece in pieces)
        bucket = next(bucket for bucket in self.extend_buckets if bucket >= longest)
        batch: Any = _empty_batch(num_rows, bucket, unused_slot)
        for row, piece in enumerate(pieces):
            asked, count = piece.sampling, len(piece.token_ids)
            batch.tokens[row, :count] = piece.token_ids
            batch.slots[row] = piece.slot
            batch.starts[row] = piece.start
            batch.counts[row] = count
            batch.is_last[row] = piece.is_last
            batch.turn.max_tokens[row] = asked.max_tokens
            batch.turn.stop_ids[row, : len(asked.stop_ids)] = sorted(asked.stop_ids)
            batch.turn.sampling.temperature[row] = asked.temperature
            batch.turn.sampling.top_k[row] = asked.top_k
            batch.turn.sampling.top_p[row] = asked.top_p
            batch.turn.sampling.seed[row] = asked.seed & 0xFFFFFFFF
        return batch


def _compile(lower: Callable[[], Any]) -> Callable[..., Any]:
    return lower().compile()


def _empty_batch(num_rows: int, bucket: int, unused_slot: int) -> ExtendBatch:
    """A batch of numpy arrays without any piece."""

    def full(value: float, dtype: type, *shape: int) -> Any:
        return np.full((num_rows, *shape), value, dtype)

    return ExtendBatch(
        tokens=full(0, np.int32, bucket),
        slots=full(unused_slot, np.int32),
        starts=full(0, np.int32),
        counts=full(0, np.int32),
        is_last=full(0, np.bool_),
        turn=programs.TurnRows(
            sampling=SamplingRows(
                temperature=full(1, np.float32),
                top_k=full(0, np.int32),
                top_p=full(1, np.float32),
                seed=full(0, np.uint32),
            ),
            stop_ids=full(-1, np.int32, MAX_STOP_IDS),
            max_tokens=full(0, np.int32),
        ),
    )
