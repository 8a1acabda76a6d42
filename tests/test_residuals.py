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
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.distiller import Distiller, _keeping
from thundersync_jax.learner.memory import MemoryPlanError, check_fits
from thundersync_jax.learner.program_names import Part, Turn
from thundersync_jax.learner.score import ScoreSettings

pytestmark = pytest.mark.optimized

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


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "block"])
def test_every_order_gives_the_gradient_of_whole_trajectories(remat):
    distiller = shared(NUM_RESIDUALS, remat)
    cases = [oc.random_case(seed) for seed in range(5)]
    want = descent(distiller, cases)
    distiller.take_work_log()
    for order in range(3):
        run_events(distiller, cases, np.random.default_rng(order))
        assert lc.rel_l2(distiller.gradient(), want) <= 1e-5
        seen = {item.path for item in distiller.take_work_log()}
        assert {"turn_replay_kept", "turn_replay"} <= seen
        assert not distiller._schedule._kept  # every place is free again
        distiller.abandon()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "most"), [("none", 0.7), ("block", 0.75)])
def test_a_replay_from_residuals_has_no_forward_products(remat, most):
    """Nine products of a layer: q, k, v, scores, values, o, gate, up, down. Of three passes two are
    left, and of four with rematerialization of blocks three; nothing kept holds a parameter.
    """
    model = dataclasses.replace(MODEL, num_layers=2, embed_dim=64, mlp_dim=256, remat=remat)
    distiller = oc.make_distiller(model, num_caches=1, num_residuals=1)
    found = {}
    for part in (Part.REPLAY, Part.REPLAY_KEPT):
        compiled = distiller._programs.lower(Turn(part, oc.LENGTH, oc.LENGTH)).compile()
        costs: Any = compiled.cost_analysis()
        found[part] = compiled.as_text().count(" dot("), costs["flops"]
    (replay, replay_flops), (kept, kept_flops) = found[Part.REPLAY], found[Part.REPLAY_KEPT]
    assert replay - kept == 9
    assert 0.6 < kept_flops / replay_flops < most
    caches = distiller._programs.caches
    assert caches is not None
    for (prefix_bucket, _), residuals in caches.residuals.items():
        shapes = [x.shape[2:] for x in residuals]
        assert not {p.shape for p in jax.tree.leaves(distiller.params)} & set(shapes)
        assert not prefix_bucket or all(oc.LENGTH + prefix_bucket not in x for x in shapes)
        num_bytes = sum(np.prod(x) * 4 for x in shapes)
        projections = 3 * 4 * 8 + 2 * 64 + 2 * 256  # q, k, v; o, down or the block input; gate, up
        assert num_bytes < 2 * 4 * oc.LENGTH * (projections + 6 * 64)


def test_forward_products_by_hand():
    """Two positions after three: 2 operations a weight and position, 4 a head's width and pair."""
    model = dataclasses.replace(
        MODEL, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=2, mlp_dim=16
    )
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert model.forward_flops(2, 3) == 2 * (2 * weights * 2 + 4 * 8 * (4 + 5))


def test_the_plan_has_a_line_for_caches_and_one_for_residuals():
    distiller = shared(NUM_RESIDUALS)
    caches = distiller._programs.caches
    assert caches is not None
    parts = distiller.memory.parts
    for part, arrays in (
        ("kept residuals", caches.residuals),
        ("trajectory caches", (caches.kv, caches.ledger)),
    ):
        assert parts[part] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)) > 0
    room = dataclasses.replace(distiller.memory.room, device_bytes=parts["kept residuals"])
    with pytest.raises(MemoryPlanError, match=r"kept residuals .* lower opd\.num_residuals"):
        check_fits(dataclasses.replace(distiller.memory, room=room))


def test_residuals_need_replicas_of_one_device():
    with pytest.raises(ConfigError, match=r"opd\.num_residuals = -1: expected 0 or more"):
        OpdSection(num_residuals=-1)
    for changes in ({"stream_turns": "never"}, {"num_caches": 0}):
        with pytest.raises(ConfigError, match=r"num_residuals = 3: expected 0 .* no turn streams"):
            OpdSection(num_residuals=3, **changes)
    mesh: Any = jax.sharding.AbstractMesh((2, 2, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"opd\.num_residuals = 3: expected 0 where a replica is"):
        _keeping(ScoreSettings(model=MODEL), 3, mesh)
