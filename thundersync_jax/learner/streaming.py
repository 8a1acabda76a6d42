"""The streaming programs: pure functions over donated accumulators, one replica's view.

    prompt_forward    keys and values of a group's prompt, once per group and replica
    accumulate        acc_b <- acc_b + C[b, k] g_k for every lane k and buffer b, g_k = grad S_k;
                      with terms, one backward pass more for each of their sums K
    bind              a gradient computed ahead of its verdict goes where the verdict says
    close_group       batch <- batch + a G1 + b G2, and the pair is zero again
    prompt_backward   batch <- batch + vjp of the prompt with the adjoint a K1 + b K2; so the terms
    apply_update      one division, one clip, one optimizer step, and the batch sum is zero again

The sums of a step are (batch, *terms): that of the score, and one for each of the objective's
`term_sums`, which has a denominator of its own. `programs.py` runs all but the last under
shard_map, manual over `data`: they see one replica and cannot communicate with another. A
coefficient of exactly 0 leaves its buffer alone, so a non-finite g stays out of it. Accumulators
are a `Sum` of one kind; held gradients are floats in at least float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import struct

from thundersync_jax.learner.buckets import Lanes, Prompts
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.learner.sums import Sum, clear_at, fold_at, in_place
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.trainable import parameter_vjp
from thundersync_jax.model.transformer import keys_values

Params = Any  # a pytree of arrays; the model alone knows its structure
STATISTICS = 3  # numbers that a call says of a lane, in one array: each costs a transfer


class PromptSlots(struct.PyTreeNode):
    """Shared prompts: S slots of P positions.

    Attributes:
      kv: [S, L, P, K, H] in the model's dtype.
      adjoint1, adjoint2: sums of KeysValues [S, L, P, K, H]; the prompt's shares of G1 and G2,
        to be differentiated through the prompt when the group closes.
      terms: the same, the prompt's share of each term sum.
    """

    kv: KeysValues
    adjoint1: Sum
    adjoint2: Sum
    terms: tuple[Sum, ...] = ()

    @property
    def adjoints(self) -> tuple[Sum, ...]:
        return (self.adjoint1, self.adjoint2, *self.terms)

    def with_adjoints(self, adjoints: Sequence[Sum]) -> Self:
        first, second, *terms = adjoints
        return self.replace(adjoint1=first, adjoint2=second, terms=tuple(terms))


def zeros_like_params(params: Params) -> Params:
    """One accumulator: the parameters' shapes in at least float32."""
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


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
    """Folds the gradients of the filled lanes into every buffer.

    Args:
      prefix_bucket: positions of the slots to attend to; 0 for lanes without a shared prompt.
      buffers: accumulators, donated by the caller: the batch sum, the term sums, and others. A term
        sum takes the gradient of its K, everything else that of S. Gradients are in the parameters
        that train.
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
        grads, (gap_sum, gap_max) = _lane_gradients(
            settings, prefix_bucket, params, slots, lanes, lane
        )
        leaves = jax.tree.leaves(grads)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in leaves]).all()
        stats = stats.at[:, lane].set(jnp.stack([gap_sum, gap_max, is_finite]))
        buffers = tuple(
            acc.fold(coefficients[b, lane], grads[b if b < len(grads) else 0][0])
            for b, acc in enumerate(buffers)
        )
        if slots is not None:
            slot, pair = lanes.adjoint_slot[lane], pair_coefficients[:, lane]
            (_, prefix_grad), *terms = grads
            prefix_grad = slots.adjoint2.snapped(prefix_grad)  # as if it had been held
            slots = slots.replace(
                adjoint1=fold_at(slots.adjoint1, slot, pair[0], prefix_grad),
                adjoint2=fold_at(slots.adjoint2, slot, pair[1], prefix_grad),
                terms=tuple(
                    fold_at(share, lanes.slot[lane], coefficients[1 + m, lane], terms[m][1])
                    for m, share in enumerate(slots.terms)
                ),
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

    cleared = [clear_at(acc, prompts.slot, bucket, is_used) for acc in slots.adjoints]
    return slots.replace(kv=jax.tree.map(store, slots.kv, kv)).with_adjoints(cleared)


def prompt_backward(
    settings: ScoreSettings,
    params: Params,
    sums: tuple[Sum, ...],
    slots: PromptSlots,
    coefficients: jax.Array,
    prompts: Prompts,
) -> tuple[Sum, ...]:
    """Adds the prompt's share of its group's gradient: one backward with the combined adjoint, and
    one for each term sum.

    Args:
      sums: (batch, *terms).
      coefficients: two of `Sum.weights`, those that close the group's pair; both 0 leave the batch
        as it is.
    """
    bucket = prompts.tokens.shape[0]
    is_prompt = jnp.arange(bucket) < prompts.length
    kv, pull_back = parameter_vjp(
        settings.model, lambda params: _prompt_kv(settings, params, prompts), params
    )

    def pulled_back(adjoint: KeysValues) -> Params:
        def cotangent(a: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(is_prompt[None, :, None, None], a, 0).astype(x.dtype)

        (grad,) = pull_back(jax.tree.map(cotangent, adjoint, kv))
        return grad

    first, second, *others = [acc.part(prompts.slot, bucket) for acc in slots.adjoints]
    is_used = prompts.length > 0
    is_scored = is_used & jnp.any(coefficients != 0)
    batch, *terms = sums
    grad = pulled_back(first.combined(coefficients, second))
    batch = batch.fold(is_scored.astype(coefficients.dtype), grad)
    return batch, *(
        acc.fold(is_used.astype(coefficients.dtype), pulled_back(adjoint.read()))
        for acc, adjoint in zip(terms, others, strict=True)
    )


def close_group(
    batch: Sum,
    reward_score_grad: Sum,
    score_grad: Sum,
    coefficients: jax.Array,
    is_used: jax.Array,
) -> tuple[Sum, Sum, Sum]:
    """batch + a G1 + b G2 with (a, b) = `coefficients`, and the pair is zero again.

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
    sums: tuple[Sum, ...],
    denominators: jax.Array,
) -> tuple[Params, optax.OptState, tuple[Sum, ...], jax.Array]:
    """Sums the replicas, divides each sum once, negates once, steps once.

    With a non-finite norm parameters and moments stay as they are.

    Args:
      master: parameters in the optimizer's precision.
      sums: every replica's (batch, *terms), [R, ...]: ascent directions.
      denominators: [num_sums]; what arrived, of each.

    Returns:
      (master, opt_state, zeroed sums, norm of the normalised gradient before clipping).
    """

    def descent(*totals: jax.Array) -> jax.Array:
        parts = [g / d.astype(g.dtype) for g, d in zip(totals, denominators, strict=True)]
        return -functools.reduce(jnp.add, parts)

    grads = jax.tree.map(descent, *(acc.total() for acc in sums))
    norm = optax.tree.norm(grads)

    def step() -> tuple[Params, optax.OptState]:
        updates, new_opt_state = optimizer.update(grads, opt_state, master)
        return optax.apply_updates(master, updates), new_opt_state

    master, opt_state = jax.lax.cond(jnp.isfinite(norm), step, lambda: (master, opt_state))
    return master, opt_state, tuple(acc.cleared() for acc in sums), norm


