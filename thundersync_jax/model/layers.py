"""The parts of a block: declared projections, RMSNorm, rotary positions, the MLP.

Every parameter is declared once, with its initialiser and its logical axes together. Stored
parameters are cast to `config.dtype` where they are used, so a float32 master and its bfloat16 copy
run the same arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.model.presets import LinearRopeScaling, Lora, TransformerConfig

Initializer = Callable[..., Any]

# Of a projection, beside its kernel: a module, so that the kernel is drawn as without it.
ADAPTER = "lora"


def at_least_float32(dtype: Any) -> Any:
    """The dtype of norms, softmax and logits: never below float32, float64 where the model is."""
    return jnp.promote_types(dtype, jnp.float32)


def fan_in_normal(fan_in: int, scale: float = 1.0) -> Initializer:
    """Normal of deviation scale / sqrt(fan_in): unit inputs give outputs of size `scale`."""
    return nn.initializers.normal(scale / math.sqrt(fan_in))


def centered_uniform(bound: float) -> Initializer:
    """Uniform from -bound to bound."""
    uniform = nn.initializers.uniform(2 * bound)
    return lambda *args: uniform(*args) - bound


def residual_scale(config: TransformerConfig) -> float:
    """Keeps the residual stream at its initial size: every layer adds two outputs to it."""
    return 1.0 / math.sqrt(2 * config.num_layers)


class Einsum(nn.Module):
    """One projection: an einsum with a kernel of shape `shape`, whose logical axes are `axes`; with
    a bias over all of them but the first, and an adapter where `config.lora` targets its name.
    """

    config: TransformerConfig
    equation: str
    shape: Sequence[int]
    axes: Sequence[str]
    kernel_init: Initializer
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init: Initializer = nn.with_logical_partitioning(self.kernel_init, tuple(self.axes))
        kernel = self.param("kernel", init, tuple(self.shape), self.config.param_dtype)
        outputs = jnp.einsum(self.equation, inputs, kernel.astype(self.config.dtype))
        if self.use_bias:
            zeros: Initializer = nn.with_logical_partitioning(
                nn.initializers.zeros, tuple(self.axes[1:])
            )
            bias = self.param("bias", zeros, tuple(self.shape[1:]), self.config.param_dtype)
            outputs += bias.astype(self.config.dtype)
        lora = self.config.lora
        if lora is not None and self.name in lora.targets:
            outputs += LowRank(
                self.config, lora, self.equation, self.shape, self.axes, name=ADAPTER
            )(inputs)
        return outputs


class LowRank(nn.Module):
    """alpha / rank * (inputs A) B: what an adapter adds to a projection, through `rank` numbers a
    token. Arguments as of the projection.
    """

    config: TransformerConfig
    lora: Lora
    equation: str
    shape: Sequence[int]
    axes: Sequence[str]

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        given, kernel, made = re.split(r",|->", self.equation)
        inner = [letter for letter in kernel if letter in given]  # summed over, first in the kernel
        count, rank = len(inner), self.lora.rank
        shape, axes = tuple(self.shape), tuple(self.axes)
        bound = 1 / math.sqrt(math.prod(shape[:count]))  # PEFT begins so
        first = self._factor(
            "a", centered_uniform(bound), (*shape[:count], rank), (*axes[:count], "rank")
        )
        second = self._factor(
            "b", nn.initializers.zeros, (rank, *shape[count:]), ("rank", *axes[count:])
        )
        narrow = "".join(letter for letter in given if letter not in inner) + "R"
        low = jnp.einsum(f"{given},{kernel[:count]}R->{narrow}", inputs, first)
        return jnp.einsum(f"{narrow},R{kernel[count:]}->{made}", low, second) * self.lora.scale

    def _factor(
        self, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str, ...]
    ) -> jax.Array:
        placed: Initializer = nn.with_logical_partitioning(init, axes)
        stored = at_least_float32(self.config.param_dtype)
        return self.param(name, placed, shape, stored).astype(self.config.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last axis, in at least float32."""

    config: TransformerConfig
    axis: str = "embed"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        c = self.config
        one = nn.initializers.zeros if c.zero_centered_norms else nn.initializers.ones
        init: Initializer = nn.with_logical_partitioning(one, (self.axis,))
        scale = self.param("scale", init, (inputs.shape[-1],), c.param_dtype)
        wide = inputs.astype(at_least_float32(inputs.dtype))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + c.rms_norm_eps)
        if c.zero_centered_norms:
            return (normed * (1 + scale.astype(normed.dtype))).astype(c.dtype)
        return normed.astype(c.dtype) * scale.astype(c.dtype)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU."""

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
        activation = nn.silu if self.config.activation == "silu" else nn.gelu
        return down(activation(gate) * up)


def rotary_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians per position, float64 [H/2]; Llama-3 scaling as published with Llama 3.1."""
    frequencies = _unscaled(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotary_tables(config: TransformerConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, each [B, T, H/2] in at least float32; of a model
    with windows [2, B, T, H/2], those of its layers without one first.
    """
    frequencies = rotary_frequencies(config)
    if config.windows:
        local = _unscaled(config.local_rope_theta, config.head_dim)
        frequencies = np.stack([frequencies, local])[:, None, None]
    dtype = at_least_float32(config.dtype)
    angles = positions[..., None].astype(dtype) * jnp.asarray(frequencies, dtype)
    return jnp.cos(angles), jnp.sin(angles)


def _unscaled(theta: float, head_dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotate(inputs: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [B, T, heads, H]; pairs dimension i with i + H/2, as Hugging Face checkpoints do."""
    first, second = jnp.split(inputs.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, H/2]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(inputs.dtype)
