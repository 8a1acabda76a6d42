"""The decode batch on the device, and the pure programs on it: extend, generate, rows in and out.

Invariants of a slot's row:
  * `length` entries of its K/V are valid; `logits` are those of the token at position `length`.
  * The token that ends a turn is not run through the model: no later token may exist. The next turn
    extends the row by it and by what came after, so an extension is never empty.
  * Only live rows change in `generate`. Budgets, stop ids and sampling parameters are arrays: no
    request has a shape of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.model import transformer
from thundersync_jax.model.kv_cache import KVCache, init_cache
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.sampling import SamplingRows, sample
from thundersync_jax.transport.messages import SamplingParams

# Stop ids of one turn; -1 fills the rest. A fixed width, so that no request compiles a program.
MAX_STOP_IDS = 8


@flax.struct.dataclass
class TurnRows:
    """What the turns of a set of rows were asked for.

    Attributes:
      stop_ids: int32 [B, MAX_STOP_IDS].
      max_tokens: int32 [B].
    """

    sampling: SamplingRows
    stop_ids: jax.Array
    max_tokens: jax.Array


@flax.struct.dataclass
class DecodeState:
    """All slots.

    Attributes:
      cache: rows of length S.
      logits: [B, V], at least float32.
      length: int32 [B]; valid entries of each row.
      turn: parameters of the present turn.
      num_sampled: int32 [B]; tokens of the present turn.
      is_live: bool [B]; the row samples.
    """

    cache: KVCache
    logits: jax.Array
    length: jax.Array
    turn: TurnRows
    num_sampled: jax.Array
    is_live: jax.Array


@flax.struct.dataclass
class ExtendBatch:
    """Pieces of context for R rows.

    Attributes:
      tokens: int32 [R, C].
      slots: int32 [R], distinct; num_slots marks an unused entry.
      starts, counts: int32 [R]; the piece is tokens[:count], at positions start, start + 1, ...
      is_last: bool [R]; the context is complete and the row goes live.
      turn: parameters of the turn that begins.
    """

    tokens: jax.Array
    slots: jax.Array
    starts: jax.Array
    counts: jax.Array
    is_last: jax.Array
    turn: TurnRows


@flax.struct.dataclass
class Prefix:
    """One prefilled row that is in no slot yet: the fields of `DecodeState` for B = 1."""

    cache: KVCache
    logits: jax.Array
    length: jax.Array
    turn: TurnRows


class StepRecords(NamedTuple):
    """What `generate` sampled; every array is [steps, B].

    `is_sampled`: the row was live and sampled in this step. `goes_on`: and is still live after it.
    """

    tokens: jax.Array
    logprobs: jax.Array
    is_sampled: jax.Array
    goes_on: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive context tokens of one slot. `is_last`: they complete it, and its turn begins."""

    slot: int
    start: int
    token_ids: Sequence[int]
    is_last: bool
    sampling: SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """What one `generate` call sampled, on the host; every array is [B, steps].

    Attributes:
      is_sampled: the row was live in that step; the first False ends the row.
      goes_on: the row was still live after it.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    is_sampled: np.ndarray
    goes_on: np.ndarray


def empty_turn_rows(num_rows: int) -> TurnRows:
    def full(value: float, dtype: jnp.dtype) -> jax.Array:
        return jnp.full((num_rows,), value, dtype)

    return TurnRows(
        sampling=SamplingRows(
            temperature=full(1, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1, jnp.float32),
            seed=full(0, jnp.uint32),
        ),
        stop_ids=jnp.full((num_rows, MAX_STOP_IDS), -1, jnp.int32),
        max_tokens=full(0, jnp.int32),
    )


def empty_state(config: TransformerConfig, num_slots: int, row_length: int) -> DecodeState:
    dtype = jnp.promote_types(config.dtype, jnp.float32)
    return DecodeState(
        cache=init_cache(config, num_slots, row_length),
        logits=jnp.zeros((num_slots, config.vocab_size), dtype),
        length=jnp.zeros(num_slots, jnp.int32),
        turn=empty_turn_rows(num_slots),
        num_sampled=jnp.zeros(num_slots, jnp.int32),
        is_live=jnp.zeros(num_slots, bool),
    )


def extend(
    config: TransformerConfig, params: transformer.Params, state: DecodeState, batch: ExtendBatch
) -> DecodeState:
    """Appends pieces of context to slots; those that are complete begin their turn."""
    cache, logits = _append(config, params, state.cache, batch)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[batch.slots].set(new, mode="drop")

    return DecodeState(
        cache=cache,
        logits=put(state.logits, logits),
        length=put(state.length, batch.starts + batch.counts),
        turn=jax.tree.map(put, state.turn, batch.turn),
        num_sampled=put(state.num_sampled, jnp.zeros_like(batch.counts)),
        is_live=put(state.is_live, batch.is_last),
    )


def extend_prefix(
    config: TransformerConfig, params: transformer.Params, prefix: Prefix, batch: ExtendBatch
) -> Prefix:
    """Appends one piece (R = 1, slot 0) to a prefix."""
    cache, logits = _append(config, params, prefix.cache, batch)
    return Prefix(cache=cache, logits=logits, length=batch.starts + batch.counts, turn=batch.turn)


def empty_prefix(config: TransformerConfig, row_length: int) -> Prefix:
    state = empty_state(config, 1, row_length)
    return Prefix(cache=state.cache, logits=state.logits, length=state.length, turn=state.turn)


def insert(state: DecodeState, prefix: Prefix, slot: jax.Array) -> DecodeState:
    """Copies a prefix into `slot` and begins its turn."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[slot].set(new[0])

    cache = jax.tree.map(lambda old, new: old.at[:, slot].set(new[:, 0]), state.cache, prefix.cache)
    return DecodeState(
        cache=cache,
        logits=put(state.logits, prefix.logits),
        length=put(state.length, prefix.length),
        turn=jax.tree.map(put, state.turn, prefix.turn),
        num_sampled=state.num_sampled.at[slot].set(0),
        is_live=state.is_live.at[slot].set(True),
    )


