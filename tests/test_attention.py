"""Attention to segments and prefixes: the kernel equals the plain form, neighbors never meet."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices

from thundersync_jax.model import transformer
from thundersync_jax.model.attention import Packed, attend, packed_mask
from thundersync_jax.model.embedding import look_up
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.splash import splash
from thundersync_jax.model.visible import MAX_LENGTH, visible, wants_splash

CONFIG = TransformerConfig(
    vocab_size=29,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=32,
    rope_theta=1e4,
)

hidden_states = jax.jit(transformer.forward, static_argnums=0)


def packed(*rows: tuple[int, ...]) -> np.ndarray:
    """Segment ids of rows of lengths; a negative length is padding."""
    return np.stack(
        [np.repeat([i + 1 if n > 0 else 0 for i, n in enumerate(row)], np.abs(row)) for row in rows]
    ).astype(np.int32)


def offsets(segment_ids: np.ndarray) -> np.ndarray:
    """The index of every token in its segment."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return np.tril(same, -1).sum(2).astype(np.int32)


@pytest.mark.parametrize(
    ("segment_ids", "prefix_bucket", "prefix_lengths", "kv_heads", "group"),
    [
        pytest.param(packed((256,)), 0, (0,), 2, 1, id="causal, two blocks"),
        pytest.param(packed((60, 100, -40)), 70, (50,), 2, 2, id="packed, odd lengths"),
        pytest.param(
            packed((-3, 97, 1, 30, 200, -53), (384,)), 130, (130, 0), 1, 3, id="two rows, padding"
        ),
    ],
)
def test_the_kernel_equals_plain_attention(
    segment_ids: np.ndarray,
    prefix_bucket: int,
    prefix_lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
) -> None:
    """Outputs, and gradients of queries, keys and values, those of the prefix included."""
    rows, length = segment_ids.shape
    random = np.random.default_rng(0)
    query = random.standard_normal((rows, length, kv_heads, group, 16))
    keys, values = random.standard_normal((2, rows, prefix_bucket + length, kv_heads, 16))
    cotangent = random.standard_normal(query.shape) * (segment_ids != 0)[..., None, None, None]
    valid = np.arange(prefix_bucket)[None] < np.array(prefix_lengths)[:, None]
    before = valid if prefix_bucket else None

    def kernel(query: jax.Array, *arrays: jax.Array) -> jax.Array:
        seen = visible(jnp.asarray(segment_ids), before)
        own = (x[:, prefix_bucket:] for x in arrays)
        ahead = KeysValues(*(x[:, :prefix_bucket] for x in arrays)) if prefix_bucket else None
        return splash(query, *own, seen, ahead)

    def plain(*arrays: jax.Array) -> jax.Array:
        positions = offsets(segment_ids)
        keys = Packed(positions=positions, segment_ids=segment_ids, prefix_valid=before)
        return attend(*arrays, packed_mask(keys))

    def with_gradients(function: object, *arrays: jax.Array) -> list[jax.Array]:
        output, pull_back = jax.vjp(jax.jit(function), *arrays)
        assert bool(jnp.all(jnp.isfinite(output)))
        return [output * (cotangent != 0), *pull_back(cotangent.astype(np.float32))]

    arrays = [jnp.asarray(x, jnp.float32) for x in (query, keys, values)]
    got, want = with_gradients(kernel, *arrays), with_gradients(plain, *arrays)
    for one, other in zip(got, want, strict=True):
        assert float(jnp.abs(one - other).max() / jnp.abs(other).max()) < 1e-5


@pytest.mark.parametrize("attention", ["xla", "splash"])
def test_packed_neighbors_never_meet(attention: str) -> None:
    """LESSONS 16: changing one trajectory, or padding, leaves the other's bits; and it has the
    values that it has alone.
    """
    config = dataclasses.replace(CONFIG, attention=attention)
    params = transformer.init_params(config, 0)
    ids = packed((40, 50, -10, 28))
    positions = offsets(ids)
    tokens = np.random.default_rng(1).integers(0, 29, ids.shape).astype(np.int32)
    first = hidden_states(config, params, tokens, positions, ids)
    for changed in (1, 2, 4, 0):
        other = np.where(ids == changed, (tokens + 7) % 29, tokens)
        second = hidden_states(config, params, other, positions, ids)
        is_same = (ids != changed) & (ids != 0)
        np.testing.assert_array_equal(first[is_same], second[is_same])
        if changed:
            assert np.abs(first - second)[ids == changed].max() > 1e-3
    for segment in (1, 2, 4):
        is_own = ids == segment
        alone = np.where(is_own, ids, 0)
        want = hidden_states(config, params, tokens, positions, alone)
        np.testing.assert_allclose(first[is_own], want[is_own], rtol=1e-5, atol=1e-5)


def test_branches_packed_after_a_prefix_equal_whole_rows() -> None:
    params = transformer.init_params(CONFIG, 0)
    random = np.random.default_rng(2)
    prompt = random.integers(0, 29, (1, 16)).astype(np.int32)  # 12 tokens and padding
    whole = np.arange(16, dtype=np.int32)[None]
    compute = jax.jit(transformer.keys_values, static_argnums=0)
    prefix = compute(CONFIG, params, prompt, whole, whole < 12)
    ids = packed((5, 9, -2))
    tokens = random.integers(0, 29, ids.shape).astype(np.int32)
    got = hidden_states(CONFIG, params, tokens, 12 + offsets(ids), ids, prefix, whole < 12)
    for segment, length in ((1, 5), (2, 9)):
        row = np.concatenate([prompt[:, :12], tokens[ids == segment][None]], axis=1)
        positions = np.arange(12 + length, dtype=np.int32)[None]
        want = hidden_states(CONFIG, params, row, positions)[:, 12:]
        np.testing.assert_allclose(got[ids == segment], want[0], rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_on_a_mesh_it_is_the_same_function_and_replicas_do_not_communicate() -> None:
    """Manual over `data`, queries over `fsdp`, heads over `tensor`, and the embedding too."""
    assert on_eight_devices("attention") < 1e-5


def test_a_split_embedding_has_the_rows_and_the_gradient_of_a_whole_one() -> None:
    assert max(on_eight_devices("look_up")) < 1e-5


def test_a_row_taken_often_gets_the_sum_of_its_gradients() -> None:
    """In bfloat16, where adding one to 256 changes nothing."""
    table, tokens = jnp.ones((3, 2), jnp.bfloat16), jnp.ones((1, 1000), jnp.int32)
    gradient = jax.grad(lambda table: jnp.sum(look_up(table, tokens).astype(jnp.float32)))(table)
    np.testing.assert_array_equal(gradient, np.array([[0, 0], [1000, 1000], [0, 0]]))


def test_the_kernel_is_chosen_by_name_or_by_the_platform() -> None:
    assert not wants_splash(CONFIG, 4096)  # "auto" off TPUs
    assert wants_splash(dataclasses.replace(CONFIG, attention="splash"), 7)
    assert not wants_splash(dataclasses.replace(CONFIG, attention="xla"), 4096)
    with pytest.raises(ModelError, match="float32"):
        dataclasses.replace(CONFIG, attention="splash", dtype="float64")
    with pytest.raises(ModelError, match=r"attention = 'flash'.*expected one of"):
        dataclasses.replace(CONFIG, attention="flash")
    with pytest.raises(ModelError, match=f"at most {MAX_LENGTH}"):
        visible(jnp.zeros((1, MAX_LENGTH + 1), jnp.int32), None)
