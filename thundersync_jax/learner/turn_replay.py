"""Turn replay: the exact gradient of a trajectory from the gradients of its turns. Pure programs.

A trajectory is cut into segments, ranges of input positions; a segment's *own* outputs are its
score S_k and its keys and values, and its inputs are the parameters and the prefix: the keys and
values of the segments before it. The chain rule over that graph is

    segment_forward    writes the segment's keys and values into the trajectory's cache
    score_segment      batch <- batch + dS_k / d params; the adjoint on the prefix is added to the
                       ledger, and S_k may be joined by what the ledger holds of the segment itself
    replay_segment     the same with the ledger alone as cotangent: what later segments owe it

Turns are run in order while the trajectory grows. Once it is closed they are visited last to first,
so that a segment's ledger is complete when it is read. Holding the prefix constant instead would
leave out most of the gradient.

Invariants:
  * A segment's keys and values come from programs of the same shapes, whenever they run: deferring
    it postpones them and changes no bit.
  * The ledger has at least float32, and is zeroed when a trajectory's first segment is run.
  * Lanes, caches and ledgers of one trajectory touch nothing of another's, a non-finite one's
    neither, except the batch sum.
`distiller.py` decides what runs when; `distillation_programs.py` compiles these on its mesh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from thundersync_jax.learner.buckets import Lanes
from thundersync_jax.learner.score import ScoreSettings, sums_of
from thundersync_jax.learner.streaming import STATISTICS, Params
from thundersync_jax.learner.sums import OrderedSum, Sum, fold_at
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import forward_extending


class TrajectoryCaches(struct.PyTreeNode):
    """C trajectories of up to M positions while their turns stream.

    Attributes:
      kv: [C, L, M, K, H] in the model's dtype.
      ledger: [C, L, M, K, H] in at least float32, adjoints of `kv` from the scored segments after.
    """

    kv: KeysValues
    ledger: KeysValues


def empty_caches(model: TransformerConfig, num_caches: int, length: int) -> TrajectoryCaches:
    shape = (num_caches, model.num_layers, length, model.num_kv_heads, model.head_dim)
    wide = jnp.promote_types(model.dtype, jnp.float32)

    def zeros(dtype: Any) -> KeysValues:
        return KeysValues(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))

    return TrajectoryCaches(kv=zeros(model.dtype), ledger=zeros(wide))


def segment_forward(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    caches: TrajectoryCaches,
    lanes: Lanes,
) -> TrajectoryCaches:
    """Writes the keys and values of every lane's segment.

    Args:
      prefix_bucket: positions of the caches to attend to; 0 for first segments.
      caches: donated by the caller.
      lanes: one segment each [K, T], positions absolute, `slot` its trajectory's cache; only the
        first `lanes.num_lanes` are run.
    """

    def run_lane(index: jax.Array, caches: TrajectoryCaches) -> TrajectoryCaches:
        lane = _lane(lanes, index)
        prefix = _prefix(caches, prefix_bucket, lane)
        _, kv = _extend(settings, params, prefix, lane)
        return _store(caches, prefix_bucket, lane, kv)

    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, caches)


def score_segment(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    batch: Sum,
    caches: TrajectoryCaches | None,
    ledger_weights: jax.Array,
    lanes: Lanes,
) -> tuple[Sum, TrajectoryCaches | None, jax.Array]:
    """Adds every lane's score gradient to the batch sum, and its adjoints to the ledger.

    Args:
      batch: donated accumulator.
      caches: donated; None for whole trajectories, which leave nothing to attend to.
      ledger_weights: [K]; 1 where the ledger of the segment is complete and joins its score (the
        trajectory is closed), else 0.

    Returns:
      Batch, caches, and [STATISTICS, K] as `streaming.accumulate` says it.
    """

    def outputs(params: Params, prefix: KeysValues | None, lane: Lanes) -> Any:
        hidden, kv = _extend(settings, params, prefix, lane)
        sums, gaps = sums_of(settings, params, hidden, lane)
        return (sums[0], kv), gaps

    def run_lane(index: jax.Array, carry: Any) -> Any:
        batch, caches, stats = carry
        lane = _lane(lanes, index)
        prefix = _prefix(caches, prefix_bucket, lane)
        (value, kv), pull_back, gaps = jax.vjp(
            lambda params, prefix: outputs(params, prefix, lane), params, prefix, has_aux=True
        )
        cotangent = _adjoint(caches, lane, kv, ledger_weights[index])
        grads = pull_back((jnp.ones_like(value), cotangent))
        batch, caches, is_finite = _add(batch, caches, lane, *grads)
        if caches is not None:
            caches = _store(caches, prefix_bucket, lane, kv)
        return batch, caches, stats.at[:, index].set(jnp.stack([*gaps, is_finite]))

    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (batch, caches, stats))


def replay_segment(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    batch: Sum,
    caches: TrajectoryCaches,
    lanes: Lanes,
) -> tuple[Sum, TrajectoryCaches, jax.Array]:
    """Differentiates every lane's segment with its ledger as cotangent: no score, no logits.

    Arguments and results as of `score_segment`; the trajectory is closed, and the segments after
    this one are done.
    """

    def run_lane(index: jax.Array, carry: Any) -> Any:
        batch, caches, stats = carry
        lane = _lane(lanes, index)
        prefix = _prefix(caches, prefix_bucket, lane)
        kv, pull_back = jax.vjp(
            lambda params, prefix: _extend(settings, params, prefix, lane)[1], params, prefix
        )
        grads = pull_back(_adjoint(caches, lane, kv, jnp.ones(())))
        batch, caches, is_finite = _add(batch, caches, lane, *grads)
        return batch, caches, stats.at[STATISTICS - 1, index].set(is_finite)

    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (batch, caches, stats))


def _lane(lanes: Lanes, index: jax.Array) -> Lanes:
    return jax.tree.map(lambda x: x[index], lanes.replace(num_lanes=None))


def _is_used(lane: Lanes) -> jax.Array:
    return lane.segment_ids[0] > 0


def _extend(
    settings: ScoreSettings, params: Params, prefix: KeysValues | None, lane: Lanes
) -> tuple[jax.Array, KeysValues]:
    """Hidden states [T, D] and keys and values [L, T, K, H] of one segment."""
    before = None
    if prefix is not None:
        before = (jnp.arange(prefix.keys.shape[1]) < lane.prefix_length)[None]
        prefix = jax.tree.map(lambda x: x[:, None], prefix)  # a batch of one
    hidden, kv = forward_extending(
        settings.model,
        params,
        lane.tokens[None],
        lane.positions[None],
        lane.segment_ids[None],
        prefix,
        before,
    )
    return hidden[0], jax.tree.map(lambda x: x[:, 0], kv)


def _prefix(caches: TrajectoryCaches | None, prefix_bucket: int, lane: Lanes) -> KeysValues | None:
    """Keys and values [L, P, K, H] before the segment; what another trajectory left is zero."""
    if caches is None or not prefix_bucket:
        return None
    is_own = (jnp.arange(prefix_bucket) < lane.prefix_length)[None, :, None, None]
    return jax.tree.map(lambda x: jnp.where(is_own, x[lane.slot, :, :prefix_bucket], 0), caches.kv)


def _owned(lane: Lanes, length: int) -> jax.Array:
    """[1, M, 1, 1]: which of a cache's positions are the segment's; none of an unused lane."""
    at = jnp.arange(length) - lane.prefix_length
    count = jnp.sum(lane.segment_ids > 0)
    return ((at >= 0) & (at < count))[None, :, None, None]


def _store(
    caches: TrajectoryCaches, prefix_bucket: int, lane: Lanes, new: KeysValues
) -> TrajectoryCaches:
    """Writes a segment's keys and values; a first segment begins with an empty ledger."""

    def write(all_caches: jax.Array, part: jax.Array) -> jax.Array:
        # By slices, never by indices: XLA cannot partition a scatter here.
        old = all_caches[lane.slot]
        length = old.shape[1]
        room = jnp.zeros((old.shape[0], length + part.shape[1], *old.shape[2:]), old.dtype)
        placed = jax.lax.dynamic_update_slice_in_dim(room, part, lane.prefix_length, axis=1)
        own = jnp.where(_owned(lane, length), placed[:, :length], old)
        return all_caches.at[lane.slot].set(own)

    def zero(all_caches: jax.Array) -> jax.Array:
        old = all_caches[lane.slot]
        return all_caches.at[lane.slot].set(jnp.where(_is_used(lane), 0, old))

    ledger = caches.ledger if prefix_bucket else jax.tree.map(zero, caches.ledger)
    return TrajectoryCaches(kv=jax.tree.map(write, caches.kv, new), ledger=ledger)


