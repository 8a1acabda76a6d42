"""Turn replay: the exact gradient of a trajectory from the gradients of its turns. Pure programs.

A trajectory is cut into segments, ranges of input positions; a segment's *own* outputs are its
score S_k and its keys and values, and its inputs are the parameters and the prefix: the keys and
values of the segments before it. The chain rule over that graph is

    segment_forward    writes the segment's keys and values into the trajectory's cache
    score_segment      acc_b <- acc_b + C[b, k] dS_k / d params for every buffer b; the adjoint on
                       the prefix is added to the ledger, and S_k may be joined by what the ledger
                       holds of the segment itself
    replay_segment     the same with the ledger alone as cotangent: what later segments owe it
    replay_kept        as replay_segment, from kept residuals: a backward pass alone

Turns are run in order while the trajectory grows. Once it is closed they are visited last to first,
so that a segment's ledger is complete when it is read. Holding the prefix constant instead would
leave out most of the gradient.

Invariants:
  * A segment's keys and values come from programs of the same shapes, whenever they run: deferring
    it postpones them and changes no bit.
  * The ledger has at least float32, and is zeroed when a trajectory's first segment is run.
  * Lanes, caches and ledgers of one trajectory touch nothing of another's, a non-finite one's
    neither, except the buffers that both have coefficients in.
`turn_schedule.py` decides what runs when; `turn_programs.py` compiles these on its mesh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from thundersync_jax.learner.buckets import Lanes
from thundersync_jax.learner.residuals import Residuals, kept, restored
from thundersync_jax.learner.score import ScoreSettings, sums_of
from thundersync_jax.learner.streaming import STATISTICS, Params
from thundersync_jax.learner.sums import OrderedSum, Sum, fold_at
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.trainable import parameter_vjp
from thundersync_jax.model.transformer import forward_extending


class TrajectoryCaches(struct.PyTreeNode):
    """C trajectories of up to M positions while their turns stream.

    Attributes:
      kv: [C, L, M, K, H] in the model's dtype.
      ledger: [C, L, M, K, H] in at least float32, adjoints of `kv` from the scored segments after.
      residuals: (prefix bucket, bucket) -> of N segments of that shape, [N, ...] each.
    """

    kv: KeysValues
    ledger: KeysValues
    residuals: dict[tuple[int, int], Residuals] = struct.field(default_factory=dict)


def empty_caches(model: TransformerConfig, num_caches: int, length: int) -> TrajectoryCaches:
    shape = (num_caches, model.num_layers, length, model.num_kv_heads, model.head_dim)
    wide = jnp.promote_types(model.dtype, jnp.float32)

    def zeros(dtype: Any) -> KeysValues:
        return KeysValues(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))

    return TrajectoryCaches(kv=zeros(model.dtype), ledger=zeros(wide))


def read_cache(caches: TrajectoryCaches, index: jax.Array) -> TrajectoryCaches:
    """One trajectory's keys, values and ledger, [L, M, K, H] each."""
    return jax.tree.map(lambda x: x[index], caches.replace(residuals={}))


def write_cache(
    caches: TrajectoryCaches, index: jax.Array, cache: TrajectoryCaches
) -> TrajectoryCaches:
    """The caches, donated by the caller, with one of `read_cache` instead of that at `index`."""

    def write(every: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(every, one, index, axis=0)

    written = jax.tree.map(write, caches.replace(residuals={}), cache)
    return written.replace(residuals=caches.residuals)


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
        prefix = _prefix(caches.kv, prefix_bucket, lane)
        (_, kv), pull_back = _differentiated(settings, params, prefix, lane)
        caches = _keep(caches, prefix_bucket, lane, kept(pull_back, (params, prefix)))
        return _store(caches, prefix_bucket, lane, kv)

    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, caches)


def score_segment(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    buffers: tuple[Sum, ...],
    caches: TrajectoryCaches | None,
    coefficients: jax.Array,
    ledger_weights: jax.Array,
    lanes: Lanes,
) -> tuple[tuple[Sum, ...], TrajectoryCaches | None, jax.Array]:
    """Folds every lane's score gradient into the buffers, and its adjoints into the ledger.

    Args:
      buffers: donated accumulators.
      caches: donated; None for whole trajectories, which leave nothing to attend to.
      coefficients: [len(buffers), K]; the ledger takes the adjoints as they are.
      ledger_weights: [K]; 1 where the ledger of the segment is complete and joins its score (the
        trajectory is closed), else 0.

    Returns:
      Buffers, caches, and [STATISTICS, K] as `streaming.accumulate` says it.
    """

    def score(params: Params, hidden: jax.Array, lane: Lanes) -> Any:
        sums, gaps = sums_of(settings, params, hidden, lane)
        return sums[0], gaps

    def run_lane(index: jax.Array, carry: Any) -> Any:
        buffers, caches, stats = carry
        lane = _lane(lanes, index)
        prefix = None if caches is None else _prefix(caches.kv, prefix_bucket, lane)
        (hidden, kv), pull_back = _differentiated(settings, params, prefix, lane)
        value, pull_score, gaps = parameter_vjp(
            settings.model,
            lambda params, hidden: score(params, hidden, lane),
            params,
            hidden,
            has_aux=True,
        )
        head_grad, hidden_grad = pull_score(jnp.ones_like(value))
        cotangent = _adjoint(caches, lane, kv, ledger_weights[index])
        grad, prefix_grad = pull_back((hidden_grad, cotangent))
        grads = jax.tree.map(jnp.add, grad, head_grad), prefix_grad
        buffers, caches, is_finite = _add(buffers, caches, coefficients[:, index], lane, *grads)
        if caches is not None:
            caches = _keep(caches, prefix_bucket, lane, kept(pull_back, (params, prefix)))
            caches = _store(caches, prefix_bucket, lane, kv)
        return buffers, caches, stats.at[:, index].set(jnp.stack([*gaps, is_finite]))

    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (buffers, caches, stats))


