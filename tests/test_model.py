"""The transformer equals an independent one in every family, precision and way of calling it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_reference import random_params, reference_logits

from thundersync_jax.model import kv_cache, transformer
from thundersync_jax.model.kv_cache import init_cache
from thundersync_jax.model.presets import (
    PRESETS,
    Llama3RopeScaling,
    ModelError,
    TransformerConfig,
    preset,
)

LLAMA = TransformerConfig(
    vocab_size=29,
    embed_dim=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=40,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
)
# An original context of 32 puts wavelengths of head_dim 8 into all three ranges of the scaling.
SCALING = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
)
FAMILIES = {
    "llama": LLAMA,
    "llama_scaled": dataclasses.replace(LLAMA, rope_theta=50.0, rope_scaling=SCALING),
    "qwen3": dataclasses.replace(LLAMA, use_qk_norm=True, rope_theta=1e6, rms_norm_eps=1e-6),
    "qwen3_tied": dataclasses.replace(LLAMA, use_qk_norm=True, tie_embeddings=True, num_kv_heads=4),
}


def in_precision(config: TransformerConfig, dtype: str) -> TransformerConfig:
    param_dtype = "float64" if dtype == "float64" else "float32"
    return dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype)


def random_tokens(config: TransformerConfig, rows: int, length: int, seed: int = 1) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length))
    return tokens.astype(np.int32)


def positions_like(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(
    config: TransformerConfig, params: transformer.Params, tokens: np.ndarray
) -> jax.Array:
    hidden = transformer.forward(config, params, tokens, positions_like(tokens))
    return transformer.logits(config, params, hidden)


hidden_states = jax.jit(transformer.forward, static_argnums=0)
hidden_states_cached = jax.jit(transformer.forward_cached, static_argnums=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_logits_equal_the_independent_implementation(
    family: str, dtype: str, tolerance: float
) -> None:
    """LESSONS 20: theta, scaling, query-key norm, grouping and tying all reach the logits."""
    config = in_precision(FAMILIES[family], dtype)
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        params = random_params(config)
        tokens = random_tokens(config, 2, 48)
        got = full_logits(config, params, tokens)
        assert got.dtype == dtype
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
    host = jax.tree.map(np.asarray, params)
    want = np.stack([reference_logits(config, host, row) for row in tokens])
    assert np.abs(want).std() > 0.5
    np.testing.assert_allclose(np.asarray(got), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("change", [{"rope_theta": 51.0}, {"rope_scaling": None}])
def test_rotary_settings_are_visible_in_the_logits(change: dict[str, object]) -> None:
    """The parity test would notice a checkpoint's theta or scaling being ignored."""
    config = FAMILIES["llama_scaled"]
    params, tokens = random_params(config), random_tokens(config, 1, 48)
    other = dataclasses.replace(config, **change)
    gap = full_logits(config, params, tokens) - full_logits(other, params, tokens)
    assert float(jnp.abs(gap).max()) > 1e-3


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 15), max_size=5),
    family=st.sampled_from(["llama_scaled", "qwen3"]),
)
def test_cached_forward_equals_uncached_however_it_is_chunked(cuts: set[int], family: str) -> None:
    config = FAMILIES[family]
    params, tokens = random_params(config), random_tokens(config, 2, 16)
    cache = init_cache(config, 2, 16)
    edges = [0, *sorted(cuts), 16]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        piece = np.zeros((2, 16), np.int32)  # one shape for every chunk; position 16 is padding
        piece[:, : end - begin] = tokens[:, begin:end]
        positions = np.full((2, 16), 16, np.int32)
        positions[:, : end - begin] = np.arange(begin, end)
        hidden, cache = hidden_states_cached(config, params, piece, positions, cache)
        pieces.append(hidden[:, : end - begin])
    want = hidden_states(config, params, tokens, positions_like(tokens))
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), want, rtol=2e-5, atol=2e-5)


