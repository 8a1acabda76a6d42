"""Log-probabilities, moments and scores against numpy and hand computations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.losses.advantages import EPS, group_moments
from thundersync_jax.losses.logprobs import token_logprobs
from thundersync_jax.losses.score import token_weights, trajectory_score


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


def test_moments_of_a_hand_computed_group():
    moments = group_moments([1.0, 3.0, 2.0], "grpo")
    std = np.sqrt(2 / 3)
    assert moments.mean == 2.0
    assert moments.scale == pytest.approx(std + EPS, abs=1e-15)
    assert [moments.advantage(r) for r in (1.0, 3.0, 2.0)] == pytest.approx(
        [-1 / (std + EPS), 1 / (std + EPS), 0.0]
    )
    assert group_moments([1.0, 3.0, 2.0], "dr_grpo").advantage(3.0) == 1.0


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8),
    scores=st.lists(st.floats(-10, 10), min_size=8, max_size=8),
    center=st.floats(-10, 10),
    kind=st.sampled_from(["grpo", "dr_grpo"]),
)
@settings(deadline=None)
def test_reward_linear_form_equals_the_advantages_for_every_center(rewards, scores, center, kind):
    """sum A_i g_i = a G1 + b G2 with G1 = sum (r_i - c) g_i, G2 = sum g_i (DESIGN, section 2)."""
    moments = group_moments(rewards, kind)
    pairs = list(zip(rewards, scores, strict=False))
    direct = sum(moments.advantage(r) * g for r, g in pairs)
    a, b = moments.closing_coefficients(center)
    streamed = a * sum((r - center) * g for r, g in pairs) + b * sum(g for _, g in pairs)
    # Cancellation grows with |a| = 1 / scale, which may be 1 / EPS.
    assert streamed == pytest.approx(direct, abs=1e-10 * max(1.0, abs(a)))


@pytest.mark.parametrize("rewards", [[], [0.3], [0.1] * 5, [1e9 + 0.1] * 3])
def test_equal_rewards_have_no_advantage_at_all(rewards):
    moments = group_moments(rewards, "grpo")
    assert moments.is_zero_variance
    assert moments.closing_coefficients(0.7) == (0.0, 0.0)
    assert [moments.advantage(r) for r in rewards] == [0.0] * len(rewards)


def test_truncated_importance_weight_of_a_hand_computed_score():
    logprobs = jnp.asarray([-1.0, -2.0, -3.0])
    behavior = jnp.asarray([-1.5, -1.0, -9.0])  # ratios e^0.5, e^-1, masked
    weights = jnp.asarray([1.0, 1.0, 0.0])
    value, gradient = jax.value_and_grad(trajectory_score)(logprobs, behavior, weights, 1.2)
    np.testing.assert_allclose(gradient, [1.2, np.exp(-1.0), 0.0], rtol=1e-6)
    np.testing.assert_allclose(value, 1.2 * -1.0 + np.exp(-1.0) * -2.0, rtol=1e-6)


def test_masked_positions_may_hold_anything():
    logprobs = jnp.asarray([-1.0, -jnp.inf])
    value, gradient = jax.value_and_grad(trajectory_score)(
        logprobs, jnp.asarray([-1.0, 0.0]), jnp.asarray([1.0, 0.0]), 0.0
    )
    assert (value, gradient.tolist()) == (-1.0, [1.0, 0.0])


def test_weights_follow_the_normalizer():
    mask = np.asarray([True, False, True, True])
    assert token_weights(mask, "token_mean").tolist() == [1, 0, 1, 1]
    np.testing.assert_allclose(token_weights(mask, "trajectory_mean"), [1 / 3, 0, 1 / 3, 1 / 3])
    assert token_weights(np.zeros(3, bool), "trajectory_mean").tolist() == [0, 0, 0]