def _adjoint(
    caches: TrajectoryCaches | None, lane: Lanes, kv: KeysValues, weight: jax.Array
) -> KeysValues:
    """The cotangent of a segment's keys and values: what its ledger holds, where `weight` is 1."""
    if caches is None:
        return jax.tree.map(jnp.zeros_like, kv)

    def read(all_caches: jax.Array, like: jax.Array) -> jax.Array:
        count = like.shape[1]
        own = all_caches[lane.slot]
        own = jnp.where(_owned(lane, own.shape[1]) & (weight != 0), own, 0)
        own = jnp.pad(own, ((0, 0), (0, count), (0, 0), (0, 0)))
        return jax.lax.dynamic_slice_in_dim(own, lane.prefix_length, count, axis=1).astype(
            like.dtype
        )

    return jax.tree.map(read, caches.ledger, kv)


def _add(
    batch: Sum,
    caches: TrajectoryCaches | None,
    lane: Lanes,
    grad: Params,
    prefix_grad: KeysValues | None,
) -> tuple[Sum, TrajectoryCaches | None, jax.Array]:
    """Folds a segment's gradients; and whether they are finite."""
    leaves = jax.tree.leaves((grad, prefix_grad))
    is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in leaves]).all()
    weight = _is_used(lane).astype(jnp.float32)
    batch = batch.fold(weight, grad)
    if caches is not None and prefix_grad is not None:
        ledger = fold_at(OrderedSum(values=caches.ledger), lane.slot, weight, prefix_grad)
        caches = caches.replace(ledger=ledger.read())
    return batch, caches, is_finite
