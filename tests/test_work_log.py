"""A call is predicted from those of its shape; what is postponed runs later, unchanged."""

from __future__ import annotations

import learner_cases as lc
import numpy as np

from thundersync_jax.config_learner import LearnerSection

MODEL = lc.tiny()


def test_postponed_calls_run_later_and_the_gradient_is_the_same() -> None:
    learner, cases = lc.make_learner(MODEL, pool_size=1, tokens_per_step=64), lc.random_batch(0)
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    for order in range(3):
        lc.enqueue(learner, cases)
        rng = np.random.default_rng(order)
        num_postponed = 0
        while learner.work(1, max_call_s=float(rng.choice([0.0, np.inf]))) or learner.has_postponed:
            num_postponed += learner.has_postponed
        assert num_postponed or order == 0  # the first calls of a shape are tried
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        learner.abandon()
        assert not learner.has_postponed
