"""The optax chain: one clip by global norm, AdamW or Adafactor, one schedule. Norm and clip see the
whole, normalised gradient.
"""

from __future__ import annotations

import optax

from thundersync_jax.config_sections import OptimizerSection


def learning_rate_schedule(config: OptimizerSection) -> optax.Schedule:
    """Learning rate by number of *applied* updates: an empty step does not advance it."""
    peak, warmup = config.learning_rate, config.warmup_steps
    first = peak / (warmup + 1)  # the first update already moves
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=first,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=config.decay_steps,
        )
    if warmup:
        return optax.linear_schedule(first, peak, warmup)
    return optax.constant_schedule(peak)


def make_optimizer(config: OptimizerSection) -> optax.GradientTransformation:
    """Descends: its input is the negated ascent direction.

    Adafactor's steps do not grow with the parameters' size, from which the zeros of a new adapter
    would suffer: learning rate and weight decay mean the same in both.
    """
    rate = learning_rate_schedule(config)
    if config.name == "adafactor":
        steps = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
    else:
        steps = optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), steps)
