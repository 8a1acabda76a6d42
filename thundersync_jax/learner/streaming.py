"""The streaming programs: pure functions over donated accumulators, one replica's view.

    prompt_forward    keys and values of a group's prompt, once per group and replica
    accumulate        acc_b <- acc_b + C[b, k] g_k for every lane k and buffer b, g_k = grad S_k
    bind              a gradient computed ahead of its verdict goes where the verdict says
    close_group       batch <- batch + a G1 + b G2, and the pair is zero again
    prompt_backward   batch <- batch + vjp of the prompt with the adjoint a K1 + b K2
    apply_update      one division, one clip, one optimizer step, and the batch sum is zero again

`programs.py` runs all but the last under shard_map, manual over `data`: they see one replica and
cannot communicate with another. A coefficient of exactly 0 leaves its buffer alone, so a non-finite
g stays out of it. Accumulators are a `Sum` of one kind; held gradients are floats in at least
float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from thundersync_jax.learner.buckets import Lanes, Prompts
from thundersync_jax.learner.sums import Sum, clear_at, fold_at, in_place
from thundersync_jax.losses.logprobs import token_logprobs
from thundersync_jax.losses.score import trajectory_score
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import forward, keys_values, output_kernel

Params = Any  # a pytree of arrays; the model alone knows its structure
STATISTICS = 3  # numbers that a call says of a lane, in one array: each costs a transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """What a score depends on besides parameters and tokens; static in every program."""

    model: TransformerConfig
    temperature: float = 1.0
    tis_cap: float = 0.0
    logprob_chunk: int = 16384


class PromptSlots(struct.PyTreeNode):
    """Shared prompts: S slots of P positions.

    Attributes:
      kv: [S, L, P, K, H] in the model's dtype.
      adjoint1, adjoint2: sums of KeysValues [S, L, P, K, H]; the prompt's shares of G1 and G2,
        to be differentiated through the prompt when the group closes.
    """

    kv: KeysValues
    adjoint1: Sum
    adjoint2: Sum


def zeros_like_params(params: Params) -> Params:
    """One accumulator: the parameters' shapes in at least float32."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def score(
    settings: ScoreSettings, params: Params, prefix: KeysValues | None, lane: Lanes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """S of one lane, the sum over its trajectories, and (gap_sum, gap_max) of it.

    Args:
      prefix: keys and values [L, P, K, H] of a shared prompt, or None.
      lane: one lane's arrays [T] and scalars.
    """
    before = None
    if prefix is not None:
        before = (jnp.arange(prefix.keys.shape[1]) < lane.prefix_length)[None]
        prefix = jax.tree.map(lambda x: x[:, None], prefix)  # a batch of one
    hidden = forward(
        settings.model,
        params,
        lane.tokens[None],
        lane.positions[None],
        lane.segment_ids[None],
        prefix,
        before,
    )[0]
    logprobs = token_logprobs(
        hidden,
        output_kernel(settings.model, params),
        lane.targets,
        temperature=settings.temperature,
        chunk=settings.logprob_chunk,
    )
    gap = jnp.abs(jax.lax.stop_gradient(logprobs) - lane.behavior_logprobs)
    gap = jnp.where(lane.action_mask, gap, 0.0).astype(jnp.float32)
    value = trajectory_score(logprobs, lane.behavior_logprobs, lane.weights, settings.tis_cap)
    return value, (jnp.sum(gap), jnp.max(gap))