def take_row(state: DecodeState, slot: jax.Array) -> KVCache:
    """A copy of the keys and values of one row: a cache of B = 1."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=1),  # [L, 1, S, K, H]
        state.cache,
    )


def put_row(state: DecodeState, row: KVCache, slot: jax.Array) -> DecodeState:
    """Copies what `take_row` gave into `slot`; the extension that must follow sets the rest."""
    cache = jax.tree.map(
        # The slot is one of the batch's: nothing is clamped.
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=1),
        state.cache,
        row,
    )
    return dataclasses.replace(state, cache=cache)


def generate(
    config: TransformerConfig,
    num_steps: int,
    params: transformer.Params,
    state: DecodeState,
    is_kept: jax.Array,
    until_ended: jax.Array,
) -> tuple[DecodeState, StepRecords]:
    """Samples up to `num_steps` tokens of every live row.

    Args:
      is_kept: bool [B]; live rows without it stop here, before they sample.
      until_ended: int32 []; the call ends with the step in which so many rows have ended, and when
        no row is live.
    """
    state = dataclasses.replace(state, is_live=state.is_live & is_kept)
    fewest_live = jnp.maximum(jnp.sum(state.is_live) - until_ended, 0)
    shape = (num_steps, state.length.shape[0])
    records = StepRecords(
        tokens=jnp.zeros(shape, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        is_sampled=jnp.zeros(shape, bool),
        goes_on=jnp.zeros(shape, bool),
    )

    def is_needed(carry: tuple[jax.Array, DecodeState, StepRecords]) -> jax.Array:
        step, state, _ = carry
        return (step < num_steps) & (jnp.sum(state.is_live) > fewest_live)

    def run(
        carry: tuple[jax.Array, DecodeState, StepRecords],
    ) -> tuple[jax.Array, DecodeState, StepRecords]:
        step, state, records = carry
        state, row = _step(config, params, state)
        records = jax.tree.map(lambda old, new: old.at[step].set(new), records, row)
        return step + 1, state, records

    # A loop and not a scan: one-token turns would pay for every step of a scan.
    _, state, records = jax.lax.while_loop(is_needed, run, (jnp.int32(0), state, records))
    return state, records


def _step(
    config: TransformerConfig, params: transformer.Params, state: DecodeState
) -> tuple[DecodeState, StepRecords]:
    """Samples from the state's logits, then forwards the tokens of the rows that go on."""
    was_live = state.is_live
    # A row that ended must not keep the truncation branch alive.
    sampling = dataclasses.replace(
        state.turn.sampling,
        top_k=jnp.where(was_live, state.turn.sampling.top_k, 0),
        top_p=jnp.where(was_live, state.turn.sampling.top_p, 1.0),
    )
    tokens, logprobs = sample(state.logits, sampling, state.length)
    num_sampled = state.num_sampled + was_live
    row_length = state.cache.length
    has_ended = (
        jnp.any(state.turn.stop_ids == tokens[:, None], axis=1)
        | (num_sampled >= state.turn.max_tokens)
        | (state.length + 1 >= row_length)
    )
    goes_on = was_live & ~has_ended

    def forward() -> tuple[KVCache, jax.Array]:
        positions = jnp.where(goes_on, state.length, row_length)[:, None]
        hidden, cache = transformer.forward_cached(
            config, params, tokens[:, None], positions, state.cache
        )
        logits = transformer.logits(config, params, hidden[:, 0])
        return cache, jnp.where(goes_on[:, None], logits, state.logits)

    cache, logits = jax.lax.cond(jnp.any(goes_on), forward, lambda: (state.cache, state.logits))
    state = dataclasses.replace(
        state,
        cache=cache,
        logits=logits,
        length=state.length + goes_on,
        num_sampled=num_sampled,
        is_live=goes_on,
    )
    return state, StepRecords(
        tokens=tokens, logprobs=logprobs, is_sampled=was_live, goes_on=goes_on
    )


def _append(
    config: TransformerConfig, params: transformer.Params, cache: KVCache, batch: ExtendBatch
) -> tuple[KVCache, jax.Array]:
    """Writes a batch of pieces and returns the logits [R, V] after the last token of each."""
    offsets = jnp.arange(batch.tokens.shape[1])
    is_token = offsets < batch.counts[:, None]
    positions = jnp.where(is_token, batch.starts[:, None] + offsets, cache.length)  # [R, C]
    hidden, cache = transformer.forward_cached(
        config, params, batch.tokens, positions, cache, batch.slots
    )
    last = jnp.maximum(batch.counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [R, D]
    return cache, transformer.logits(config, params, hidden)
