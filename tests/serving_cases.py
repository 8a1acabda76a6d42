"""A small engine that the serving tests share, compiled once, and requests for it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable

import jax
import jax.numpy as jnp
import numpy as np
from model_reference import random_params

from thundersync_jax.config_serving import ServingSection
from thundersync_jax.model import transformer
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.client import PolicyClient
from thundersync_jax.transport.messages import SampleRequest, SampleResult, SamplingParams

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


def fresh_engine(kind: type[PolicyEngine] = PolicyEngine, **serving: object) -> PolicyEngine:
    """An engine of its own with the shared programs, and `policy()` as version 7."""
    engine = kind(CONFIG, dataclasses.replace(SERVING, **serving), ROW_LENGTH)
    engine._programs = dict(warm_engine()._programs)
    engine.warm_up()
    engine.weights.publish(policy(), 7)
    return engine


async def play(
    client: PolicyClient, index: int, num_turns: int, *, group: int = 0, **sampling: object
) -> tuple[tuple[int, ...], list[SampleResult]]:
    """A trajectory of turns with two observation tokens between them."""
    context, results = (1, 2, index % 13), []
    for turn in range(num_turns):
        result = await client.sample(request(index, context, group=group, **sampling))
        results.append(result)
        context += result.token_ids
        if turn + 1 < num_turns:
            context += (5, turn)
    await client.release(key(index, group=group))
    return context, results


def run(coroutine: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await coroutine

    asyncio.run(bounded())


def key(index: int, *, group: int = 0) -> TrajectoryKey:
    return TrajectoryKey(step=0, group=group, index=index)


def request(
    index: int,
    context_ids: tuple[int, ...],
    *,
    group: int = 0,
    policy_version: int | None = None,
    **sampling: object,
) -> SampleRequest:
    return SampleRequest(
        session=key(index, group=group),
        context_ids=context_ids,
        sampling=SamplingParams(**{"max_tokens": 4, "seed": index} | sampling),
        policy_version=policy_version,
    )


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
