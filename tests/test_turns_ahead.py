"""Turns that run ahead of their content change nothing, and leave only the last one for its end."""

from __future__ import annotations

import functools
from typing import Any

import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.config_sections import LearnerSection

MODEL = lc.tiny()
SIZED = {"buckets": (64,), "tokens_per_step": 128}


def report_of(learner: Any) -> Any:
    """The report that an update would give, without one."""
    return learner._report(is_empty=False, grad_norm=0.0, learning_rate=0.0)


@functools.cache
def shared(pool_size: int, held_gradients: int, num_turn_caches: int) -> Any:
    return lc.make_learner(
        MODEL,
        pool_size=pool_size,
        held_gradients=held_gradients,
        num_turn_caches=num_turn_caches,
        stream_turns="idle",
        **SIZED,
    )


@pytest.mark.parametrize("sizes", [(0, 4, 4), (1, 1, 4), (8, 4, 1), (1, 0, 4), (1, 4, 0)], ids=str)
def test_the_gradient_is_the_reference_whatever_ran_ahead(sizes):
    learner, cases = shared(*sizes), lc.random_batch(0)
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    num_by_turns = 0
    for order in range(6):
        lc.run_turn_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        num_by_turns += report_of(learner).num_by_turns
        learner.abandon()
    assert (num_by_turns > 0) == (min(sizes[1:]) > 0)
