"""Every built-in objective against numbers worked out by hand from its paper's formula, and what a
declaration may not claim.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.config import resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.losses import token_scores
from thundersync_jax.losses.normalizers import Counts, Kind, Normalizer
from thundersync_jax.losses.objective import (
    Objective,
    Streams,
    Term,
    Tokens,
    lane_sums,
    term_weights,
    token_weights,
)
from thundersync_jax.losses.objective_check import (
    ObjectiveError,
    advantages_of,
    check_objective,
    scale_of,
)
from thundersync_jax.losses.objectives import BUILT_IN, SoftOverlong, make_objective

# One group: two trajectories of 2 and 1 action tokens, each with an observation in between.
MASK = [np.array([True, False, True]), np.array([False, True])]
LOGPROBS = [np.array([-1.0, -7.0, -2.0]), np.array([-9.0, -0.5])]  # learner
BEHAVIOR = [np.array([-1.5, 0.0, -1.0]), np.array([0.0, -0.5])]  # sampler
REFERENCE = [np.array([-1.2, 0.0, -1.5]), np.array([0.0, -0.9])]
REWARDS = np.array([1.0, 0.0])
R1, R2 = math.exp(0.5), math.exp(-1.0)  # ratios of the first trajectory; the second's is 1
A = 0.5 / (0.5 + 1e-6)  # standardised: mean 0.5, std 0.5


def gradient(objective: Objective, behavior=BEHAVIOR) -> list[list[float]]:
    """dJ/d log p at the action tokens of the group, assembled from what the objective declares."""
    advantages, _ = advantages_of(objective, REWARDS)
    scale = objective.normalizer.group_scale(3)
    counts = Counts(num_tokens=3, num_trajectories=2, num_groups=1)
    scale_of_step = scale_of(objective, advantages)
    denominators = [scale_of_step * objective.normalizer.denominator(counts)]
    denominators += [t[0].normalizer.denominator(counts) for t in objective.term_sums]
    found = []
    for i, mask in enumerate(MASK):
        count = mask.size
        tokens = Tokens(
            logprobs=jnp.asarray(LOGPROBS[i]),
            behavior_logprobs=jnp.asarray(behavior[i]),
            action_mask=jnp.asarray(mask),
            segment_ids=jnp.ones(count, jnp.int32),
            advantages=None if objective.is_linear else jnp.full(count, advantages[i]),
            reference_logprobs=jnp.asarray(REFERENCE[i]),
            entropy=jnp.zeros(count),
        )
        weights = jnp.asarray(token_weights(objective, mask))
        others = jnp.asarray(term_weights(objective, mask))
        factor = scale * (advantages[i] if objective.is_linear else 1.0)

        def value(logprobs, tokens=tokens, weights=weights, others=others, factor=factor):
            sums = lane_sums(objective, tokens.replace(logprobs=logprobs), weights, others)
            factors = jnp.asarray([factor, *[1.0] * (objective.num_sums - 1)])
            return jnp.sum(factors * sums / jnp.asarray(denominators))

        slope = np.asarray(jax.grad(value)(tokens.logprobs))
        assert not slope[~mask].any()  # LESSONS 15: observations have no gradient
        found.append(slope[mask].tolist())
    return found


HAND_COMPUTED = {
    # 1/3 sum_i A_i sum_t grad log p: three tokens arrived.
    ("grpo", ()): [[A / 3, A / 3], [-A / 3]],
    # 1/2 sum_i A_i 1/|o_i| sum_t.
    ("grpo", (("normalizer", "trajectory_mean"),)): [[A / 4, A / 4], [-A / 2]],
    ("grpo", (("normalizer", "sum"),)): [[A, A], [-A]],
    # A = r - 0.5, over n L = 2 x 4.
    ("dr_grpo", (("normalizer_tokens", 4),)): [[0.0625, 0.0625], [-0.0625]],
    # A = r - the other's, over n.
    ("rloo", ()): [[0.5, 0.5], [-0.5]],
    # A > 0: the ratio 1.65 is above 1.2, so no gradient; 0.37 is below 0.8 and passes.
    ("ppo", ()): [[0.0, A * R2 / 3], [-A / 3]],
    ("ppo", (("ratio", "learner"),)): [[A / 3, A / 3], [-A / 3]],
    # Above 1.28 too; three tokens in one group.
    ("dapo", ()): [[0.0, A * R2 / 3], [-A / 3]],
    ("dapo", (("clip_high", 0.7),)): [[A * R1 / 3, A * R2 / 3], [-A / 3]],
    # s = sqrt(R1 R2) = exp(-0.25), d s / d log p_t = s / 2; 1/2 sum_i A_i s_i.
    ("gspo", ()): [[A * math.exp(-0.25) / 4] * 2, [-A / 2]],
    ("gspo", (("ratio", "learner"),)): [[A / 4, A / 4], [-A / 2]],
    # Weights within [0, 3], and cut at 1.5.
    ("cispo", ()): [[A * R1 / 3, A * R2 / 3], [-A / 3]],
    ("cispo", (("clip_high", 0.5),)): [[A * 1.5 / 3, A * R2 / 3], [-A / 3]],
    ("reinforce_pp", ()): [[A / 3, A / 3], [-A / 3]],
    # A = +-0.5, over their own deviation 0.5.
    ("reinforce_pp_baseline", ()): [[A / 3, A / 3], [-A / 3]],
    ("tis_reinforce", (("cap", 1.2),)): [[0.5 * 1.2 / 3, 0.5 * R2 / 3], [-0.5 / 3]],
    # No baseline: the second has the reward 0.
    ("tis_reinforce", (("baseline", "none"),)): [[R1 / 3, R2 / 3], [0.0]],
}


@pytest.mark.parametrize(("name", "options"), HAND_COMPUTED)
def test_gradient_of_a_hand_computed_group(name: str, options: tuple[tuple[str, object], ...]):
    with jax.enable_x64(True):
        found = gradient(make_objective(name, dict(options)))
    for got, want in zip(found, HAND_COMPUTED[name, options], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-15)  # weights are float32


def test_every_objective_is_hand_computed():
    assert {name for name, _ in HAND_COMPUTED} == set(BUILT_IN)


# d = log p - log q of the three tokens: 0.2, -0.5, 0.4.
KL_SLOPES = {
    "k1": [[1.0, 1.0], [1.0]],
    "k2": [[0.2, -0.5], [0.4]],
    "k3": [[1 - math.exp(-0.2), 1 - math.exp(0.5)], [1 - math.exp(-0.4)]],
}


@pytest.mark.parametrize("estimator", KL_SLOPES)
@pytest.mark.parametrize("scope", ["content", "group"])
def test_kl_of_a_hand_computed_group(estimator: str, scope: str):
    """-0.3 KL, over the same three tokens as the score, on top of GRPO's gradient."""
    options = {"kl_coefficient": 0.3, "kl_estimator": estimator, "terms_scope": scope}
    with jax.enable_x64(True):
        objective = make_objective("grpo", options)
        assert objective.streams is (Streams.GROUP if scope == "group" else Streams.TRAJECTORY)
        assert objective.num_sums == (1 if scope == "group" else 2)
        found = gradient(objective)
    plain = HAND_COMPUTED["grpo", ()]
    for got, base, slope in zip(found, plain, KL_SLOPES[estimator], strict=True):
        np.testing.assert_allclose(got, np.asarray(base) - 0.1 * np.asarray(slope), rtol=1e-7)


