"""Packed lanes: which trajectories share one, and that the gradient stays the same."""

from __future__ import annotations

import dataclasses

import jax
import learner_cases as lc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.buckets import Example, bucket_of
from thundersync_jax.learner.groups import Member
from thundersync_jax.learner.packing import pack
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.trajectory import TrajectoryBuilder

LADDER = (4, 8, 16, 32)
TIS = {"objective_options": {"tis_cap": 2.0}}


def member(index: int, length: int, reward: float) -> Member:
    ids, weights = np.zeros(length, np.int32), np.ones(length, np.float32)
    example = Example(tokens=ids, targets=ids, weights=weights, behavior_logprobs=weights)
    bucket = bucket_of(length, LADDER)
    return Member(index=index, example=example, bucket=bucket, reward=reward)


@given(
    lengths=st.lists(st.integers(1, 32), max_size=9),
    ladder=st.sampled_from([(), LADDER[:2], LADDER]),
    is_direct=st.booleans(),
)
@settings(deadline=None)
def test_packs_hold_every_member_once_and_pad_no_more_than_lanes_of_their_own(
    lengths: list[int], ladder: tuple[int, ...], is_direct: bool
):
    members = [member(i, n, float(i % 2)) for i, n in enumerate(lengths)]
    packs = pack(members, ladder, is_direct=is_direct)
    assert sorted(m.index for _, lane in packs for m in lane) == list(range(len(members)))
    for bucket, lane in packs:
        assert sum(m.example.num_positions for m in lane) <= bucket
        assert len(lane) == 1 or bucket in ladder
        assert is_direct or len({m.reward for m in lane}) == 1
    assert sum(bucket for bucket, _ in packs) <= sum(m.bucket for m in members)


@pytest.mark.parametrize(
    ("pool_size", "prompt_buckets"),
    [
        (0, ()),
        pytest.param(1, (24,), marks=pytest.mark.slow),
        pytest.param(0, (24,), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
    ],
)
def test_packed_gradients_equal_the_reference(pool_size: int, prompt_buckets: tuple[int, ...]):
    """Rewards of two values, so that open groups pack too; float64 leaves no room for luck."""
    with jax.enable_x64(True):
        model = lc.tiny("float64")
        learner = lc.make_learner(
            model,
            pool_size=pool_size,
            buckets=(64,),
            pack_tokens=64,
            tokens_per_step=64,
            prompt_buckets=prompt_buckets,
            min_shared_tokens=1,
        )
        cases = [
            dataclasses.replace(case, rewards=tuple(r and float(r > 1) for r in case.rewards))
            for case in lc.random_batch(3)
        ]
        want = lc.reference(model, learner.state.params, cases, LearnerSection())
        lanes = 0
        for order in range(3):
            lc.run_events(learner, cases, np.random.default_rng(order))
            assert lc.rel_l2(learner.gradient(), want) <= 1e-12
            lanes += max(item.num_trajectories for item in learner.take_work_log())
            learner.abandon()
        assert lanes > 3  # tokens_per_step is one lane: more than one trajectory was packed


def test_a_packed_gradient_that_is_not_finite_names_every_trajectory_of_its_lane():
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pack_tokens=64, tokens_per_step=64, **TIS)
    group = learner.open_group("t", [1, 2], 3)
    for index in range(3):
        builder = TrajectoryBuilder()
        builder.append_action([3, 4], [-np.finfo(np.float32).max] * 2, [0, 0])
        learner.add_trajectory(group, index, builder.build())
        learner.set_reward(group, index, float(index))
    bad = learner._schedule.get(group).members[1].example
    bad.behavior_logprobs[:] = np.nan
    with pytest.raises(NonFiniteGradientError, match=r"index 0.*index 1.*index 2"):
        learner.update()
