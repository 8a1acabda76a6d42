"""The optax chain: one clip by global norm, AdamW, one schedule. Norm and clip see the whole,
normalised gradient.
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
    """Descends: its input is the negated ascent direction."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
