"""Draws depend on the row alone, and log-probabilities are those of the distribution drawn from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.serving import sampling
from thundersync_jax.serving.sampling import SamplingRows

pytestmark = pytest.mark.optimized

VOCAB = 11
_sample = jax.jit(sampling.sample)


def rows(num_rows: int, **changes: object) -> SamplingRows:
    """Untruncated rows at temperature 1; every change is a scalar or one value per row."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": np.arange(num_rows)} | changes
    dtypes = {"temperature": "f4", "top_k": "i4", "top_p": "f4", "seed": "u4"}
    full = {k: jnp.asarray(np.broadcast_to(v, num_rows), dtypes[k]) for k, v in values.items()}
    return SamplingRows(**full)


def random_logits(num_rows: int, seed: int = 0) -> jax.Array:
    logits = 2 * np.random.default_rng(seed).standard_normal((num_rows, VOCAB))
    return jnp.asarray(logits, jnp.float32)


def positions(num_rows: int, value: int = 5) -> jax.Array:
    return jnp.full((num_rows,), value, jnp.int32)


def test_a_draw_depends_on_seed_and_position_and_not_on_the_row_or_its_neighbours() -> None:
    """LESSONS 19: the same (seed, position) repeats, others differ."""
    logits = jnp.tile(random_logits(1), (64, 1))
    tokens, logprobs = _sample(logits, rows(64), positions(64))
    shifted, shifted_logprobs = _sample(logits, rows(64, seed=np.arange(64) + 7), positions(64))
    np.testing.assert_array_equal(tokens[7:], shifted[:-7])
    np.testing.assert_array_equal(logprobs[7:], shifted_logprobs[:-7])
    assert len(set(tokens.tolist())) > 3
    later, _ = _sample(logits, rows(64), positions(64, 6))
    assert later.tolist() != tokens.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_and_logprobs_are_those_of_the_tempered_distribution(
    temperature: float,
) -> None:
    num_rows = 20_000
    logits = random_logits(1)
    tiled = jnp.tile(logits, (num_rows, 1))
    tokens, logprobs = _sample(tiled, rows(num_rows, temperature=temperature), positions(num_rows))
    want = np.asarray(jax.nn.log_softmax(logits[0] / temperature))
    np.testing.assert_allclose(logprobs, want[tokens], rtol=1e-5, atol=1e-6)
    frequencies = np.bincount(tokens, minlength=VOCAB) / num_rows
    # Five standard deviations of a binomial frequency are below 0.018.
    np.testing.assert_allclose(frequencies, np.exp(want), atol=0.018)


def test_truncation_is_per_row_and_renormalised() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = jnp.asarray(np.tile(np.log(probabilities), (5, 1)), jnp.float32)
    top_k = jnp.asarray([0, 2, 0, 3, 9], jnp.int32)
    top_p = jnp.asarray([1.0, 1.0, 0.65, 0.5, 1.0], jnp.float32)
    kept = np.isfinite(np.asarray(sampling.truncate(logits, top_k, top_p))).tolist()
    assert kept == [
        [True] * 5,
        [True, True, False, False, False],
        [True, True, False, False, False],  # 0.4 < 0.65 <= 0.7
        [True, True, False, False, False],  # of 0.9 the nucleus of half needs two
        [True] * 5,
    ]


def test_truncated_rows_sample_only_kept_tokens_with_their_renormalised_logprobs() -> None:
    num_rows = 512
    logits = jnp.tile(random_logits(1), (num_rows, 1))
    tokens, logprobs = _sample(logits, rows(num_rows, top_k=2), positions(num_rows))
    best = np.argsort(-np.asarray(logits[0]))[:2]
    assert set(tokens.tolist()) == set(best.tolist())
    pair = jax.nn.log_softmax(logits[0][best])
    want = {int(token): float(logprob) for token, logprob in zip(best, pair, strict=True)}
    np.testing.assert_allclose(logprobs, [want[t] for t in tokens.tolist()], rtol=1e-5)


def test_a_truncating_neighbour_does_not_change_an_untruncated_row() -> None:
    logits = random_logits(8)
    alone = _sample(logits, rows(8), positions(8))
    beside = _sample(logits, rows(8, top_k=[0] * 7 + [3]), positions(8))
    for first, second in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(first[:7], second[:7])


def test_greedy_takes_the_best_token_with_its_logprob_at_temperature_one() -> None:
    logits = random_logits(8)
    tokens, logprobs = _sample(logits, rows(8, temperature=0.0), positions(8))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=1))
    np.testing.assert_allclose(logprobs, jnp.max(jax.nn.log_softmax(logits), axis=1), rtol=1e-6)


def test_a_sort_runs_only_behind_the_condition() -> None:
    """The common case must not pay for sorting a vocabulary of 150,000."""
    jaxpr = jax.make_jaxpr(sampling.sample)(random_logits(4), rows(4), positions(4))
    outside = [str(equation.primitive) for equation in jaxpr.eqns]
    assert "sort" not in outside and "cond" in outside
