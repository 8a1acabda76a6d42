"""Log-probabilities, moments and scores against numpy and hand computations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.losses import advantages as adv
from thundersync_jax.losses.logprobs import token_logprobs, token_logprobs_and_entropy
from thundersync_jax.losses.normalizers import Kind, Normalizer
from thundersync_jax.losses.objective import Tokens, lane_sums, token_weights
from thundersync_jax.losses.objectives import grpo


def dense_logprobs(hidden, kernel, targets, temperature):
    logits = (hidden @ kernel) / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs, targets[:, None], 1)[:, 0]


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 51, 1000])
def test_chunked_logprobs_equal_the_dense_ones_in_float64(chunk):
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(9, 6)) * 3, rng.normal(size=(6, 51)) * 3
    targets = rng.integers(0, 51, 9)
    with jax.enable_x64(True):
        got = token_logprobs(
            jnp.asarray(hidden), jnp.asarray(kernel), targets, temperature=0.7, chunk=chunk
        )
    np.testing.assert_allclose(got, dense_logprobs(hidden, kernel, targets, 0.7), rtol=1e-12)


def test_chunked_gradient_equals_finite_differences():
    rng = np.random.default_rng(1)
    hidden, kernel = rng.normal(size=(4, 3)), rng.normal(size=(3, 11))
    targets, direction = rng.integers(0, 11, 4), rng.normal(size=(3, 11))
    with jax.enable_x64(True):
        gradient = jax.grad(
            lambda k: jnp.sum(token_logprobs(jnp.asarray(hidden), k, targets, chunk=4))
        )(jnp.asarray(kernel))
    step = 1e-6
    plus = dense_logprobs(hidden, kernel + step * direction, targets, 1.0).sum()
    minus = dense_logprobs(hidden, kernel - step * direction, targets, 1.0).sum()
    np.testing.assert_allclose(
        np.sum(np.asarray(gradient) * direction), (plus - minus) / (2 * step), rtol=1e-7
    )


def test_chunked_gradient_never_holds_all_logits():
    hidden, kernel = jnp.ones((64, 8)), jnp.ones((8, 4096))
    targets = jnp.zeros(64, jnp.int32)

    def temporaries(chunk: int) -> int:
        function = jax.jit(
            jax.grad(lambda k: jnp.sum(token_logprobs(hidden, k, targets, chunk=chunk)))
        )
        return function.lower(kernel).compile().memory_analysis().temp_size_in_bytes

    all_logits = 64 * 4096 * 4
    assert temporaries(4096) >= all_logits
    assert temporaries(128) < all_logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 51, 1000])
def test_chunked_entropy_equals_the_dense_one_and_its_finite_differences(chunk):
    rng = np.random.default_rng(2)
    hidden, kernel = rng.normal(size=(5, 6)) * 3, rng.normal(size=(6, 51)) * 3
    direction, targets = rng.normal(size=kernel.shape), rng.integers(0, 51, 5)

    def dense(kernel):
        logits = (hidden @ kernel) / 0.7
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        return -(np.exp(logprobs) * logprobs).sum(-1)

    def entropy(kernel):
        return token_logprobs_and_entropy(
            jnp.asarray(hidden), kernel, targets, temperature=0.7, chunk=chunk
        )[1]

    with jax.enable_x64(True):
        got = entropy(jnp.asarray(kernel))
        gradient = jax.grad(lambda k: jnp.sum(entropy(k)))(jnp.asarray(kernel))
    np.testing.assert_allclose(got, dense(kernel), rtol=1e-9, atol=1e-12)
    step = 1e-6 * direction
    slope = (dense(kernel + step).sum() - dense(kernel - step).sum()) / 2e-6
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-6)


REWARDS = np.asarray([1.0, 3.0, 2.0])


def test_advantages_of_a_hand_computed_group():
    std = np.sqrt(2 / 3) + adv.EPS
    np.testing.assert_allclose(adv.standardized(REWARDS), [-1 / std, 1 / std, 0.0], rtol=1e-15)
    assert adv.centered(REWARDS).tolist() == [-1.0, 1.0, 0.0]
    assert adv.leave_one_out(REWARDS).tolist() == [-1.5, 1.5, 0.0]  # 1 - (3 + 2) / 2, ...
    assert adv.as_graded(REWARDS).tolist() == [1.0, 3.0, 2.0]


ADVANTAGES = [adv.standardized, adv.centered, adv.leave_one_out, adv.as_graded]


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=8),
    scores=st.lists(st.floats(-10, 10), min_size=8, max_size=8),
    center=st.floats(-10, 10),
    kind=st.sampled_from(ADVANTAGES),
)
@settings(deadline=None)
def test_reward_linear_form_equals_the_advantages_for_every_center(rewards, scores, center, kind):
    """sum A_i g_i = a G1 + b G2 with G1 = sum (r_i - c) g_i, G2 = sum g_i (DESIGN, section 2)."""
    values = np.asarray(rewards)
    line = adv.affine_advantage(values, kind(values))
    pairs = list(zip(rewards, scores, strict=False))
    direct = sum(a * g for a, (_, g) in zip(kind(values), pairs, strict=True))
    a, b = line.closing_coefficients(center)
    streamed = a * sum((r - center) * g for r, g in pairs) + b * sum(g for _, g in pairs)
    # Cancellation grows with |a| = 1 / std, which may be 1 / EPS.
    assert streamed == pytest.approx(direct, abs=1e-10 * max(1.0, abs(a)))


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 5, [1e9 + 0.1] * 3])
@pytest.mark.parametrize("kind", ADVANTAGES[:3])
def test_equal_rewards_have_no_advantage_at_all(rewards, kind):
    values = np.asarray(rewards, np.float64)
    assert kind(values).tolist() == [0.0] * len(rewards)
    line = adv.affine_advantage(values, kind(values))
    assert line.closing_coefficients(0.7) == (0.0, 0.0)


def tokens_of(logprobs, behavior, mask, **others):
    arrays = {name: jnp.asarray(values) for name, values in others.items()}
    return Tokens(
        logprobs=jnp.asarray(logprobs),
        behavior_logprobs=jnp.asarray(behavior),
        action_mask=jnp.asarray(mask),
        segment_ids=jnp.ones(len(mask), jnp.int32),
        **arrays,
    )


def test_truncated_importance_weight_of_a_hand_computed_score():
    # Ratios e^0.5, e^-1, masked.
    tokens = tokens_of([-1.0, -2.0, -3.0], [-1.5, -1.0, -9.0], [True, True, False])
    objective, weights = grpo(tis_cap=1.2), jnp.asarray([1.0, 1.0, 0.0])
    value, gradient = jax.value_and_grad(
        lambda x: lane_sums(objective, tokens.replace(logprobs=x), weights, None)[0]
    )(tokens.logprobs)
    np.testing.assert_allclose(gradient, [1.2, np.exp(-1.0), 0.0], rtol=1e-6)
    np.testing.assert_allclose(value, 1.2 * -1.0 + np.exp(-1.0) * -2.0, rtol=1e-6)


@pytest.mark.parametrize("anything", [-jnp.inf, jnp.nan])
def test_masked_positions_may_hold_anything(anything):
    tokens = tokens_of([-1.0, anything], [-1.0, anything], [True, False])
    value, gradient = jax.value_and_grad(
        lambda x: lane_sums(grpo(), tokens.replace(logprobs=x), jnp.asarray([1.0, 0.0]), None)[0]
    )(tokens.logprobs)
    assert (value, gradient.tolist()) == (-1.0, [1.0, 0.0])


def test_weights_follow_the_normalizer():
    mask, mean = np.asarray([True, False, True, True]), grpo(normalizer="trajectory_mean")
    assert token_weights(grpo(), mask).tolist() == [1, 0, 1, 1]
    np.testing.assert_allclose(token_weights(mean, mask), np.asarray([1, 0, 1, 1]) / 3, rtol=1e-7)
    assert token_weights(mean, np.zeros(3, bool)).tolist() == [0, 0, 0]
    assert Normalizer(kind=Kind.GROUP_TOKEN_MEAN).group_scale(8) == 0.125