def test_batch_statistics_of_two_hand_computed_groups():
    """REINFORCE++: rewards 1, 0 | 3, 4 have mean 2 and std sqrt(2.5), whatever their groups."""
    objective = make_objective("reinforce_pp", {})
    advantages, line = advantages_of(objective, np.array([1.0, 0.0, 3.0, 4.0]))
    std = math.sqrt(2.5) + 1e-6
    np.testing.assert_allclose(advantages, np.array([-1, -2, 1, 2]) / std, rtol=1e-14)
    assert line is not None and line.slope == pytest.approx(1 / std)


def test_the_scale_of_a_step_of_two_hand_computed_groups():
    """REINFORCE++-baseline: 1, 0 | 3, 7 are 0.5, -0.5 | -2, 2 off their means: std sqrt(2.125)."""
    objective = make_objective("reinforce_pp_baseline", {})
    found = [advantages_of(objective, np.array(r))[0] for r in ([1.0, 0.0], [3.0, 7.0])]
    advantages = np.concatenate(found)
    np.testing.assert_array_equal(advantages, [0.5, -0.5, -2.0, 2.0])
    assert scale_of(objective, advantages) == pytest.approx(math.sqrt(2.125) + 1e-6, rel=1e-14)


def test_overlong_shaping_of_hand_computed_lengths():
    """limit 10, cache 4: nothing up to 6 tokens, -1/4 a token from there, -1 beyond 10."""
    shape = SoftOverlong(limit=10, cache=4)
    lengths = (1, 6, 7, 8, 10, 11, 99)
    assert [shape(1.0, n) for n in lengths] == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0, 0.0]
    made = make_objective("dapo", {"overlong_tokens": 10, "overlong_cache": 4})
    assert [made.shape_reward(1.0, n) for n in lengths] == [shape(1.0, n) for n in lengths]


