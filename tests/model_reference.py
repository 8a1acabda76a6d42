"""An independent decoder in plain numpy float64, one row at a time, loops over layers and heads.

Shares nothing with `thundersync_jax.model` but the names of the parameters and the configuration.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.model import transformer
from thundersync_jax.model.presets import Llama3RopeScaling, TransformerConfig


def random_params(config: TransformerConfig, seed: int = 0) -> transformer.Params:
    """Norm scales near 1 and everything else large enough to matter."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(center + 0.2 * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, transformer.abstract_params(config))


def reference_logits(
    config: TransformerConfig, params: dict[str, Any], tokens: np.ndarray
) -> np.ndarray:
    """Logits float64 [T, V] of one row of tokens [T] at positions 0 to T - 1."""
    embedding = np.asarray(params["embedding"], np.float64)
    hidden = embedding[tokens]
    for layer in range(config.num_layers):
        block = _layer(params["blocks"], layer)
        hidden = hidden + _attention(
            config, block["attention"], _norm(config, block["attention_norm"], hidden)
        )
        normed = _norm(config, block["mlp_norm"], hidden)
        gate, up, down = (block["mlp"][name]["kernel"] for name in ("gate", "up", "down"))
        gated = normed @ gate
        hidden = hidden + (gated / (1 + np.exp(-gated)) * (normed @ up)) @ down
    hidden = _norm(config, params["final_norm"], hidden)
    if config.tie_embeddings:
        return hidden @ embedding.T
    return hidden @ np.asarray(params["output_kernel"], np.float64)


def _layer(tree: Any, layer: int) -> Any:
    if isinstance(tree, dict):
        return {name: _layer(child, layer) for name, child in tree.items()}
    return np.asarray(tree[layer], np.float64)


def _norm(config: TransformerConfig, params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    scale = np.asarray(params["scale"], np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale


def _attention(config: TransformerConfig, params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    length = x.shape[0]
    out = np.zeros_like(x)
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        query = x @ params["query"]["kernel"][:, head]
        key = x @ params["key"]["kernel"][:, kv_head]
        value = x @ params["value"]["kernel"][:, kv_head]
        if config.use_qk_norm:
            query = _norm(config, params["query_norm"], query)
            key = _norm(config, params["key_norm"], key)
        query, key = _rotate(config, query), _rotate(config, key)
        for t in range(length):
            scores = key[: t + 1] @ query[t] / math.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            mixed = weights / weights.sum() @ value[: t + 1]
            out[t] += mixed @ params["output"]["kernel"][head]
    return out


def _rotate(config: TransformerConfig, x: np.ndarray) -> np.ndarray:
    """Multiplies x[t, i] + 1j x[t, i + H/2] by exp(1j t frequency_i)."""
    half = config.head_dim // 2
    frequencies = np.array([_frequency(config, i) for i in range(half)])
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * np.outer(np.arange(len(x)), frequencies)
    )
    return np.concatenate([turned.real, turned.imag], axis=1)


def _frequency(config: TransformerConfig, index: int) -> float:
    frequency = config.rope_theta ** (-2 * index / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    assert isinstance(scaling, Llama3RopeScaling)
    wavelength = 2 * math.pi / frequency
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_position / scaling.low_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_stretched:
        return frequency / scaling.factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
