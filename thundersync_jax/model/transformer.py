"""The decoder as pure functions of (config, params, ...): the part of `model` that others call.

Invariants:
  * Parameters outside this folder are a plain pytree of arrays; `logical_axes` has its structure.
  * `forward` and `forward_cached` give the same hidden states for the same tokens, however the
    tokens are cut into calls.
  * Padding, other segments and cache entries later than a query have no effect on valid outputs.
Called by the learner and its reference (`forward`, `keys_values`, `forward_extending`) and by the
serving engine (`forward_cached`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from thundersync_jax.model.attention import (
    MAX_PAIRS,
    Attention,
    Mask,
    Packed,
    causal_mask,
    packed_mask,
)
from thundersync_jax.model.embedding import look_up
from thundersync_jax.model.kv_cache import KeysValues, KVCache
from thundersync_jax.model.layers import (
    GatedMLP,
    RMSNorm,
    at_least_float32,
    fan_in_normal,
    rotary_tables,
)
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.visible import visible, wants_splash
from thundersync_jax.sharding import constrain

Params = dict[str, Any]

# Logits of a new model have this standard deviation, so it starts near the uniform distribution.
INITIAL_LOGIT_SCALE = 0.1
# The size of what the first blocks of a small model add, so that neither drowns the other.
UNTIED_EMBEDDING_STD = 0.3


class Block(nn.Module):
    """Attention and an MLP, each on a normed copy of the residual stream. Scanned over layers."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[jax.Array, KVCache | None],
        layer: jax.Array,
        prefix: KeysValues | None,
        rotary: tuple[jax.Array, jax.Array],
        mask: Mask,
        rows: jax.Array | None,
        positions: jax.Array,
    ) -> tuple[tuple[jax.Array, KVCache | None], KeysValues]:
        hidden, cache = carry
        normed = RMSNorm(self.config, name="attention_norm")(hidden)
        attention = Attention(self.config, name="attention")
        attended, cache, new = attention(
            normed, rotary, mask, layer, rows, positions, cache, prefix
        )
        if self.config.use_post_norms:
            attended = RMSNorm(self.config, name="attention_post_norm")(attended)
        hidden = constrain(hidden + attended, ("batch", "length", None))
        normed = RMSNorm(self.config, name="mlp_norm")(hidden)
        added = GatedMLP(self.config, name="mlp")(normed)
        if self.config.use_post_norms:
            added = RMSNorm(self.config, name="mlp_post_norm")(added)
        hidden = constrain(hidden + added, ("batch", "length", None))
        return (hidden, cache), new


