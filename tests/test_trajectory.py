"""Records keep ids, mask, log-probabilities and versions together; verdicts are a reward or a
failure.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync_jax.trajectory import (
    OBSERVATION_VERSION,
    TrajectoryBuilder,
    TrajectoryError,
    TrajectoryTokens,
    Verdict,
    check_reward,
)

pieces = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 50), max_size=5)), max_size=8)


@given(pieces)
def test_pieces_stay_aligned_whatever_is_appended(pieces):
    """LESSONS 13 and 14: an action token keeps its log-probability, an observation is never one."""
    builder, expected = TrajectoryBuilder(), []
    for is_action, ids in pieces:
        if is_action:
            logprobs = [-0.5 - i for i in ids]
            builder.append_action(ids, logprobs, [3] * len(ids))
            expected += [(i, True, logprob, 3) for i, logprob in zip(ids, logprobs, strict=True)]
        else:
            builder.append_observation(ids)
            expected += [(i, False, 0.0, OBSERVATION_VERSION) for i in ids]
    tokens = builder.build()
    got = zip(
        tokens.token_ids.tolist(),
        tokens.action_mask.tolist(),
        tokens.behavior_logprobs.tolist(),
        tokens.policy_versions.tolist(),
        strict=True,
    )
    assert list(got) == expected
    assert tokens.num_action_tokens == sum(row[1] for row in expected)


def tokens(**changes):
    fields = {
        "token_ids": np.arange(3),
        "action_mask": np.ones(3, bool),
        "behavior_logprobs": np.full(3, -1.0),
        "policy_versions": np.zeros(3),
    }
    return TrajectoryTokens(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_mask": np.ones(2, bool)}, r"one length, got shapes .*\(2,\)"),
        (
            {"behavior_logprobs": np.array([-1.0, np.nan, -1.0])},
            r"finite and at most 0, got \[nan\]",
        ),
        ({"behavior_logprobs": np.array([-1.0, 0.5, -1.0])}, r"at most 0, got \[0.5\]"),
        ({"token_ids": np.zeros((3, 1), int)}, "one length"),
    ],
)
def test_misaligned_records_are_refused(changes, message):
    with pytest.raises(TrajectoryError, match=message):
        tokens(**changes)


def test_an_action_without_a_logprob_for_each_token_is_refused():
    with pytest.raises(TrajectoryError, match="2 ids, 1 log-probabilities, 2 versions"):
        TrajectoryBuilder().append_action([1, 2], [-1.0], [0, 0])


def test_a_verdict_is_exactly_one_of_reward_and_failure():
    """LESSONS 10: a failure is never a zero."""
    assert Verdict(failure="sandbox died").reward is None
    for fields in ({}, {"reward": 0.0, "failure": "x"}):
        with pytest.raises(TrajectoryError, match="a reward or a failure"):
            Verdict(**fields)


@pytest.mark.parametrize(
    "reward",
    [
        *(math.nan, math.inf, -math.inf, True, None, "1", 10**400),
        *(np.float32("nan"), np.float16("inf"), np.float16("-inf")),
    ],
)
def test_rewards_that_are_no_finite_number_are_refused(reward):
    with pytest.raises(TrajectoryError, match="a reward must be"):
        check_reward(reward)


def test_a_refused_reward_is_told_what_to_do_in_few_words():
    for reward, told in (
        (True, "got True of type bool: return float"),
        (-(10**5000), "got -inf: "),
    ):
        with pytest.raises(TrajectoryError, match=told) as refused:
            check_reward(reward)
        assert len(str(refused.value)) < 250


def test_rewards_of_numpy_are_numbers():
    assert check_reward(np.float32(0.5)) == 0.5
    assert type(check_reward(np.int64(1))) is float