def test_cached_forward_writes_only_the_named_rows_and_drops_padding() -> None:
    config, params = LLAMA, random_params(LLAMA)
    tokens = random_tokens(config, 2, 4)
    cache = jax.tree.map(lambda x: x + 7, init_cache(config, 5, 4))
    positions = np.array([[0, 1, -1, 4], [0, 1, 2, 3]], np.int32)
    rows = np.array([3, 1], np.int32)
    _, cache = hidden_states_cached(config, params, tokens, positions, cache, rows)
    is_untouched = np.all(np.asarray(cache.keys) == 7, axis=(0, 3, 4))  # [B, S]
    want = np.ones((5, 4), bool)
    want[3, :2] = want[1, :] = False
    np.testing.assert_array_equal(is_untouched, want)


def test_invalid_tokens_change_no_valid_output() -> None:
    config = FAMILIES["qwen3"]
    params, tokens = random_params(config), random_tokens(config, 2, 12)
    valid = positions_like(tokens) < np.array([[7], [12]])
    other = np.where(valid, tokens, (tokens + 5) % config.vocab_size)
    first, second = (
        hidden_states(config, params, rows, positions_like(tokens), valid)
        for rows in (tokens, other)
    )
    np.testing.assert_array_equal(first[valid], second[valid])
    assert bool(jnp.all(jnp.isfinite(first)))


def test_gradients_ignore_invalid_tokens_and_stay_finite() -> None:
    """Left padding: the first queries may attend to nothing."""
    config, params = LLAMA, random_params(LLAMA)
    tokens = random_tokens(config, 1, 8)
    valid = np.arange(8)[None] >= 3
    positions = np.maximum(np.arange(8)[None] - 3, 0).astype(np.int32)

    @jax.jit
    @jax.grad
    def gradient(params: transformer.Params, tokens: np.ndarray) -> jax.Array:
        hidden = transformer.forward(config, params, tokens, positions, valid)
        return jnp.sum(jnp.where(valid[..., None], hidden, 0.0) ** 2 * jnp.arange(24))

    other = np.where(valid, tokens, (tokens + 1) % config.vocab_size)
    first, second = gradient(params, tokens), gradient(params, other)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(first))