def accumulate(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    buffers: tuple[Sum, ...],
    slots: PromptSlots | None,
    coefficients: jax.Array,
    pair_coefficients: jax.Array,
    lanes: Lanes,
) -> tuple[tuple[Sum, ...], PromptSlots | None, jax.Array]:
    """Folds the score gradients of the filled lanes into every buffer.

    Args:
      prefix_bucket: positions of the slots to attend to; 0 for lanes without a shared prompt.
      buffers: accumulators, donated by the caller.
      slots: shared prompts, their adjoints donated; None when prefix_bucket is 0.
      coefficients: [len(buffers), K].
      pair_coefficients: [2, K], what the prompt's adjoint pair gets: (r_k - c, 1) on every path, or
        what comes to the same when the pair is combined.
      lanes: padded lanes [K, T]; only the first `lanes.num_lanes` are run.

    Returns:
      Buffers, slots and float32 [STATISTICS, K], of every lane: sum and maximum of |learner -
      sampler| over its action tokens, and 1 where its gradient is finite.
    """
    stats = jnp.zeros((STATISTICS, lanes.tokens.shape[0]), jnp.float32)

    def run_lane(lane: jax.Array, carry: Any) -> Any:
        buffers, slots, stats = carry
        (grad, prefix_grad), (gap_sum, gap_max) = _lane_gradient(
            settings, prefix_bucket, params, slots, lanes, lane
        )
        leaves = jax.tree.leaves((grad, prefix_grad))
        is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in leaves]).all()
        stats = stats.at[:, lane].set(jnp.stack([gap_sum, gap_max, is_finite]))
        buffers = tuple(acc.fold(coefficients[b, lane], grad) for b, acc in enumerate(buffers))
        if slots is not None:
            slot, pair = lanes.adjoint_slot[lane], pair_coefficients[:, lane]
            prefix_grad = slots.adjoint2.snapped(prefix_grad)  # as if it had been held
            slots = slots.replace(
                adjoint1=fold_at(slots.adjoint1, slot, pair[0], prefix_grad),
                adjoint2=fold_at(slots.adjoint2, slot, pair[1], prefix_grad),
            )
        return buffers, slots, stats

    return jax.lax.fori_loop(0, lanes.num_lanes, run_lane, (buffers, slots, stats))


class Binding(struct.PyTreeNode):
    """Where one held gradient goes on one replica.

    Attributes:
      is_used: bool []; false leaves everything as it is.
      coefficients: [num buffers], its weights in the buffers; all 0 drops it.
      pair_coefficients: [2], (r - c, 1): the weights of its share of the prompt.
      slot, held_slot: int32 []; prompt slot of its group, and of its own share.
    """

    is_used: jax.Array
    coefficients: jax.Array
    pair_coefficients: jax.Array
    slot: jax.Array
    held_slot: jax.Array


def bind(
    held: Sum, buffers: tuple[Sum, ...], slots: PromptSlots | None, binding: Binding
) -> tuple[Sum, tuple[Sum, ...], PromptSlots | None]:
    """Folds a held gradient into the buffers, and zeroes it."""
    grad = held.read()
    buffers = tuple(acc.fold(binding.coefficients[b], grad) for b, acc in enumerate(buffers))
    held = jax.tree.map(lambda h: jnp.where(binding.is_used, 0, h), held)
    if slots is None:
        return held, buffers, None
    share = slots.adjoint2.part(binding.held_slot, None).read()
    first, second = binding.pair_coefficients
    adjoint2 = fold_at(slots.adjoint2, binding.slot, second, share)
    slots = slots.replace(
        adjoint1=fold_at(slots.adjoint1, binding.slot, first, share),
        adjoint2=clear_at(adjoint2, binding.held_slot, None, binding.is_used),
    )
    return held, buffers, slots


def prompt_forward(
    settings: ScoreSettings, params: Params, slots: PromptSlots, prompts: Prompts
) -> PromptSlots:
    """Fills one slot with the keys and values of a prompt, and zeroes its adjoints.

    Args:
      prompts: tokens [P], length [] and slot []; a length of 0 changes nothing.
    """
    bucket = prompts.tokens.shape[0]
    kv = _prompt_kv(settings, params, prompts)

    is_used = prompts.length > 0

    def store(all_slots: jax.Array, new: jax.Array) -> jax.Array:
        old = all_slots[prompts.slot, :, :bucket]
        return all_slots.at[prompts.slot, :, :bucket].set(jnp.where(is_used, new, old))

    return PromptSlots(
        kv=jax.tree.map(store, slots.kv, kv),
        adjoint1=clear_at(slots.adjoint1, prompts.slot, bucket, is_used),
        adjoint2=clear_at(slots.adjoint2, prompts.slot, bucket, is_used),
    )