@pytest.mark.parametrize("kind", Kind)
def test_every_normalizer_is_its_formula(kind: Kind):
    """Lengths 2 and 30 | 4, all terms 1 (LESSONS 5: sums and counts are divided once)."""
    normalizer = Normalizer(kind=kind, length=7)
    groups = [[2, 30], [4]]
    total = sum(
        normalizer.group_scale(sum(group)) * normalizer.token_scale(length) * length
        for group in groups
        for length in group
    )
    counts = Counts(num_tokens=36, num_trajectories=3, num_groups=2)
    expected = {
        Kind.TOKEN_MEAN: 36 / 36,
        Kind.TRAJECTORY_MEAN: (1 + 1 + 1) / 3,
        Kind.GROUP_TOKEN_MEAN: (32 / 32 + 4 / 4) / 2,
        Kind.CONSTANT: 36 / (3 * 7),
        Kind.TRAJECTORY_SUM: 36 / 3,
        Kind.SUM: 36,
    }
    assert total / normalizer.denominator(counts) == pytest.approx(expected[kind], rel=1e-15)


ALL: dict[str, dict[str, int]] = {name: {} for name in BUILT_IN}
ALL["dr_grpo"] = {"normalizer_tokens": 8}


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_unchanged_policy_has_ratio_one(name: str):
    """LESSONS 14: with the sampler's log-probabilities equal to the learner's, every objective has
    the gradient A w of log p.
    """
    objective = make_objective(name, ALL[name])
    advantages, _ = advantages_of(objective, REWARDS)
    counts = Counts(num_tokens=3, num_trajectories=2, num_groups=1)
    scale = objective.normalizer.group_scale(3) / objective.normalizer.denominator(counts)
    scale /= scale_of(objective, advantages)
    with jax.enable_x64(True):
        found = gradient(objective, behavior=LOGPROBS)
    for i, got in enumerate(found):
        want = scale * advantages[i] * token_weights(objective, MASK[i])[MASK[i]]
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_lane_without_action_tokens_is_zero_and_finite(name: str):
    """LESSONS 7, for every objective with every term."""
    options = {**ALL[name], "kl_coefficient": 0.1, "entropy_coefficient": 0.1}
    objective = make_objective(name, {**options, "terms_normalizer": "trajectory_mean"})
    empty = jnp.zeros(4, bool)
    tokens = Tokens(
        logprobs=jnp.full(4, -jnp.inf),
        behavior_logprobs=jnp.full(4, jnp.nan),
        action_mask=empty,
        segment_ids=jnp.zeros(4, jnp.int32),
        advantages=None if objective.is_linear else jnp.ones(4),
        reference_logprobs=jnp.full(4, jnp.nan),
        entropy=jnp.full(4, jnp.nan),
    )
    weights = jnp.asarray(token_weights(objective, np.asarray(empty)))
    others = jnp.asarray(term_weights(objective, np.asarray(empty)))
    slopes = jax.jacobian(
        lambda x: lane_sums(objective, tokens.replace(logprobs=x), weights, others)
    )(tokens.logprobs)
    assert slopes.shape == (2, 4) and not np.any(slopes)