def test_rows_are_read_alike_by_the_forms_for_cpus_and_for_other_devices():
    cache = np.random.default_rng(0).standard_normal((3, 5, 4, 2, 8)).astype(np.float32)
    rows = jnp.asarray([4, 0, 5, 2])  # the third is outside, and clipped
    got = kv_cache._sliced(jnp.asarray(cache), jnp.int32(1), rows)
    np.testing.assert_array_equal(got, kv_cache._gathered(jnp.asarray(cache), jnp.int32(1), rows))
    np.testing.assert_array_equal(got, cache[1, [4, 0, 4, 2]])


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_rematerialisation_changes_no_gradient(remat: str) -> None:
    params, tokens = random_params(LLAMA), random_tokens(LLAMA, 2, 8)

    def gradient(config: TransformerConfig) -> transformer.Params:
        return jax.jit(jax.grad(lambda p: jnp.mean(full_logits(config, p, tokens) ** 2)))(params)

    want, got = gradient(LLAMA), gradient(dataclasses.replace(LLAMA, remat=remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3_0p6b", 596_049_920),
        ("qwen3_1p7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
        ("llama3_8b", 8_030_261_248),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert transformer.num_parameters(preset(name)) == count


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_has_one_logical_axis_per_dimension(name: str) -> None:
    config = preset(name, vocab_size=13 if name in ("micro", "tiny") else 0)
    shapes, axes = transformer.abstract_params(config), transformer.logical_axes(config)
    known = {"embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers"}

    def check(shape: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> None:
        assert len(names) == len(shape.shape) == len(set(names)) and set(names) <= known

    jax.tree.map(check, shapes, axes)


def test_a_new_tiny_model_is_near_uniform_and_deterministic() -> None:
    config = preset("tiny", vocab_size=13)
    assert 250_000 < transformer.num_parameters(config) < 400_000
    first, again, other = (transformer.init_params(config, seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embedding"], other["embedding"])
    logprobs = jax.nn.log_softmax(full_logits(config, first, random_tokens(config, 4, 32)))
    assert float(jnp.abs(logprobs + np.log(13)).max()) < 0.6


def test_a_bfloat16_copy_of_float32_parameters_computes_the_same() -> None:
    """A learner with float32 masters and an engine with bfloat16 weights run one arithmetic."""
    config = dataclasses.replace(LLAMA, dtype="bfloat16", use_qk_norm=True)
    params, tokens = random_params(config), random_tokens(config, 2, 8)
    copied = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    first, second = full_logits(config, params, tokens), full_logits(config, copied, tokens)
    assert first.dtype == jnp.float32
    np.testing.assert_array_equal(first, second)


def test_mistakes_are_named() -> None:
    with pytest.raises(ModelError, match="Did you mean 'qwen3_8b'"):
        preset("qwen3_8")
    with pytest.raises(ModelError, match="vocab_size"):
        preset("tiny")
    for change, words in (
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"mlp_dim": 0}, "at least 1"),
        ({"dtype": "float16"}, "expected one of"),
        ({"remat": "all"}, "expected one of"),
    ):
        with pytest.raises(ModelError, match=words):
            dataclasses.replace(LLAMA, **change)
    with pytest.raises(ModelError, match="jax_enable_x64"):
        transformer.init_params(in_precision(LLAMA, "float64"), 0)


WINDOWED = dataclasses.replace(
    LLAMA,
    num_layers=2,
    use_qk_norm=True,
    use_post_norms=True,
    zero_centered_norms=True,
    scale_embeddings=True,
    activation="gelu",
    windows=(3, 0),
    query_scale=5,
    rope_theta=100.0,
    local_rope_theta=10.0,
)


def test_a_layer_with_a_window_sees_the_same_however_tokens_are_cut_into_calls():
    """At once, in pieces through a cache, and after a prefix."""
    params, tokens = random_params(WINDOWED), random_tokens(WINDOWED, rows=2, length=11)
    positions = np.broadcast_to(np.arange(11, dtype=np.int32), tokens.shape)
    whole = transformer.forward(WINDOWED, params, tokens, positions)
    cache, pieces = init_cache(WINDOWED, num_rows=2, length=11), []
    for start, end in itertools.pairwise((0, 4, 5, 11)):
        piece, cache = transformer.forward_cached(
            WINDOWED, params, tokens[:, start:end], positions[:, start:end], cache
        )
        pieces.append(piece)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=2e-5)
    prefix = transformer.keys_values(WINDOWED, params, tokens[:, :6], positions[:, :6])
    valid = np.ones((2, 6), bool)
    after = transformer.forward(
        WINDOWED, params, tokens[:, 6:], positions[:, 6:], prefix=prefix, prefix_valid=valid
    )
    np.testing.assert_allclose(after, whole[:, 6:], atol=2e-5)


@pytest.mark.slow
def test_windows_bound_what_a_token_depends_on():
    """Two layers of three tokens each: the fifth last token is the last that can matter."""
    config = dataclasses.replace(WINDOWED, windows=(3, 3))
    params, tokens = random_params(config), random_tokens(config, rows=1, length=9)
    positions = np.arange(9, dtype=np.int32)[None]

    def last(changed: int) -> np.ndarray:
        other = tokens.copy()
        other[0, changed] = (other[0, changed] + 1) % config.vocab_size
        return np.asarray(transformer.forward(config, params, other, positions)[0, -1])

    want = np.asarray(transformer.forward(config, params, tokens, positions)[0, -1])
    for at in range(9):
        assert np.allclose(last(at), want, atol=1e-6) == (at < 4)