def prompt_backward(
    settings: ScoreSettings,
    params: Params,
    batch: Sum,
    slots: PromptSlots,
    coefficients: jax.Array,
    prompts: Prompts,
) -> Sum:
    """Adds the prompt's share of its group's gradient: one backward with the combined adjoint.

    Args:
      coefficients: [2], those that close the group's pair; both 0 change nothing.
    """
    bucket = prompts.tokens.shape[0]

    def combined(k1: jax.Array, k2: jax.Array) -> jax.Array:
        a, b = coefficients.astype(k1.dtype)
        part = a * k1 + b * k2
        return jnp.where((jnp.arange(bucket) < prompts.length)[None, :, None, None], part, 0)

    kv, pull_back = jax.vjp(lambda p: _prompt_kv(settings, p, prompts), params)
    first = slots.adjoint1.part(prompts.slot, bucket).read()
    second = slots.adjoint2.part(prompts.slot, bucket).read()
    adjoint = jax.tree.map(combined, first, second)
    (grad,) = pull_back(jax.tree.map(lambda a, x: a.astype(x.dtype), adjoint, kv))
    is_used = jnp.any(coefficients != 0) & (prompts.length > 0)
    return batch.fold(is_used.astype(coefficients.dtype), grad)


def close_group(
    batch: Sum,
    reward_score_grad: Sum,
    score_grad: Sum,
    coefficients: jax.Array,
    is_used: jax.Array,
) -> tuple[Sum, Sum, Sum]:
    """batch + a G1 + b G2 with (a, b) = `coefficients` [2], and the pair is zero again.

    Args:
      is_used: bool []; false leaves everything as it is.
    """
    is_added = is_used & jnp.any(coefficients != 0)
    batch = batch.close(coefficients, is_added, reward_score_grad, score_grad)

    def clear(pair: tuple[Sum, Sum]) -> tuple[Sum, Sum]:
        first, second = pair
        return first.cleared(), second.cleared()

    return batch, *in_place(is_used, clear, (reward_score_grad, score_grad))


def apply_update(
    optimizer: optax.GradientTransformation,
    master: Params,
    opt_state: optax.OptState,
    batch: Sum,
    denominator: jax.Array,
) -> tuple[Params, optax.OptState, Sum, jax.Array]:
    """Sums the replicas, divides once, negates once, steps once.

    With a non-finite norm parameters and moments stay as they are.

    Args:
      master: parameters in the optimizer's precision.
      batch: each replica's sum of A_i g_i, [R, ...], the ascent direction.
      denominator: scalar; action tokens or trajectories that arrived.

    Returns:
      (master, opt_state, zeroed batch, norm of the normalised gradient before clipping).
    """
    grads = jax.tree.map(lambda g: -g / denominator.astype(g.dtype), batch.total())
    norm = optax.tree.norm(grads)

    def step() -> tuple[Params, optax.OptState]:
        updates, new_opt_state = optimizer.update(grads, opt_state, master)
        return optax.apply_updates(master, updates), new_opt_state

    master, opt_state = jax.lax.cond(jnp.isfinite(norm), step, lambda: (master, opt_state))
    return master, opt_state, batch.cleared(), norm


def _prompt_kv(settings: ScoreSettings, params: Params, prompts: Prompts) -> KeysValues:
    """Keys and values [L, P, K, H] of one padded prompt."""
    offsets = jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)
    valid = (offsets < prompts.length)[None]
    kv = keys_values(settings.model, params, prompts.tokens[None], offsets[None], valid)
    return jax.tree.map(lambda x: x[:, 0], kv)


def _lane_gradient(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    slots: PromptSlots | None,
    lanes: Lanes,
    lane: jax.Array,
) -> Any:
    """((gradient, gradient of the prefix or None), (gap_sum, gap_max)) of one lane."""
    chosen: Lanes = jax.tree.map(lambda x: x[lane], lanes.replace(num_lanes=None))
    prefix = None
    if slots is not None:
        prefix = jax.tree.map(lambda x: x[chosen.slot, :, :prefix_bucket], slots.kv)

    def score_of(params: Params, prefix: KeysValues | None) -> Any:
        return score(settings, params, prefix, chosen)

    return jax.grad(score_of, argnums=(0, 1), has_aux=True)(params, prefix)
