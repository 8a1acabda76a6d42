"""A small engine that the serving tests share, compiled once, and requests for it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from model_reference import random_params

from thundersync_jax.config_serving import ServingSection
from thundersync_jax.model import transformer
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.messages import SampleRequest, SamplingParams

ROW_LENGTH = 24
CONFIG = TransformerConfig(
    vocab_size=13,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e4,
    use_qk_norm=True,
)
SERVING = ServingSection(
    num_slots=4,
    steps_per_sync=3,
    extend_rows=2,
    extend_buckets=(2, 5),
    request_timeout_s=30.0,
    publish_timeout_s=20.0,
)


@functools.cache
def policy() -> transformer.Params:
    return random_params(CONFIG)


@functools.cache
def warm_engine() -> PolicyEngine:
    """Shared: tests give it no other weights than `policy()`, version 7."""
    engine = PolicyEngine(CONFIG, SERVING, ROW_LENGTH)
    engine.warm_up(with_prefill=True)
    engine.weights.publish(policy(), 7)
    return engine


def key(index: int, *, group: int = 0) -> TrajectoryKey:
    return TrajectoryKey(step=0, group=group, index=index)


def request(
    index: int, context_ids: tuple[int, ...], *, group: int = 0, **sampling: object
) -> SampleRequest:
    params = SamplingParams(**{"max_tokens": 4, "seed": index} | sampling)
    return SampleRequest(session=key(index, group=group), context_ids=context_ids, sampling=params)


@functools.partial(jax.jit, static_argnums=0)
def _all_logprobs(
    config: TransformerConfig, params: transformer.Params, tokens: jax.Array
) -> jax.Array:
    positions = jnp.arange(tokens.shape[0])[None]
    hidden = transformer.forward(config, params, tokens[None], positions)
    return jax.nn.log_softmax(transformer.logits(config, params, hidden)[0])


def learner_logprobs(token_ids: tuple[int, ...]) -> np.ndarray:
    """log p(token_ids[t] | token_ids[:t]) of `policy()` by one full forward; entry 0 is 0."""
    padded = np.zeros(ROW_LENGTH, np.int32)
    padded[: len(token_ids)] = token_ids
    logprobs = np.asarray(_all_logprobs(CONFIG, policy(), padded))
    later = logprobs[np.arange(len(token_ids) - 1), list(token_ids[1:])]
    return np.concatenate([[0.0], later])