def replay_segment(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    buffers: tuple[Sum, ...],
    caches: TrajectoryCaches,
    coefficients: jax.Array,
    lanes: Lanes,
) -> tuple[tuple[Sum, ...], TrajectoryCaches, jax.Array]:
    """Differentiates every lane's segment with its ledger as cotangent: no score, no logits.

    Arguments and results as of `score_segment`; the trajectory is closed, and the segments after
    this one are done.
    """

    def run_lane(index: jax.Array, carry: Any) -> Any:
        buffers, caches, stats = carry
        lane = _lane(lanes, index)
        prefix = _prefix(caches.kv, prefix_bucket, lane)
        kv, pull_back = parameter_vjp(
            settings.model,
            lambda params, prefix: _extend(settings, params, prefix, lane)[1],
            params,
            prefix,
        )
        grads = pull_back(_adjoint(caches, lane, kv, jnp.ones(())))
        buffers, caches, is_finite = _add(buffers, caches, coefficients[:, index], lane, *grads)
        return buffers, caches, stats.at[STATISTICS - 1, index].set(is_finite)

    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (buffers, caches, stats))


def replay_kept(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    buffers: tuple[Sum, ...],
    caches: TrajectoryCaches,
    coefficients: jax.Array,
    lanes: Lanes,
) -> tuple[tuple[Sum, ...], TrajectoryCaches, jax.Array]:
    """`replay_segment` of segments whose residuals were kept, at `adjoint_slot` of their shape."""

    def run_lane(index: jax.Array, carry: Any) -> Any:
        buffers, caches, stats = carry
        lane = _lane(lanes, index)
        inputs = params, _prefix(caches.kv, prefix_bucket, lane)
        (hidden, kv), pull_back = _differentiated(settings, *inputs, lane)
        pool = caches.residuals[prefix_bucket, lane.tokens.shape[0]]
        pull_back = restored(pull_back, inputs, [x[lane.adjoint_slot] for x in pool])
        grads = pull_back((jnp.zeros_like(hidden), _adjoint(caches, lane, kv, jnp.ones(()))))
        buffers, caches, is_finite = _add(buffers, caches, coefficients[:, index], lane, *grads)
        return buffers, caches, stats.at[STATISTICS - 1, index].set(is_finite)

    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (buffers, caches, stats))


def segment_residuals(
    settings: ScoreSettings, prefix_bucket: int, params: Params, kv: KeysValues, lane: Lanes
) -> Residuals:
    """What is kept of one segment; only its shapes are ever asked for.

    Args:
      kv: [C, L, M, K, H].
      lane: [T].
    """
    prefix = _prefix(kv, prefix_bucket, lane)
    _, pull_back = _differentiated(settings, params, prefix, lane)
    return kept(pull_back, (params, prefix))


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
        before = (jnp.arange(prefix.keys.shape[2]) < lane.prefix_length)[None]
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


def _differentiated(
    settings: ScoreSettings, params: Params, prefix: KeysValues | None, lane: Lanes
) -> tuple[tuple[jax.Array, KeysValues], Any]:
    """`_extend` and its vjp in parameters and prefix."""
    return parameter_vjp(
        settings.model,
        lambda params, prefix: _extend(settings, params, prefix, lane),
        params,
        prefix,
    )


def _prefix(kv: KeysValues, prefix_bucket: int, lane: Lanes) -> KeysValues | None:
    """Keys and values [L, 1, P, K, H] before the segment; what another trajectory left is zero."""
    if not prefix_bucket:
        return None
    is_own = (jnp.arange(prefix_bucket) < lane.prefix_length)[None, :, None, None]

    def read(x: jax.Array) -> jax.Array:
        return jnp.where(is_own, x[lane.slot, :, :prefix_bucket], 0)[:, None]

    return jax.tree.map(read, kv)


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
    return caches.replace(kv=jax.tree.map(write, caches.kv, new), ledger=ledger)


def _keep(
    caches: TrajectoryCaches, prefix_bucket: int, lane: Lanes, residuals: Residuals
) -> TrajectoryCaches:
    """Keeps a segment's residuals at `adjoint_slot` of its shape, if that is one."""
    shape = prefix_bucket, lane.tokens.shape[0]
    if shape not in caches.residuals:
        return caches

    def write(pool: jax.Array, x: jax.Array) -> jax.Array:
        slot = jnp.where(_is_used(lane), lane.adjoint_slot, pool.shape[0])
        return pool.at[slot].set(x, mode="drop")

    pools = [write(*pair) for pair in zip(caches.residuals[shape], residuals, strict=True)]
    return caches.replace(residuals={**caches.residuals, shape: pools})


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
    buffers: tuple[Sum, ...],
    caches: TrajectoryCaches | None,
    coefficients: jax.Array,
    lane: Lanes,
    grad: Params,
    prefix_grad: KeysValues | None,
) -> tuple[tuple[Sum, ...], TrajectoryCaches | None, jax.Array]:
    """Folds a segment's gradients; and whether they are finite."""
    leaves = jax.tree.leaves((grad, prefix_grad))
    is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in leaves]).all()
    buffers = tuple(acc.fold(coefficients[b], grad) for b, acc in enumerate(buffers))
    if caches is not None and prefix_grad is not None:
        prefix_grad = jax.tree.map(lambda x: x[:, 0], prefix_grad)
        weight = _is_used(lane).astype(jnp.float32)
        ledger = fold_at(OrderedSum(values=caches.ledger), lane.slot, weight, prefix_grad)
        caches = caches.replace(ledger=ledger.read())
    return buffers, caches, is_finite
