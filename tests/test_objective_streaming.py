"""Every objective streams at the level it declares: the learner's gradient is that of one batch,
and of the paper's formula, for every arrival order, path mix and pool.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import pytest
from objective_cases import LENGTH, cases_of, learner_of, one_group, section

from thundersync_jax.benchmarks.exactness import OBJECTIVES
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.learner import OpenGroupsError
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.model.transformer import forward, logits
from thundersync_jax.trajectory import TrajectoryError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The action tokens of one trajectory: the policy differentiated (p) and frozen (p0), sampler
    (b), reference (q) and entropy (h).
    """

    r: float | None
    p: np.ndarray
    p0: np.ndarray
    b: np.ndarray
    q: np.ndarray
    h: np.ndarray

    @property
    def n(self) -> int:
        return self.p.size


Groups = list[list[Sample]]


def rewarded(group: list[Sample]) -> list[Sample]:
    return [s for s in group if s.r is not None]


def tokens(samples: list[Sample]) -> int:
    return sum(s.n for s in samples)


def standardized(rewards: list[float]) -> np.ndarray:
    r = np.asarray(rewards)
    return (r - r.mean()) / (r.std() + 1e-6) if len(set(rewards)) > 1 else 0 * r


def grouped(groups: Groups, value: Callable, advantage: Callable = standardized) -> list:
    """[[value(A_i, sample_i)]] over rewarded samples, A of their group."""
    found = []
    for group in map(rewarded, groups):
        advantages = advantage([s.r for s in group])
        found.append([value(a, s) for a, s in zip(advantages, group, strict=True)])
    return found


def total(values: list) -> float:
    return float(sum(map(sum, values)))


def reinforce(a: float, s: Sample) -> float:
    return a * s.p.sum()


def clipped(low: float, high: float) -> Callable:
    def value(a: float, s: Sample) -> float:
        ratio = np.exp(s.p - s.b)
        return np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a).sum()

    return value


def gspo(a: float, s: Sample) -> float:
    ratio = np.exp((s.p - s.b).mean())
    return min(ratio * a, np.clip(ratio, 0.8, 1.2) * a)


def weighted(weight: Callable) -> Callable:
    return lambda a, s: a * (weight(np.exp(s.p0 - s.b)) * s.p).sum()


def centered(rewards: list[float]) -> np.ndarray:
    return np.asarray(rewards) - np.mean(rewards) if rewards else np.zeros(0)


def leave_one_out(rewards: list[float]) -> list[float]:
    others = len(rewards) - 1
    return [r - (sum(rewards) - r) / others for r in rewards]


def everything(groups: Groups) -> list[Sample]:
    return [s for group in groups for s in group]


def k3(s: Sample) -> float:
    return (np.exp(s.q - s.p) - 1 - (s.q - s.p)).sum()


def dapo(groups: Groups) -> float:
    """Limit 12, cache 6; the mean over kept groups of token means; k1 of every content."""
    value, kept = 0.0, 0
    for group in map(rewarded, groups):
        if len({s.r for s in group}) > 1:
            shaped = [s.r + min(0.0, max(-1.0, (6 - s.n) / 6)) for s in group]
            parts = zip(standardized(shaped), group, strict=True)
            value += sum(clipped(0.2, 0.28)(a, s) for a, s in parts) / tokens(group)
            kept += 1
    content = everything(groups)
    return value / kept - 0.1 * sum((s.p - s.q).sum() for s in content) / tokens(content)


def reinforce_pp(groups: Groups) -> float:
    arrived, content = rewarded(everything(groups)), everything(groups)
    parts = zip(standardized([s.r for s in arrived]), arrived, strict=True)
    kl = sum(k3(s) / s.n for s in content) / len(content)
    return sum(a * s.p.sum() for a, s in parts) / tokens(arrived) - 0.2 * kl


def reinforce_pp_baseline(groups: Groups) -> float:
    """The mean of each group, the deviation of the step; k2 of every content."""
    parts = grouped(groups, lambda a, s: (a, s.p.sum()), centered)
    advantages, scores = np.transpose([part for group in parts for part in group])
    content = everything(groups)
    kl = sum((np.square(s.p - s.q) / 2).sum() for s in content) / tokens(content)
    value = (advantages * scores).sum() / (advantages.std() + 1e-6)
    return value / tokens(rewarded(content)) - 0.2 * kl


def kl_of_groups(groups: Groups) -> float:
    """k2 counts in groups with an advantage only, over the tokens of all that have a reward."""
    value = total(grouped(groups, reinforce))
    for group in map(rewarded, groups):
        if len({s.r for s in group}) > 1:
            value -= 0.1 * sum((np.square(s.p - s.q) / 2).sum() for s in group)
    return value / tokens(rewarded(everything(groups)))


def kl_and_entropy(groups: Groups) -> float:
    content, arrived = everything(groups), rewarded(everything(groups))
    score = total(grouped(groups, lambda a, s: a * s.p.mean())) / len(arrived)
    return score + sum(0.05 * s.h.sum() - 0.1 * k3(s) for s in content) / tokens(content)


