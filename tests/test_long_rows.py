"""Long rows, large vocabularies: nothing of size T x T or T x V exists, and the sums are right."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.learner.buckets import Example, LaneItem, Lanes, pad_lanes
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.model import attention
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import abstract_params, init_params

LENGTH, VOCAB = 32_768, 150_000
MODEL = TransformerConfig(
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e4,
)


def lane(examples: tuple[Example, ...], bucket: int) -> Lanes:
    item = LaneItem(examples=examples, scales=(1.0,) * len(examples))
    lanes = pad_lanes([[item]], 1, bucket).replace(num_lanes=None)
    return jax.tree.map(lambda x: x[0, 0], lanes)


def example(rng: np.random.Generator, length: int) -> Example:
    ids = rng.integers(0, VOCAB, length + 1).astype(np.int32)
    weights = rng.normal(size=length).astype(np.float32)
    logprobs = np.full(length, -11.0, np.float32)
    return Example(tokens=ids[:-1], targets=ids[1:], weights=weights, behavior_logprobs=logprobs)


@functools.partial(jax.jit, static_argnums=0)
def gradient(model: TransformerConfig, params, lane: Lanes):
    settings = ScoreSettings(model=model, logprob_chunk=2048)
    return jax.grad(lambda p: score(settings, p, None, lane)[0][0])(params)


@pytest.mark.parametrize("prefix", [0, 5])
def test_attention_in_chunks_equals_attention_at_once(monkeypatch, prefix: int):
    """Forward and backward, packed and padded rows, a last chunk that is not full."""
    rng = np.random.default_rng(0)
    length = 19
    segment_ids = np.array([[1] * 7 + [2] * 9 + [0] * 3, [1] * 19], np.int32)
    positions = np.concatenate([np.arange(7), np.arange(9), np.zeros(3)])
    positions = np.stack([positions, np.arange(19)]).astype(np.int32)
    valid = np.arange(prefix)[None] < np.array([[3], [5]]) if prefix else None
    packed = attention.Packed(positions=positions, segment_ids=segment_ids, prefix_valid=valid)
    query = rng.normal(size=(2, length, 2, 3, 4))
    keys, values = rng.normal(size=(2, 2, prefix + length, 2, 4))
    wanted = jnp.asarray(rng.normal(size=query.shape) * (segment_ids != 0)[:, :, None, None, None])
    monkeypatch.setattr(attention, "MAX_PAIRS", 4 * (prefix + length))

    def at_once(*arrays):
        return jnp.sum(wanted * attention.attend(*arrays, attention.packed_mask(packed)))

    def in_chunks(*arrays):
        return jnp.sum(wanted * attention.attend_in_chunks(*arrays, packed))

    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(x, jnp.float64) for x in (query, keys, values))
        for one, other in zip(
            jax.value_and_grad(at_once, argnums=(0, 1, 2))(*arrays),
            jax.value_and_grad(in_chunks, argnums=(0, 1, 2))(*arrays),
            strict=True,
        ):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), one, other)


def test_a_gradient_of_32k_tokens_and_150k_words_keeps_neither_scores_nor_logits():
    """Logits alone would be 20 GB, scores 8 GB."""
    lanes = lane((example(np.random.default_rng(0), 8),), LENGTH)
    compiled = gradient.lower(MODEL, abstract_params(MODEL), lanes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e9


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_row_of_32k_tokens_gives_the_sum_of_its_segments():
    rng = np.random.default_rng(0)
    examples = tuple(example(rng, 4096) for _ in range(8))
    params = init_params(MODEL, 0)
    whole = gradient(MODEL, params, lane(examples, LENGTH))
    parts = [gradient(MODEL, params, lane((e,), 4096)) for e in examples]
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), parts)
    distance = sum(
        float(jnp.sum((a - b) ** 2))
        for a, b in zip(*map(jax.tree.leaves, (whole, total)), strict=True)
    )
    norm = sum(float(jnp.sum(b**2)) for b in jax.tree.leaves(total))
    assert distance <= 1e-10 * norm
