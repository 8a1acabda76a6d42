"""Steps that must change nothing, and failures that must not be forgotten."""

from __future__ import annotations

import dataclasses

import jax
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.memory import MemoryPlanError
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.losses.objective import Objective
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.trajectory import MAX_REWARD, TrajectoryBuilder, TrajectoryError, check_reward

DR_GRPO = {"objective": "dr_grpo", "objective_options": {"normalizer": "token_mean"}}


def steep() -> Objective:
    """Advantages whose gradients are finite in float32, and their squares are not."""
    plain = make_objective("dr_grpo", DR_GRPO["objective_options"])
    return dataclasses.replace(plain, advantages=lambda r: 1e15 * (r - r.mean()))


def group_of_two(learner, *, is_ahead: bool, rewards: tuple[float, float]) -> None:
    """A group whose gradients are computed before its verdicts, or after."""
    group = learner.open_group("t", [1, 2, 3], 2)
    for index in range(2):
        tokens = lc.random_tokens(np.random.default_rng(index), 3)
        learner.add_trajectory(group, index, tokens)
    if is_ahead:
        assert learner.work() == 2
    for index, reward in enumerate(rewards):
        learner.set_reward(group, index, reward)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_equal_rewards_change_nothing_whenever_their_gradients_were_computed(is_ahead: bool):
    """Adam's moments would move the weights along a gradient of exactly zero."""
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pool_size=0)
    group_of_two(learner, is_ahead=False, rewards=(0.0, 1.0))
    assert not learner.update().is_empty
    before = lc.copy_state(learner)
    group_of_two(learner, is_ahead=is_ahead, rewards=(1.0, 1.0))
    report = learner.update()
    assert report.is_empty and report.policy_version == 1
    for old, new in zip(before, lc.copy_state(learner), strict=True):
        np.testing.assert_array_equal(old, new)


def test_rewards_at_their_limit_have_a_finite_gradient():
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pool_size=0, **DR_GRPO)
    group_of_two(learner, is_ahead=False, rewards=(MAX_REWARD, -MAX_REWARD))
    assert 1e14 < learner.update().grad_norm < 1e17


def test_an_overflowed_step_stays_refused_until_it_is_abandoned():
    objective = "test_learner_edges:steep"
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pool_size=0, objective=objective)
    group_of_two(learner, is_ahead=False, rewards=(MAX_REWARD, -MAX_REWARD))
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError, match=r"norm inf.*Scale the rewards down"):
            learner.update()
    learner.abandon()
    group_of_two(learner, is_ahead=False, rewards=(0.0, 1.0))
    assert learner.update().policy_version == 1
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(learner.params))


@pytest.mark.parametrize("reward", [1.1e15, -1e39, float("inf"), float("nan"), 10**400])
def test_a_reward_beyond_float32_sums_is_refused(reward: float):
    with pytest.raises(TrajectoryError, match="at most 1e"):
        check_reward(reward)


def test_a_pool_larger_than_the_host_is_refused_on_the_cpu_too():
    with pytest.raises(MemoryPlanError, match=r"learner.pool_size = \d+ would fit"):
        lc.make_learner(lc.tiny(), pool_size=10**9, prompt_buckets=())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_gap_in_a_group_of_equal_rewards_counts_nowhere(is_streamed: bool):
    """Its members run or not, as they arrive; what is refused must not depend on that."""
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pool_size=1, max_logprob_gap=0.5)
    group = learner.open_group("t", [1, 2, 3], 2)
    for index in range(2):
        builder = TrajectoryBuilder()
        builder.append_action([1, 2], [-9.0, -9.0], [0, 0])
        learner.add_trajectory(group, index, builder.build())
        learner.set_reward(group, index, 1.0)
        if is_streamed:
            learner.work()
    report = learner.update()
    assert report.is_empty and np.isnan(report.logprob_gap_max)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
def test_streamed_rewards_may_lie_anywhere(offset: float):
    """Rewards far from zero in relation to their spread, also after a step with other rewards:
    G1 and G2 hold no large terms that cancel.
    """
    rewards = (offset, offset + 1.0, offset + 1.0, offset + 3.0)
    learner = lc.make_learner(lc.tiny(), buckets=(64,), pool_size=1, held_gradients=0)
    group_of_two(learner, is_ahead=False, rewards=(1e3, 1e3 + 1))
    learner.update()
    rng = np.random.default_rng(1)
    trajectories = tuple(lc.random_tokens(rng, 3) for _ in rewards)
    case = lc.Case(prompt=(1, 2), trajectories=trajectories, rewards=rewards)
    want = lc.reference(lc.tiny(), learner.params, [case], LearnerSection())
    group = learner.open_group("t", case.prompt, len(rewards))
    for index, (tokens, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        learner.add_trajectory(group, index, tokens)
        learner.set_reward(group, index, reward)
        assert learner.work() >= 1
    assert lc.rel_l2(learner.gradient(), want) <= 1e-6