def mixed(groups: Groups) -> float:
    """Half of the distillation of every content, with the ratio cut at 1.2."""
    content, arrived = everything(groups), rewarded(everything(groups))
    score = total(grouped(groups, lambda a, s: a * s.p.mean())) / len(arrived)
    taught = sum((np.minimum(np.exp(s.p0 - s.b), 1.2) * (s.q - s.b) * s.p).sum() for s in content)
    return score + 0.5 * taught / tokens(content)


def over_tokens(value: Callable, advantage: Callable = standardized) -> Callable:
    return lambda g: total(grouped(g, value, advantage)) / tokens(rewarded(everything(g)))


def over_trajectories(value: Callable, advantage: Callable, length: int = 1) -> Callable:
    return lambda g: total(grouped(g, value, advantage)) / (length * len(rewarded(everything(g))))


PAPERS: dict[str, Callable[[Groups], float]] = {
    "grpo": over_tokens(reinforce),
    "grpo_kl_entropy": kl_and_entropy,
    "grpo_kl_of_groups": kl_of_groups,
    "grpo_distillation": mixed,
    "dr_grpo": over_trajectories(reinforce, centered, 32),
    "rloo": over_trajectories(reinforce, leave_one_out),
    "dapo": dapo,
    "gspo": over_trajectories(gspo, standardized),
    "cispo": over_tokens(weighted(lambda w: np.clip(w, 0.5, 1.2))),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "tis_reinforce": over_tokens(weighted(lambda w: np.minimum(w, 1.1)), centered),
    "ppo": over_tokens(clipped(0.2, 0.2)),
}


# One of each kind also shares prompts and runs ahead of verdicts; each program compiles in seconds.
ALL_PATHS = {
    "held_gradients": 1,
    "prompt_buckets": (24,),
    "prompt_slots": 2,
    "min_shared_tokens": 8,
}
# Whose programs are unlike the others'; every objective's are slow tests, each compiles in seconds.
KINDS = ("grpo_kl_entropy", "dapo", "reinforce_pp")


def slow(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.partial(jax.jit, static_argnums=0)
def all_logprobs(model, params, ids: np.ndarray) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape)
    hidden = forward(model, params, ids, positions, jnp.ones_like(ids), None, None)
    return jax.nn.log_softmax(logits(model, params, hidden))


def policy_values(model, params, cases: list[lc.Case]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(log p, entropy) at the action tokens of every trajectory, from all logits."""
    rows = [(c.prompt, t) for c in cases for t in c.trajectories]
    ids = np.zeros((len(rows), LENGTH), np.int32)
    for row, (prompt, trajectory) in enumerate(rows):
        both = [*prompt, *trajectory.token_ids.tolist()]
        ids[row, : len(both)] = both
    logprobs = np.asarray(all_logprobs(model, params, ids))
    entropy = -(np.exp(logprobs) * logprobs).sum(-1)
    found = []
    for row, (prompt, trajectory) in enumerate(rows):
        at = len(prompt) - 1 + np.flatnonzero(trajectory.action_mask)
        found.append((logprobs[row, at, ids[row, at + 1]], entropy[row, at]))
    return found


def paper_value(name: str, cases, now, frozen) -> float:
    groups, at = [], 0
    for case in cases:
        group = []
        for trajectory, reward in zip(case.trajectories, case.rewards, strict=True):
            mask = trajectory.action_mask
            sample = Sample(
                r=reward,
                p=now[at][0],
                p0=frozen[at][0],
                b=trajectory.behavior_logprobs[mask].astype(np.float64),
                q=trajectory.reference_logprobs[mask].astype(np.float64),
                h=now[at][1],
            )
            group.append(sample)
            at += 1
        groups.append(group)
    return PAPERS[name](groups)


def slope(name: str, model, params, cases, direction) -> float:
    """d/de of the paper's formula along a direction, by central differences."""
    frozen = policy_values(model, params, cases)
    values = []
    for step in (1e-5, -1e-5):
        moved = jax.tree.map(lambda p, d, e=step: p + e * d, params, direction)
        now = policy_values(model, moved, cases)
        values.append(paper_value(name, cases, now, frozen))
    return (values[0] - values[1]) / 2e-5


@pytest.mark.parametrize("name", [*KINDS, *slow(name for name in OBJECTIVES if name not in KINDS)])
def test_every_objective_equals_the_reference_and_the_finite_differences_of_its_formula(name: str):
    """float64; one pair, failures before and after their content."""
    with jax.enable_x64(True):
        changes = ALL_PATHS if name in KINDS else {}
        learner, cases = learner_of(name, "float64", **changes), cases_of(1)
        params, model = learner.state.params, lc.tiny("float64")
        want = lc.reference(model, params, cases, section(name))
        for order in range(4):
            lc.run_events(learner, cases, np.random.default_rng(order))
            found = learner.gradient()
            assert lc.rel_l2(found, want) <= 1e-11
            learner.abandon()
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
        along = sum(
            float(np.sum(g * np.asarray(d)))
            for g, d in zip(*map(jax.tree.leaves, (found, direction)), strict=True)
        )
        assert -along == pytest.approx(slope(name, model, params, cases, direction), rel=1e-6)


def test_every_objective_has_its_formula():
    assert PAPERS.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            *("grpo_kl_entropy", {"pool_size": 8, "pack_tokens": LENGTH}), marks=pytest.mark.slow
        ),
        pytest.param("dapo", {"pool_size": 8, "pack_tokens": LENGTH}, marks=pytest.mark.slow),
        ("reinforce_pp", {"pool_size": 0}),
    ],
)
def test_pools_and_packed_lanes_change_nothing(name: str, changes: dict):
    learner, cases = learner_of(name, **changes), cases_of(2)
    want = lc.reference(lc.tiny(), learner.state.params, cases, section(name))
    for order in range(3):
        lc.run_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        learner.abandon()


