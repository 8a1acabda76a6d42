"""Low-rank adapters (LoRA, arXiv 2106.09685): a kernel W becomes W + alpha / rank * A B.

`layers.LowRank` declares A and B beside a kernel and adds (x A) B to x W, in the learner as in the
engine: both run one arithmetic, and an update too small for W's bfloat16 is not lost. B begins at
zero, so that a new policy is its base. A lies as the inputs of its kernel, B as the outputs.
"""

from __future__ import annotations

import dataclasses
import difflib

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from thundersync_jax.config_lora import LoraSection
from thundersync_jax.model.layers import ADAPTER, at_least_float32
from thundersync_jax.model.presets import Lora, ModelError, TransformerConfig
from thundersync_jax.model.transformer import Params, logical_axes


def with_adapters(config: TransformerConfig, section: LoraSection) -> TransformerConfig:
    """The model with the adapters that a configuration asks for, if any. Its base is stored in the
    dtype that it computes in, for no step changes it.

    Raises:
      ModelError: a target is no projection of the model; names those that are.
    """
    if not section.rank:
        return config
    paths = flatten_dict(logical_axes(config))
    projections = sorted(path[-2] for path in paths if path[-1] == "kernel")
    unknown = [name for name in section.targets if name not in projections]
    if unknown:
        near = difflib.get_close_matches(unknown[0], projections, n=1, cutoff=0.0)[0]
        raise ModelError(
            f"model.lora.targets = {section.targets}: {', '.join(map(repr, unknown))} of the model "
            f"is no projection. Did you mean {near!r}? There are: {', '.join(projections)}"
        )
    if section.rank > config.embed_dim:
        raise ModelError(
            f"model.lora.rank = {section.rank}: expected at most {config.embed_dim}, the model's "
            "width: no kernel has a higher rank"
        )
    lora = Lora(rank=section.rank, alpha=section.alpha, targets=section.targets)
    return dataclasses.replace(config, lora=lora, param_dtype=config.dtype)


def merged_kernel(config: TransformerConfig, projection: Params, layer: int) -> jax.Array:
    """W + alpha / rank * A B of one layer, in at least float32; W itself without an adapter.

    Args:
      projection: its parameters, with a leading axis of layers.
    """
    kernel = projection["kernel"][layer]
    if config.lora is None or ADAPTER not in projection:
        return kernel
    wide = at_least_float32(kernel.dtype)
    factors = projection[ADAPTER]
    first, second = (factors[name][layer].astype(wide) for name in ("a", "b"))
    return kernel.astype(wide) + config.lora.scale * jnp.tensordot(first, second, axes=1)