def test_packed_trajectories_have_ratios_of_their_own():
    objective = make_objective("gspo", {})
    both = {
        "logprobs": np.concatenate(LOGPROBS),
        "behavior_logprobs": np.concatenate(BEHAVIOR),
        "action_mask": np.concatenate(MASK),
        "segment_ids": np.array([1, 1, 1, 2, 2]),
        "advantages": np.array([1.0, 1.0, 1.0, -1.0, -1.0]),
    }
    packed = objective.score(Tokens(**jax.tree.map(jnp.asarray, both)))
    assert packed[np.concatenate(MASK)].tolist() == pytest.approx(
        [math.exp(-0.25), math.exp(-0.25), -1.0], rel=1e-6
    )


# -- declarations that are refused ----------------------------------------------------------------


def ranks(rewards: np.ndarray) -> np.ndarray:
    """Not affine: only the order of the rewards counts."""
    return np.argsort(np.argsort(rewards)) - (rewards.size - 1) / 2


def declared(**changes: object) -> Objective:
    plain = make_objective("grpo", {})
    return dataclasses.replace(plain, name="mine", **changes)


@pytest.mark.parametrize("streams", [Streams.TRAJECTORY, Streams.BATCH])
def test_advantages_that_are_not_affine_cannot_stream(streams: Streams):
    with pytest.raises(ObjectiveError, match=r"'mine' declares streams = .* not affine in the rew"):
        check_objective(declared(advantages=ranks, streams=streams))


def test_batch_statistics_need_no_scale_of_the_step():
    with pytest.raises(ObjectiveError, match="advantage_scale has nothing to add"):
        check_objective(declared(streams=Streams.BATCH, advantage_scale=np.std))


def test_advantages_that_are_not_affine_may_wait_for_their_group():
    score = token_scores.ClippedSurrogate(low=0.2, high=0.2)
    check_objective(declared(advantages=ranks, streams=Streams.GROUP, score=score))


def test_advantages_that_stop_being_affine_are_refused_when_their_group_closes():
    """Within the check's rewards it is a line; a reward of 100 is not on it."""
    objective = declared(advantages=lambda r: np.minimum(r, 50.0))
    check_objective(objective)
    with pytest.raises(ObjectiveError, match=r"\[0.0, 1.0, 100.0\] have \[0.0, 1.0, 50.0\]"):
        advantages_of(objective, np.array([0.0, 1.0, 100.0]))


