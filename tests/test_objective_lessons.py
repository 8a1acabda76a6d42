"""The faults of docs/lessons.md that concern an objective, for every one of them.

5, 6 and 8, what the sums are divided by, are in `test_objective_streaming`: the gradient has the
slope of the paper's formula. Distillation's are in `test_turn_replay` and `test_distiller`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import learner_cases as lc
import numpy as np
import pytest
from objective_cases import learner_of, one_group

from thundersync_jax.benchmarks.exactness import OBJECTIVES
from thundersync_jax.learner.buckets import LaneItem, Lanes, make_example, pad_lanes
from thundersync_jax.learner.learner import OpenGroupsError
from thundersync_jax.learner.score import ScoreSettings, sums_of
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.trajectory import TrajectoryError, TrajectoryTokens

LENGTH = 16


def trajectory() -> TrajectoryTokens:
    """Actions, an observation, and actions."""
    rng = np.random.default_rng(3)
    mask = np.asarray([1, 1, 0, 0, 1, 1, 1], bool)
    return TrajectoryTokens(
        token_ids=rng.integers(0, lc.VOCAB_SIZE, 7),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -rng.uniform(1.0, 3.0, 7), 0.0),
        policy_versions=np.where(mask, 0, -1),
        reference_logprobs=np.where(mask, -rng.uniform(1.0, 3.0, 7), 0.0),
    )


@functools.cache
def slopes(name: str):
    """The slopes of the score's and every term's sum of one lane, in its hidden states [T, D]."""
    objective = make_objective(*OBJECTIVES[name])
    settings = ScoreSettings(model=lc.tiny(), objective=objective)
    params = lc.init_params(lc.tiny(), 0)
    hidden = np.random.default_rng(0).normal(size=(LENGTH, lc.tiny().embed_dim)).astype(np.float32)

    def sums(hidden, lane):
        return sums_of(settings, params, hidden, lane)[0]

    return objective, functools.partial(jax.jit(jax.jacrev(sums)), hidden)


def lane_of(name: str, tokens: TrajectoryTokens) -> Lanes:
    objective, _ = slopes(name)
    example = make_example(np.asarray([1, 2], np.int32), tokens, objective)
    item = LaneItem(examples=(example,), scales=(1.0,), advantages=(0.7,))
    lanes = pad_lanes([[item]], 1, LENGTH, np.float32, objective=objective)
    return jax.tree.map(lambda x: x[0, 0], lanes.replace(num_lanes=None))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_no_action_is_has_no_gradient_and_a_mistaken_mask_shows(name: str):
    """LESSONS 14 and 15."""
    tokens = trajectory()
    lane = lane_of(name, tokens)
    want = slopes(name)[1](lane)
    nothing = ~lane.action_mask

    def spoiled(values, filler):
        return None if values is None else np.where(nothing, filler, values)

    other = lane.replace(
        targets=spoiled(lane.targets, 9),
        behavior_logprobs=spoiled(lane.behavior_logprobs, -math.inf).astype(np.float32),
        reference_logprobs=spoiled(lane.reference_logprobs, math.nan),
    )
    assert lc.rel_l2(slopes(name)[1](other), want) == 0.0
    inverted = np.where(tokens.action_mask, 0.0, -1.5)
    mistakes = {
        "the mask is inverted": dataclasses.replace(
            tokens,
            action_mask=~tokens.action_mask,
            behavior_logprobs=inverted,
            policy_versions=np.where(tokens.action_mask, -1, 0),
            reference_logprobs=inverted,
        ),
        "a synthetic token of log-probability 0 is an action": TrajectoryTokens(
            token_ids=np.append(tokens.token_ids, 1),
            action_mask=np.append(tokens.action_mask, True),
            behavior_logprobs=np.append(tokens.behavior_logprobs, 0.0),
            policy_versions=np.append(tokens.policy_versions, 0),
            reference_logprobs=np.append(tokens.reference_logprobs, 0.0),
        ),
    }
    for mistake, wrong in mistakes.items():
        distance = lc.rel_l2(slopes(name)[1](lane_of(name, wrong)), want)
        # The weight of a token that was "certain" is min(p / 1, cap): the fault hides its size.
        assert distance > 1e-2, mistake


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_masked_step_and_a_step_of_nothing_change_nothing(name: str):
    """LESSONS 2 and 7; and 11: what is not finite is refused by name."""
    learner = learner_of(name)
    before = lc.copy_state(learner)
    case = one_group((0.0, 1.0))
    masked = dataclasses.replace(
        case.trajectories[0],
        action_mask=np.zeros(case.trajectories[0].num_tokens, bool),
        behavior_logprobs=np.zeros(case.trajectories[0].num_tokens),
        reference_logprobs=np.zeros(case.trajectories[0].num_tokens),
    )
    for cases in ([], [dataclasses.replace(case, trajectories=(masked, masked))]):
        lc.enqueue(learner, cases)
        report = learner.update()
        assert report.is_empty and report.policy_version == 0
    group = learner.open_group("task-a", case.prompt, 2)
    learner.add_trajectory(group, 0, case.trajectories[0])
    for reward in (math.nan, math.inf, -math.inf):
        with pytest.raises(TrajectoryError, match="index 0: a reward must be finite"):
            learner.set_reward(group, 0, reward)
    with pytest.raises(OpenGroupsError, match="1: waiting for content"):
        learner.update()
    learner.abandon()
    for old, new in zip(before, lc.copy_state(learner), strict=True):
        np.testing.assert_array_equal(old, new)
