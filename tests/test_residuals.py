"""Kept residuals: the same gradient from a replay that is a backward pass alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.benchmarks.turn_arrivals import run_events
from thundersync_jax.learner.distiller import Distiller

MODEL = lc.tiny()
NUM_RESIDUALS = 2  # fewer than there are segments: some are replayed with a forward pass


@functools.cache
def shared(num_residuals: int, remat: str = "none") -> Distiller:
    return oc.make_distiller(
        dataclasses.replace(MODEL, remat=remat), num_caches=3, num_residuals=num_residuals
    )


def descent(distiller: Distiller, cases: list[oc.TurnCase]) -> Any:
    total = oc.plain_gradient(MODEL, distiller.state.params, cases)
    return jax.tree.map(lambda g: -g / oc.num_scored(cases), total)


@pytest.mark.parametrize("remat", ["none", "block"])
def test_every_order_gives_the_gradient_of_whole_trajectories(remat):
    distiller = shared(NUM_RESIDUALS, remat)
    cases = [oc.random_case(seed) for seed in range(5)]
    want = descent(distiller, cases)
    distiller.take_work_log()
    for order in range(4):
        run_events(distiller, cases, np.random.default_rng(order))
        assert lc.rel_l2(distiller.gradient(), want) <= 1e-5
        seen = {item.path for item in distiller.take_work_log()}
        assert {"turn_replay_kept", "turn_replay"} <= seen
        assert not distiller._schedule._kept  # every place is free again
        distiller.abandon()


def test_a_replay_from_residuals_and_one_with_a_forward_pass_agree():
    """To rounding: the two forward passes are compiled in different programs."""
    cases = [oc.random_case(seed) for seed in (3, 7, 9)]
    gradients = []
    for num_residuals in (0, 16):
        distiller = shared(num_residuals, "dots")
        run_events(distiller, cases, np.random.default_rng(0))
        gradients.append(distiller.gradient())
        distiller.abandon()
    assert lc.rel_l2(gradients[1], gradients[0]) <= 1e-6