class Transformer(nn.Module):
    """Embedding, scanned blocks, final norm; declares the kernel that `output_kernel` reads."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: Mask,
        rows: jax.Array | None,
        cache: KVCache | None,
        prefix: KeysValues | None = None,
    ) -> tuple[jax.Array, KVCache | None, KeysValues]:
        c = self.config
        hidden = look_up(self._embedding(), tokens).astype(c.dtype)
        if c.scale_embeddings:
            hidden = hidden * jnp.asarray(math.sqrt(c.embed_dim), c.dtype)
        hidden = constrain(hidden, ("batch", "length", None))
        rotary = rotary_tables(c, positions)
        carry, layers = (hidden, cache), jnp.arange(c.num_layers)  # hidden [B, T, D]
        blocks = self._blocks()
        (hidden, cache), new = blocks(carry, layers, prefix, rotary, mask, rows, positions)
        if not c.tie_embeddings:
            init = nn.with_logical_partitioning(
                fan_in_normal(c.embed_dim, INITIAL_LOGIT_SCALE), ("embed", "vocab")
            )
            self.param("output_kernel", init, (c.embed_dim, c.vocab_size), c.param_dtype)
        return RMSNorm(c, name="final_norm")(hidden), cache, new

    def _embedding(self) -> Any:
        c = self.config
        tied_std = INITIAL_LOGIT_SCALE / math.sqrt(c.embed_dim)
        normal = nn.initializers.normal(tied_std if c.tie_embeddings else UNTIED_EMBEDDING_STD)
        init = nn.with_logical_partitioning(normal, ("vocab", "embed"))
        return self.param("embedding", init, (c.vocab_size, c.embed_dim), c.param_dtype)

    def _blocks(self) -> nn.Module:
        """One block, its parameters with a leading `layers` axis, under the remat policy."""
        block: Any = Block
        if self.config.remat != "none":
            policy: Callable[..., bool] | None = None
            if self.config.remat == "dots":
                policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            # Inside a scan nothing can be shared with the forward pass: no barrier is needed.
            block = nn.remat(block, policy=policy, prevent_cse=False)
        scanned = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
            length=self.config.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scanned(self.config, name="blocks")


def init_params(config: TransformerConfig, seed: int | jax.Array) -> Params:
    """Fresh parameters in `config.param_dtype`, determined by (config, seed).

    May be called inside `jax.jit` with out_shardings to create each parameter where it lives.
    """
    return nn.unbox(_init_boxed(config, seed))


def logical_axes(config: TransformerConfig) -> Params:
    """The logical axis names of every parameter as a tuple, in the structure of the parameters."""
    boxed = jax.eval_shape(functools.partial(_init_boxed, config), 0)
    return jax.tree.map(
        lambda box: tuple(box.names), boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned)
    )


def abstract_params(config: TransformerConfig) -> Params:
    """Shape and dtype of every parameter, without computing any."""
    return jax.eval_shape(functools.partial(init_params, config), 0)


def num_parameters(config: TransformerConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def forward(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    prefix: KeysValues | None = None,
    prefix_valid: jax.Array | None = None,
) -> jax.Array:
    """Hidden states after the final norm, [B, T, D] in `config.dtype`.

    Args:
      tokens, positions: int32 [B, T]. A token attends to those of its segment whose position is
        not later than its own.
      segment_ids: int32 [B, T], ascending along the row; 0 is padding, which is not attended and
        whose outputs are finite but meaningless. A bool array is one segment; None is all of it.
      prefix: keys and values [L, B, P, K, H] of the tokens at positions 0 to P - 1, to attend to as
        well; `keys_values` computes them.
      prefix_valid: bool [B, P], needed with a prefix.
    """
    return forward_extending(config, params, tokens, positions, segment_ids, prefix, prefix_valid)[
        0
    ]


def keys_values(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
) -> KeysValues:
    """What later tokens attend to of these: [L, B, T, K, H]. Arguments as in `forward`."""
    return forward_extending(config, params, tokens, positions, segment_ids)[1]


def forward_extending(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None = None,
    prefix: KeysValues | None = None,
    prefix_valid: jax.Array | None = None,
) -> tuple[jax.Array, KeysValues]:
    """What `forward` and `keys_values` return, in one pass: a row that is continued later."""
    _check_precision(config)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    segment_ids = jnp.asarray(segment_ids, jnp.int32)
    packed = Packed(positions=positions, segment_ids=segment_ids, prefix_valid=prefix_valid)
    num_keys = tokens.shape[1] + (0 if prefix_valid is None else prefix_valid.shape[1])
    mask: Mask
    if wants_splash(config, tokens.shape[1]):
        mask = visible(segment_ids, prefix_valid)
    elif config.windows or tokens.shape[1] * num_keys > MAX_PAIRS:
        mask = packed  # of which every layer makes its own
    else:
        mask = packed_mask(packed)
    model: Any = Transformer(config)
    hidden, _, new = model.apply({"params": params}, tokens, positions, mask, None, None, prefix)
    return hidden, new


def forward_cached(
    config: TransformerConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    cache: KVCache,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends tokens to rows of the cache, in place where the cache is donated.

    Args:
      tokens, positions: int32 [B, T]; the position is the index in the row, and one outside [0, S)
        marks padding.
      rows: int32 [B], distinct: the cache row of each batch row, one at num_rows or more marks
        padding. None: all of them, in order.

    Returns:
      Hidden states after the final norm [B, T, D], and the cache.
    """
    _check_precision(config)
    mask = causal_mask(positions, jnp.arange(cache.length)[None])
    model: Any = Transformer(config)
    hidden, cache, _ = model.apply({"params": params}, tokens, positions, mask, rows, cache)
    return hidden, cache


def output_kernel(config: TransformerConfig, params: Params) -> jax.Array:
    """The kernel [D, V] from hidden states to logits: the transposed embedding when tied."""
    return params["embedding"].T if config.tie_embeddings else params["output_kernel"]


def logits(config: TransformerConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] of hidden states [..., D], in at least float32."""
    kernel = output_kernel(config, params).astype(config.dtype)
    return jnp.matmul(hidden, kernel, preferred_element_type=at_least_float32(config.dtype))


@functools.partial(jax.jit, static_argnums=0)
def _init_boxed(config: TransformerConfig, seed: int | jax.Array) -> Params:
    _check_precision(config)
    token = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    return Transformer(config).init(jax.random.key(seed), token, token, mask, None, None)["params"]


def _check_precision(config: TransformerConfig) -> None:
    if "float64" in (config.dtype, config.param_dtype) and not jax.config.read("jax_enable_x64"):
        raise ModelError(
            f"dtype = {config.dtype!r}, param_dtype = {config.param_dtype!r}: 64-bit JAX is off; "
            "call jax.config.update('jax_enable_x64', True) first"
        )
