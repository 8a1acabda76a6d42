"""The parts of a block: declared projections, RMSNorm, rotary positions, SwiGLU.

Every parameter is declared once, with its initialiser and its logical axes together. Stored
parameters are cast to `config.dtype` where they are used, so a float32 master and its bfloat16 copy
run the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.model.presets import TransformerConfig

Initializer = Callable[..., Any]


def at_least_float32(dtype: Any) -> Any:
    """The dtype of norms, softmax and logits: never below float32, float64 where the model is."""
    return jnp.promote_types(dtype, jnp.float32)


def fan_in_normal(fan_in: int, scale: float = 1.0) -> Initializer:
    """Normal of deviation scale / sqrt(fan_in): unit inputs give outputs of size `scale`."""
    return nn.initializers.normal(scale / math.sqrt(fan_in))


def residual_scale(config: TransformerConfig) -> float:
    """Keeps the residual stream at its initial size: every layer adds two outputs to it."""
    return 1.0 / math.sqrt(2 * config.num_layers)


class Einsum(nn.Module):
    """One projection: an einsum with a kernel of shape `shape`, whose logical axes are `axes`."""

    config: TransformerConfig
    equation: str
    shape: Sequence[int]
    axes: Sequence[str]
    kernel_init: Initializer

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init: Initializer = nn.with_logical_partitioning(self.kernel_init, tuple(self.axes))
        kernel = self.param("kernel", init, tuple(self.shape), self.config.param_dtype)
        return jnp.einsum(self.equation, inputs, kernel.astype(self.config.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last axis, in at least float32."""

    config: TransformerConfig
    axis: str = "embed"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init: Initializer = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", init, (inputs.shape[-1],), self.config.param_dtype)
        wide = inputs.astype(at_least_float32(inputs.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.config.rms_norm_eps)
        return normed.astype(self.config.dtype) * scale.astype(self.config.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        embed, mlp = self.config.embed_dim, self.config.mlp_dim
        wide_init, wide_axes = fan_in_normal(embed), ("embed", "mlp")
        gate = Einsum(self.config, "BTD,DF->BTF", (embed, mlp), wide_axes, wide_init, name="gate")(
            inputs
        )
        up = Einsum(self.config, "BTD,DF->BTF", (embed, mlp), wide_axes, wide_init, name="up")(
            inputs
        )
        down_init = fan_in_normal(mlp, residual_scale(self.config))
        down = Einsum(
            self.config, "BTF,FD->BTD", (mlp, embed), ("mlp", "embed"), down_init, name="down"
        )
        return down(nn.silu(gate) * up)


def rotary_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians per position, float64 [H/2]; Llama-3 scaling as published with Llama 3.1."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotary_tables(config: TransformerConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, each [B, T, H/2] in at least float32."""
    dtype = at_least_float32(config.dtype)
    angles = positions[..., None].astype(dtype) * jnp.asarray(rotary_frequencies(config), dtype)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(inputs: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [B, T, heads, H]; pairs dimension i with i + H/2, as Hugging Face checkpoints do."""
    first, second = jnp.split(inputs.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, H/2]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(inputs.dtype)