# -- what a reward-free term counts ----------------------------------------------------------------


@functools.cache
def terms_learner():
    return learner_of("grpo_kl_entropy")


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (None, None), (1.0, None)])
def test_terms_count_in_groups_without_an_advantage(rewards):
    """LESSONS 8: by default a term counts every trajectory whose content is final; so the step is
    not empty, and its update is that of the terms alone.
    """
    learner, case = terms_learner(), one_group(rewards)
    want = lc.reference(lc.tiny(), learner.state.params, [case], section("grpo_kl_entropy"))
    lc.run_events(learner, [case], np.random.default_rng(0))
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    version = learner.state.policy_version
    report = learner.update()
    assert not report.is_empty and report.policy_version == version + 1
    assert sum(report.paths.values()) == sum(r is not None for r in rewards)
    assert report.logprob_gap_max > 0  # it is watched where the terms alone train


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (None, None)])
def test_terms_of_scope_group_drop_groups_without_an_advantage(rewards):
    """LESSONS 8: the other option."""
    learner = learner_of("grpo_kl_of_groups")
    lc.run_events(learner, [one_group(rewards)], np.random.default_rng(0))
    assert learner.update().is_empty


@pytest.mark.parametrize(("drops", "denominator"), [(False, 4.0), (True, 2.0)])
def test_equal_groups_dilute_the_denominator_or_not(drops: bool, denominator: float):
    """LESSONS 6 and 8: what arrived, with or without groups of equal rewards; never the failed."""
    learner = lc.make_learner(
        lc.tiny(),
        buckets=(LENGTH,),
        objective_options={"normalizer": "trajectory_mean", "drop_equal_groups": drops},
    )
    cases = [one_group((0.0, 1.0)), one_group((1.0, 1.0)), one_group((None, None))]
    lc.enqueue(learner, cases)
    assert learner._denominators() == [denominator]
    assert not learner.update().is_empty


def test_a_term_that_is_not_finite_never_reaches_the_optimizer():
    """Although the attempt failed: its terms count. LESSONS 11."""
    learner, case = terms_learner(), one_group((None, 1.0))
    group = learner.open_group("task-a", case.prompt, 2)
    learner.add_trajectory(group, 0, case.trajectories[0])
    learner._schedule.get(group).members[0].example.reference_logprobs[:] = np.inf
    learner.set_failed(group, 0, "the verifier broke")
    learner.add_trajectory(group, 1, case.trajectories[1])
    learner.set_reward(group, 1, 1.0)
    before = lc.copy_state(learner)
    with pytest.raises(NonFiniteGradientError, match=r"task-a.*index 0"):
        learner.update()
    learner.abandon()
    for old, new in zip(before, lc.copy_state(learner), strict=True):
        np.testing.assert_array_equal(old, new)


def test_what_an_objective_needs_of_a_trajectory_is_asked_for_by_name():
    learner, case = terms_learner(), one_group((0.0, 1.0))
    group = learner.open_group("task-a", case.prompt, 2)
    bare = dataclasses.replace(case.trajectories[0], reference_logprobs=None)
    with pytest.raises(LearnerError, match=r"task-a.*index 0: .*no reference_logprobs"):
        learner.add_trajectory(group, 0, bare)
    learner.add_trajectory(group, 0, case.trajectories[0])
    learner.add_trajectory(group, 1, case.trajectories[1])
    learner.set_reward(group, 1, 1.0)
    with pytest.raises(OpenGroupsError, match=r"task-a.* index 0: waiting for a reward"):
        learner.update()
    with pytest.raises(TrajectoryError, match="reference_logprobs of action tokens must be finite"):
        scores = np.full(bare.num_tokens, math.nan)
        dataclasses.replace(bare, reference_logprobs=scores)
    with pytest.raises(TrajectoryError, match="of one length"):
        dataclasses.replace(bare, reference_logprobs=np.zeros(1))
    learner.abandon()


def test_batch_statistics_are_final_once_they_were_used():
    learner = learner_of("reinforce_pp")
    lc.enqueue(learner, [one_group((0.0, 1.0))])
    learner.gradient()
    with pytest.raises(LearnerError, match="the step's advantages are final"):
        learner.open_group("late", (1, 2), 2)
    assert learner.update().policy_version == 1
    learner.open_group("next step", (1, 2), 2)