def _prompt_kv(settings: ScoreSettings, params: Params, prompts: Prompts) -> KeysValues:
    """Keys and values [L, P, K, H] of one padded prompt."""
    offsets = jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)
    valid = (offsets < prompts.length)[None]
    kv = keys_values(settings.model, params, prompts.tokens[None], offsets[None], valid)
    return jax.tree.map(lambda x: x[:, 0], kv)


def _lane_gradients(
    settings: ScoreSettings,
    prefix_bucket: int,
    params: Params,
    slots: PromptSlots | None,
    lanes: Lanes,
    lane: jax.Array,
) -> Any:
    """([(gradient, gradient of the prefix or None) of S and of every K], (gap_sum, gap_max)).

    One forward pass serves all of them.
    """
    chosen: Lanes = jax.tree.map(lambda x: x[lane], lanes.replace(num_lanes=None))
    prefix = None
    if slots is not None:
        prefix = jax.tree.map(lambda x: x[chosen.slot, :, :prefix_bucket], slots.kv)

    def score_of(params: Params, prefix: KeysValues | None) -> Any:
        return score(settings, params, prefix, chosen)

    sums, pull_back, gaps = parameter_vjp(settings.model, score_of, params, prefix, has_aux=True)
    return [pull_back(one) for one in jnp.eye(sums.shape[0], dtype=sums.dtype)], gaps