CALLS = itertools.count(1)
REFUSED = {
    "reads its advantage": (
        {"score": token_scores.ClippedSurrogate(low=0.2, high=0.2)},
        r"declares streams = 'trajectory': score raised .*Streams.GROUP alone",
    ),
    "a number for a lane": ({"score": lambda t: jnp.sum(t.logprobs)}, r"of shape \(\), expected"),
    "complex scores": ({"score": lambda t: 1j * t.logprobs}, "is complex64 .* expected one real"),
    "a score that fails on long trajectories": (
        {"score": lambda t: t.logprobs if t.logprobs.shape[0] < 8 else 1 / 0},
        "score raised ZeroDivisionError",
    ),
    "a score that changes": (
        {"score": lambda t: t.logprobs * next(CALLS)},
        "not the same when it is asked for again",
    ),
    "advantages that change": (
        {"advantages": lambda r: r * next(CALLS)},
        r"advantages\(.* and then .*: expected the same whenever it is asked for",
    ),
    "shaped rewards that change": (
        {"shape_reward": lambda r, n: r + next(CALLS)},
        r"shape_reward\(.* and then .*: expected the same",
    ),
    "groups that are kept at times": (
        {"keeps_group": lambda r: next(CALLS) % 2 == 0},
        r"keeps_group\(.* and then .*: expected the same",
    ),
    "a scale that changes": (
        {
            "streams": Streams.GROUP,
            "score": token_scores.WithAdvantage(score=token_scores.log_probability),
            "advantage_scale": lambda a: float(next(CALLS)),
        },
        r"advantage_scale\(.* and then .*: expected the same",
    ),
    "a group's score without its advantage": (
        {"streams": Streams.GROUP},
        "rewards would be ignored. Multiply it by Tokens.advantages",
    ),
    "a score without a slope": (
        {"score": lambda t: jax.lax.stop_gradient(t.logprobs)},
        "nothing would be learned",
    ),
    "a score of the sampler": ({"score": lambda t: t.behavior_logprobs}, "would be learned"),
    "weights that are all 0": (
        {"token_weights": lambda m: np.zeros(m.size)},
        "would be learned: .* token weights above 0",
    ),
    "an exit in the score": ({"score": lambda t: sys.exit(7)}, "score raised SystemExit: 7"),
    "an exit in the advantages": ({"advantages": lambda r: sys.exit(7)}, "raised SystemExit: 7"),
    "advantages that are texts": (
        {"advantages": lambda r: r.astype(str)},
        "one finite number each",
    ),
    "complex advantages": ({"advantages": lambda r: 1j * r}, "one finite number each"),
    "advantages that fail in groups of four": (
        {"advantages": lambda r: r - r.mean() if r.size != 4 else 1 / 0},
        "trying it raised ZeroDivisionError",
    ),
    "weights of another shape": ({"token_weights": lambda m: np.ones(1)}, "of 6 tokens have shape"),
    "weights below 0 far into a trajectory": (
        {"token_weights": lambda m: np.where(m, 7.0 - np.arange(m.size), 0.0)},
        "that of token 9 of 64, an action, is -2.0",
    ),
    "weights that fail": ({"token_weights": lambda m: 1 / 0}, "trying it raised ZeroDivisionError"),
    "no number for a reward": (
        {"shape_reward": lambda r, n: None},
        "shape_reward.* is None: expec",
    ),
    "a reward that is not finite": (
        {"shape_reward": lambda r, n: math.nan},
        "is nan: expected a f",
    ),
    "groups kept as an array": ({"keeps_group": lambda r: r > 0}, "keeps_group.*expected True or"),
    "a normalizer by name": (
        {"normalizer": "token_mean"},
        "'token_mean', expected a value of type Normalizer",
    ),
    "a kind by name": (
        {"normalizer": Normalizer(kind="sum")},
        "kind = 'sum', expected a value of type Kind: one",
    ),
    "a term by name": ({"terms": ("kl",)}, "terms = 'kl', expected a value of type Term"),
    "not finite at 0": ({"score": lambda t: jnp.sqrt(t.logprobs)}, "gradient .* is not finite"),
    "reads its lane": (
        {"score": lambda t: jnp.exp(t.logprobs.sum() / t.action_mask.sum()) * t.action_mask},
        "shares a lane .* read its own trajectory alone",
    ),
    "reads padding": (
        {"score": lambda t: t.logprobs * (1 + jnp.mean(t.logprobs))},
        "a trajectory of 6 tokens .* and 3 positions of padding",
    ),
    "counts turns": (
        {"score": lambda t: 0.5 ** jnp.cumsum(jnp.diff(t.action_mask, prepend=False)) * t.logprobs},
        "a trajectory of 5 tokens .* shares a lane",
    ),
    "a term that reads its lane": (
        {
            "terms": (
                Term(
                    name="spread",
                    value=lambda t: jnp.square(t.logprobs - t.logprobs.mean()),
                    coefficient=1.0,
                ),
            )
        },
        "shares a lane",
    ),
    "an entropy that reads its lane": (
        {
            "terms": (
                Term(
                    name="mean",
                    value=lambda t: t.entropy.mean() * t.entropy,
                    coefficient=1.0,
                    needs_entropy=True,
                ),
            )
        },
        "shares a lane",
    ),
    "a normalizer of no length": (
        {"normalizer": Normalizer(kind=Kind.CONSTANT, length=0)},
        "length = 0: expected a number of tokens from 1",
    ),
    "a length beyond every number": (
        {"normalizer": Normalizer(kind=Kind.CONSTANT, length=10**400)},
        r"length = 10+\.\.\.0+: expected a number of tokens from 1 to 2147483647",
    ),
    "a length below 0": (
        {"normalizer": Normalizer(kind=Kind.CONSTANT, length=-5)},
        "length = -5: expected a number of tokens",
    ),
    "a length that is no integer": (
        {"normalizer": Normalizer(kind=Kind.CONSTANT, length=math.nan)},
        "normalizer.length = nan, expected a value of type int",
    ),
    "an infinite coefficient": (
        {"terms": (Term(name="k", value=lambda t: t.logprobs, coefficient=math.inf),)},
        "k: coefficient = inf: expected a finite number",
    ),
    "a coefficient beyond float32": (
        {"terms": (Term(name="k", value=lambda t: t.logprobs, coefficient=-1e39),)},
        r"k: coefficient = -1e\+39: expected a finite number of at most 1e\+30",
    ),
    "a coefficient that is a text": (
        {"terms": (Term(name="k", value=lambda t: t.logprobs, coefficient="1.0"),)},
        "k: coefficient = '1.0', expected a value of type Real",
    ),
    "advantages in float32": (
        {"advantages": lambda r: (r - r.mean()).astype(np.float32)},
        "are float32, whose rounding hides .* compute them in float64",
    ),
    "advantages of another length": (
        {"advantages": lambda r: r[:-1]},
        "expected one finite number each",
    ),
    "advantages that are not finite": (
        {"advantages": lambda r: np.full(r.shape, np.nan)},
        "expected one finite number each",
    ),
    "no scale": ({"advantage_scale": lambda a: 0.0}, "advantage_scale of .* is 0.0: expected a fi"),
    "a score that does not scale": (
        {
            "streams": Streams.GROUP,
            "score": lambda t: jnp.square(t.advantages) * t.logprobs,
            "advantage_scale": lambda a: 2.0,
        },
        "score does not double with its advantages",
    ),
    "another type": (
        {"streams": "trajectory"},
        "streams = 'trajectory', expected a value of type Streams: one of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_declaration_that_cannot_be_right_is_refused(case: str):
    changes, message = REFUSED[case]
    with pytest.raises(ObjectiveError, match=message):
        check_objective(declared(**changes))


@pytest.mark.parametrize("weights", [-1.0, math.nan, math.inf])
def test_token_weights_that_are_negative_or_not_finite_are_refused(weights: float):
    objective = declared(token_weights=lambda mask: np.where(mask, weights, 0.0))
    with pytest.raises(ValueError, match="token weights must be finite, at least 0"):
        check_objective(objective)
    with pytest.raises(ValueError, match=r"token 1 of 2, no action, is 1\.0"):
        token_weights(declared(token_weights=np.ones_like), np.array([True, False]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gripo", {}, "'gripo' is not built in. Did you mean 'grpo'"),
        ("GRPO", {}, "Did you mean 'grpo'"),
        (":f", {}, "expected 'package.module:function'"),
        ("sys:exit", {}, "with config.learner.objective_options = {} raised SystemExit"),
        ("no.module:f", {}, "importing no.module raised"),
        ("math:nothing", {}, "has no 'nothing'"),
        ("math:sqrt", {"x": 1}, "with config.learner.objective_options"),
        ("test_objectives:ranks", {"rewards": np.zeros(2)}, "returns an Objective, it returned nd"),
        ("grpo", {"tis_kap": 1.0}, "tis_kap is not an option of 'grpo'. Did you mean 'tis_cap'"),
        ("grpo", {"tis_cap": "2"}, "tis_cap = '2': expected a finite number, as by d"),
        ("grpo", {"kl_coefficient": "nan"}, "= 'nan': expected a finite number, as by default 0.0"),
        ("grpo", {"tis_cap": True}, "tis_cap = True: expected a finite number"),
        ("grpo", {"overlong_tokens": "12"}, "overlong_tokens = '12': expected a whole number"),
        ("dapo", {"drop_equal_groups": "yes"}, "groups = 'yes': expected True or False"),
        ("grpo", {"tis_cap": -1.0}, "tis_cap = -1.0: expected a finite number of at least 0"),
        ("grpo", {"tis_cap": math.nan}, "tis_cap = nan"),
        ("grpo", {"normalizer": "mean"}, "normalizer = 'mean': expected one of"),
        ("dr_grpo", {}, "normalizer_tokens = 0: expected a number of tokens"),
        ("ppo", {"clip_low": 1.5}, r"clip_low = 1.5: expected a number in \(0, 1\]"),
        ("ppo", {"ratio": "old"}, "ratio = 'old': expected one of"),
        ("dapo", {"overlong_tokens": 10}, "overlong_cache = 0: expected 1 to overlong_tokens = 10"),
        (
            "dapo",
            {"overlong_cache": 5},
            "overlong_tokens = 0: expected at least 1 beside over.*= 5",
        ),
        ("grpo", {"kl_coefficient": -0.1}, "kl_coefficient = -0.1"),
        ("grpo", {"kl_coefficient": 0.1, "kl_estimator": "k4"}, "kl_estimator = 'k4'"),
        (
            "grpo",
            {"kl_estimator": "k1"},
            "'k1': expected 'k3' without kl_coefficient: nothing",
        ),
        (
            "grpo",
            {"entropy_coefficient": 0.1, "distillation_ratio_cap": 2.0},
            "ratio_cap = 2.0: expected 0.0 without distillation_coefficient",
        ),
        ("ppo", {"terms_scope": "group"}, "scope = 'group': expected 'content' without kl_coeffi"),
        ("rloo", {"terms_normalizer": "sum"}, "terms_normalizer = 'sum': expected ''"),
        ("rloo", {"normalizer_tokens": 8}, "tokens = 8: expected 0 without a normalizer 'consta"),
    ],
)
def test_configurations_of_no_objective_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_objective(name, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dapo", {"kl_coefficient": 0.1}, "cannot be normalised by 'group_token_mean'"),
        (
            "reinforce_pp_baseline",
            {"kl_coefficient": 0.1, "terms_scope": "group"},
            "share the score's sum, which is divided by advantage_scale",
        ),
        ("reinforce_pp", {"normalizer": "group_token_mean"}, "no group to divide by"),
        ("reinforce_pp", {"drop_equal_groups": True}, "no group can be dropped"),
        ("reinforce_pp", {"kl_coefficient": 0.1, "terms_scope": "group"}, "does not wait for"),
    ],
)
def test_options_that_exclude_each_other_are_refused(name: str, options: dict, message: str):
    with pytest.raises(ObjectiveError, match=message):
        make_objective(name, options)


def test_the_example_of_a_users_own_objective_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    section = resolve(importlib.import_module("configs.custom_objective").get_config()).learner
    objective = make_objective(section.objective, section.objective_options)
    assert objective.name == "median_baseline" and objective.num_sums == 1
    assert objective.advantages(np.array([0.0, 1.0, 4.0])).tolist() == [-1.0, 0.0, 3.0]
