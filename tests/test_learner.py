"""The streamed update is the batch-synchronous one: for every arrival order, path mix and pool
size.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.buckets import LaneItem, bucket_of, make_example, pad_lanes
from thundersync_jax.learner.compilation import CompileCounter
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.learner import OpenGroupsError
from thundersync_jax.learner.optimizer import learning_rate_schedule, make_optimizer
from thundersync_jax.learner.reference import reference_gradient
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.learner.statistics import LogprobGapError, NonFiniteGradientError
from thundersync_jax.losses.objectives import grpo
from thundersync_jax.trajectory import TrajectoryBuilder, TrajectoryError, TrajectoryTokens

MODEL = lc.tiny()


def score_of(settings, params, example, bucket, targets=None):
    """S of one example in the given bucket."""
    lanes = pad_lanes([[LaneItem(examples=(example,))]], 1, bucket).replace(num_lanes=None)
    lane = jax.tree.map(lambda x: x[0, 0], lanes)
    lane = lane if targets is None else lane.replace(targets=targets)
    return score_sum(settings, params, lane)


@functools.partial(jax.jit, static_argnums=0)
def score_sum(settings, params, lane):
    return score(settings, params, None, lane)[0][0]


def report_of(learner):
    """The report that an update would give, without one."""
    return learner._statistics.report(
        learner._schedule.groups, policy_version=0, is_empty=False, grad_norm=0.0, learning_rate=0.0
    )


@functools.cache
def made(pool_size: int):
    """A learner, and where it began."""
    learner = lc.make_learner(MODEL, pool_size=pool_size, tokens_per_step=64)
    return learner, lc.copied(learner.state)


def shared_learner(pool_size: int = 8):
    """A learner at the beginning, whose programs are compiled once."""
    learner, start = made(pool_size)
    learner.load(lc.copied(start))
    return learner


@pytest.mark.parametrize("pool_size", [0, pytest.param(1, marks=pytest.mark.slow), 8])
def test_streamed_gradient_equals_the_reference_for_every_arrival_order(pool_size):
    """Unequal lengths, failures, groups of equal reward and of failures only; 24 orders in all."""
    learner, cases = shared_learner(pool_size), lc.random_batch(0)
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    for order in range(8):
        lc.run_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        learner.abandon()


def test_streamed_gradient_equals_the_reference_in_float64():
    with jax.enable_x64(True):
        model, cases = lc.tiny("float64"), lc.random_batch(1)
        learner = lc.make_learner(model, pool_size=1, tokens_per_step=64)
        want = lc.reference(model, learner.state.params, cases, LearnerSection())
        for order in range(4):
            lc.run_events(learner, cases, np.random.default_rng(order))
            assert lc.rel_l2(learner.gradient(), want) <= 1e-12
            learner.abandon()


@functools.cache
def sharing_learner():
    """One bucket each, so that few programs compile; two held gradients, two shared prompts."""
    return lc.make_learner(
        MODEL,
        pool_size=1,
        tokens_per_step=128,
        buckets=(64,),
        held_gradients=2,
        prompt_buckets=(24,),
        prompt_slots=2,
        min_shared_tokens=2,
    )


def with_prompts(seed: int) -> list[lc.Case]:
    """Some prompts long enough to be shared, and more groups than slots."""
    rng = np.random.default_rng(seed)
    lengths = (1, 9, 20, 14, 5)
    prompts = [tuple(rng.integers(0, lc.VOCAB_SIZE, n).tolist()) for n in lengths]
    cases = lc.random_batch(seed, num_groups=5)
    return [dataclasses.replace(c, prompt=p) for c, p in zip(cases, prompts, strict=True)]


def test_shared_prompts_and_gradients_ahead_of_verdicts_change_nothing():
    learner, paths = sharing_learner(), set()
    for order in range(6):
        cases = with_prompts(order % 2)
        want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
        lc.run_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        paths |= {name for name, count in report_of(learner).paths.items() if count}
        learner.abandon()
    assert paths == {"direct", "stream", "ahead"}


def test_a_failed_verdict_after_ahead_touches_no_sum():
    """Every content comes before any verdict; the held gradients of failed attempts are dropped."""
    learner = sharing_learner()
    cases = [dataclasses.replace(c, rewards=(1.0, None, 0.0, None, 2.0)) for c in with_prompts(3)]
    groups = [learner.open_group(str(n), c.prompt, 5) for n, c in enumerate(cases)]
    for group, case in zip(groups, cases, strict=True):
        for index in (1, 3, 0, 2, 4):
            learner.add_trajectory(group, index, case.trajectories[index])
    assert learner.work() > 0
    assert [item.path for item in learner.take_work_log()].count("ahead") == 2
    for group, case in zip(groups, cases, strict=True):
        for index, reward in enumerate(case.rewards):
            if reward is None:
                learner.set_failed(group, index, "the verifier broke")
            else:
                learner.set_reward(group, index, reward)
            learner.work(max_steps=1)
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(learner._buffers._held))
    learner.abandon()


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_batch_in_any_order_ends_and_agrees(data):
    """No deadlock: every group closes with a pool of 0, 1 or 8; the paths sum up."""
    learner = shared_learner(data.draw(st.sampled_from([0, 1, 8])))
    seed = data.draw(st.integers(0, 10_000))
    cases = lc.random_batch(seed, num_groups=data.draw(st.integers(1, 5)), size=3)
    lc.run_events(learner, cases, np.random.default_rng(seed))
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    scale = math.sqrt(sum(float(np.sum(np.square(w))) for w in jax.tree.leaves(want)))
    got = learner.gradient()
    if scale == 0:
        assert all(not np.any(g) for g in jax.tree.leaves(got))
    else:
        assert lc.rel_l2(got, want) <= 1e-5
    paths = report_of(learner).paths
    assert sum(paths.values()) == sum(r is not None for c in cases for r in c.rewards)
    learner.abandon()


def test_reference_equals_finite_differences_of_the_objective():
    """The oracle itself: d/de sum_i A_i S_i / N along a random direction, float64."""
    with jax.enable_x64(True):
        model, cases = lc.tiny("float64"), lc.random_batch(3, num_groups=1, size=3)
        params = lc.init_params(model, 0)
        examples = [
            make_example(np.asarray(cases[0].prompt, np.int32), t, grpo())
            for t in cases[0].trajectories
        ]
        advantages = [0.5, -1.0, 0.25]
        gradient = reference_gradient(ScoreSettings(model=model), params, examples, advantages, 7.0)
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)

        def objective(step: float) -> float:
            moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
            total = 0.0
            for advantage, example in zip(advantages, examples, strict=True):
                value = score_of(ScoreSettings(model=model), moved, example, 64)
                total += advantage * float(value)
            return -total / 7.0

        slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
        along = sum(
            float(jnp.sum(g * d))
            for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
        )
        assert along == pytest.approx(slope, rel=1e-7)


def test_update_is_the_optimizer_step_on_the_reference_gradient():
    section = OptimizerSection(learning_rate=1e-2, clip_norm=0.05)
    learner, cases = (
        lc.make_learner(MODEL, optimizer=section, tokens_per_step=64),
        lc.random_batch(4),
    )
    params = jax.tree.map(jnp.array, learner.state.params)
    want = lc.reference(MODEL, params, cases, LearnerSection())
    lc.enqueue(learner, cases)
    streamed = learner.gradient()
    report = learner.update()
    optimizer = make_optimizer(section)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.asarray, streamed), optimizer.init(params), params
    )
    expected = optax.apply_updates(params, updates)
    assert lc.rel_l2(streamed, want) <= 1e-5
    assert lc.rel_l2(learner.state.params, expected) <= 1e-6
    assert report.policy_version == 1
    assert report.grad_norm == pytest.approx(float(optax.tree.norm(want)), rel=1e-5)
    rewards = [r for c in cases for r in c.rewards if r is not None]
    assert report.reward_mean == pytest.approx(np.mean(rewards))
    assert (report.num_failed, report.zero_variance_groups) == (7, 2)


def test_barrier_and_stream_give_the_same_update():
    cases = lc.random_batch(5)
    results = []
    for is_barrier in (True, False):
        learner = shared_learner()
        for step in range(3):
            if is_barrier:
                lc.enqueue(learner, cases)
            else:
                lc.run_events(learner, cases, np.random.default_rng(step))
            report = learner.update()
        assert report.policy_version == 3
        assert is_barrier == (report.paths["stream"] == 0)
        results.append(lc.copied(learner.state).params)
    assert lc.rel_l2(results[0], results[1]) <= 1e-5


def test_a_long_run_compiles_nothing_after_warm_up():
    """40 different lengths: the ladder alone decides the programs (LESSONS 21, 28)."""
    learner = lc.make_learner(MODEL, tokens_per_step=64)
    num_programs = learner.warm_up()
    assert num_programs == 3 + 6  # folds; bind, close, update, gather, zeros
    counter = CompileCounter()
    counter.start()
    rng = np.random.default_rng(0)
    for turns in range(1, 9):
        cases = [
            lc.Case(
                prompt=tuple(range(1, 1 + turns)),
                trajectories=tuple(lc.random_tokens(rng, turns) for _ in range(5)),
                rewards=(1.0, 0.0, 0.5, None, 2.0),
            )
        ]
        lc.run_events(learner, cases, rng)
        learner.update()
    counter.close()
    assert counter.count == 0


def test_accumulators_are_donated_and_zero_after_the_update():
    learner = shared_learner()
    before = learner._buffers.batch
    lc.enqueue(learner, lc.random_batch(0))
    learner.update()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert all(
        not np.any(leaf)
        for leaf in jax.tree.leaves((learner._buffers.batch, learner._buffers._pairs._pairs))
    )


# -- what a step may consist of
# ---------------------------------------------------------------------


def one_group(rewards, *, masked: bool = False, length: int = 3):
    builder = TrajectoryBuilder()
    if masked:
        builder.append_observation([3] * length)
    else:
        builder.append_action([3] * length, [-2.0] * length, [0] * length)
    return [lc.Case(prompt=(1, 2), trajectories=(builder.build(),) * len(rewards), rewards=rewards)]


@pytest.mark.parametrize(
    "cases",
    [
        one_group((0.5, 0.5, 0.5)),  # LESSONS 2: every group was filtered
        one_group((None, None, None)),
        one_group((1.0, 0.0, 2.0), masked=True),  # LESSONS 7: nothing to train on
        one_group((1.0, None, None)),
        [],
    ],
)
def test_an_empty_step_changes_nothing(cases):
    learner = shared_learner()
    lc.enqueue(learner, lc.random_batch(0))
    learner.update()  # Adam has moments now: a zero gradient would move the weights
    before = lc.copy_state(learner)
    lc.enqueue(learner, cases)
    report = learner.update()
    assert report.is_empty
    assert (report.policy_version, report.grad_norm, report.learning_rate) == (1, 0.0, 0.0)
    for old, new in zip(before, lc.copy_state(learner), strict=True):
        np.testing.assert_array_equal(old, new)


def test_equal_rewards_that_were_streamed_leave_no_residual():
    learner = shared_learner(1)
    group = learner.open_group("t", (1, 2), 2)
    tokens = lc.random_tokens(np.random.default_rng(0), 3)
    for index in range(2):
        learner.add_trajectory(group, index, tokens)
        learner.set_reward(group, index, 0.1)
        learner.work()
    assert learner.update().is_empty
    assert all(
        not np.any(leaf)
        for leaf in jax.tree.leaves((learner._buffers.batch, learner._buffers._pairs._pairs))
    )


def test_a_failed_attempt_leaves_the_moments_and_the_sum():
    """LESSONS 3 and 10: [1, 3, 2, failed] trains as [1, 3, 2]; the rest trains."""
    rng = np.random.default_rng(0)
    trajectories = tuple(lc.random_tokens(rng, 2) for _ in range(4))
    learner = shared_learner(8)
    gradients = []
    for rewards in ((1.0, 3.0, 2.0, None), (1.0, 3.0, 2.0)):
        lc.enqueue(
            learner,
            [lc.Case(prompt=(1,), trajectories=trajectories[: len(rewards)], rewards=rewards)],
        )
        gradients.append(learner.gradient())
        learner.abandon()
    assert lc.rel_l2(*gradients) == 0.0


def test_token_mean_is_the_mean_over_all_tokens_that_arrived():
    """LESSONS 5 and 6: lengths 2 and 30 are divided once, by 32, whatever the buckets and lanes."""
    learner = shared_learner()
    cases = one_group((1.0, 0.0), length=2)
    long = one_group((1.0, 0.0), length=30)[0].trajectories[0]
    cases = [dataclasses.replace(cases[0], trajectories=(cases[0].trajectories[0], long))]
    lc.enqueue(learner, cases)
    assert learner._denominators() == [32]
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection())
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    assert learner.update().action_tokens == 32


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"objective_options": {"normalizer": "trajectory_mean"}}, marks=pytest.mark.slow
        ),
        {"objective_options": {"tis_cap": 1.5}},
        {"objective": "dr_grpo", "objective_options": {"normalizer": "token_mean"}},
    ],
)
def test_options_agree_with_the_reference(changes):
    learner, cases = (
        lc.make_learner(MODEL, buckets=(64,), tokens_per_step=64, pool_size=1, **changes),
        lc.random_batch(6),
    )
    want = lc.reference(MODEL, learner.state.params, cases, LearnerSection(**changes))
    lc.run_events(learner, cases, np.random.default_rng(0))
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5


def test_three_calls_equal_one_call():
    """LESSONS 4: lanes of one trajectory and of all of them accumulate the same sum."""
    cases = lc.random_batch(7)
    gradients = []
    for tokens_per_step in (64, 512):
        learner = lc.make_learner(MODEL, buckets=(64,), tokens_per_step=tokens_per_step)
        lc.enqueue(learner, cases)
        gradients.append(learner.gradient())
    assert lc.rel_l2(*gradients) <= 1e-6


def test_observation_targets_do_not_reach_the_gradient():
    """LESSONS 15: another tool output at the very end of what is read changes no masked target's
    gradient.
    """
    builder = TrajectoryBuilder()
    builder.append_action([3, 4], [-1.0, -1.0], [0, 0])
    builder.append_observation([5, 6, 7])
    kept = builder.build()
    example = make_example(np.asarray([1, 2], np.int32), kept, grpo())
    assert example.targets.tolist() == [2, 3, 4]  # trimmed after the last action token
    assert example.weights.tolist() == [0.0, 1.0, 1.0]
    settings_ = ScoreSettings(model=MODEL)
    gradient = jax.jit(jax.grad(lambda p, targets: score_of(settings_, p, example, 3, targets)))
    params = lc.init_params(MODEL, 0)
    perturbed = np.where(example.weights == 0, 9, example.targets)
    first, second = gradient(params, example.targets), gradient(params, perturbed)
    assert lc.rel_l2(first, second) == 0.0


def test_padding_and_bucket_do_not_change_the_example():
    example = make_example(
        np.asarray([1], np.int32), lc.random_tokens(np.random.default_rng(0), 2), grpo()
    )
    settings_, params = ScoreSettings(model=MODEL), lc.init_params(MODEL, 0)
    values = [score_of(settings_, params, example, bucket) for bucket in (16, 64)]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)
    assert bucket_of(16, (16, 32)) == 16
    assert bucket_of(17, (16, 32)) == 32
    with pytest.raises(ValueError, match="33 positions exceed the longest bucket 32"):
        bucket_of(33, (16, 32))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_schedule_counts_applied_updates_and_its_first_step_moves(schedule: str):
    section = OptimizerSection(
        learning_rate=1.0, schedule=schedule, warmup_steps=3, decay_steps=1_000_000
    )
    rates = [float(learning_rate_schedule(section)(i)) for i in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


# -- bad input: named, and nothing lost
# -------------------------------------------------------------


def bad_tokens(ids):
    n = len(ids)
    return TrajectoryTokens(
        token_ids=ids,
        action_mask=np.ones(n, bool),
        behavior_logprobs=np.full(n, -1.0),
        policy_versions=np.zeros(n),
    )


def test_bad_input_is_refused_by_name_and_nothing_changes():
    learner = shared_learner(8)
    group = learner.open_group("task-a", (1, 2), 2)
    tokens = lc.random_tokens(np.random.default_rng(0), 2)
    with pytest.raises(
        LearnerError, match=r"group \d+ \(task 'task-a'\) index 0: token ids \[99\]"
    ):
        learner.add_trajectory(group, 0, bad_tokens([99]))
    with pytest.raises(LearnerError, match="exceed the longest bucket 64"):
        learner.add_trajectory(group, 0, bad_tokens([1] * 64))
    with pytest.raises(LearnerError, match="waiting for content, so this call is out of order"):
        learner.set_reward(group, 0, 1.0)
    learner.add_trajectory(group, 0, tokens)
    for reward in (math.nan, math.inf, True, "1"):  # LESSONS 11
        with pytest.raises(TrajectoryError, match="index 0: a reward must be"):
            learner.set_reward(group, 0, reward)
    learner.set_reward(group, 0, 1.0)
    for second in (
        lambda: learner.set_reward(group, 0, 1.0),
        lambda: learner.set_failed(group, 0, "x"),
    ):
        with pytest.raises(LearnerError, match="exactly one of a reward"):
            second()
    with pytest.raises(LearnerError, match="has indices 0 to 1, got 2"):
        learner.set_failed(group, 2, "x")
    with pytest.raises(LearnerError, match="group 999 is not open"):
        learner.set_failed(999, 0, "x")
    with pytest.raises(OpenGroupsError, match=r"1 are missing: .*index 1: waiting for content"):
        learner.update()
    learner.set_failed(group, 1, "sandbox died")
    report = learner.update()
    assert (report.num_trajectories, report.num_failed, report.is_empty) == (2, 1, True)


def test_bad_groups_are_refused():
    learner = shared_learner(8)
    with pytest.raises(LearnerError, match="group_size 1: expected at least 2"):
        learner.open_group("t", (1,), 1)  # LESSONS 9
    with pytest.raises(LearnerError, match=r"group_size 2\.5: expected at least 2"):
        learner.open_group("t", (1,), 2.5)
    with pytest.raises(LearnerError, match="at least one token"):
        learner.open_group("t", (), 2)
    with pytest.raises(LearnerError, match="prompt of 65 tokens exceeds"):
        learner.open_group("t", (1,) * 65, 2)


def test_a_non_finite_gradient_names_its_trajectory_and_never_reaches_the_optimizer():
    learner = shared_learner()
    params = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(jnp.nan), learner.state.params)
    learner.load(dataclasses.replace(learner.state, params=params))
    before = lc.copy_state(learner)
    lc.enqueue(learner, one_group((1.0, 0.0)))
    with pytest.raises(NonFiniteGradientError, match=r"task 'task-0'\) index 0"):
        learner.update()
    learner.abandon()
    for old, new in zip(before, lc.copy_state(learner), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_sampler_of_other_weights_stops_the_run_unless_it_is_weighted():
    for tis_cap in (0.0, 2.0):
        learner = lc.make_learner(
            MODEL, buckets=(64,), max_logprob_gap=0.5, objective_options={"tis_cap": tis_cap}
        )
        builder = TrajectoryBuilder()
        builder.append_action([3, 4], [-9.0, -2.5], [0, 0])
        lc.enqueue(
            learner, [lc.Case(prompt=(1,), trajectories=(builder.build(),) * 2, rewards=(1.0, 0.0))]
        )
        if tis_cap:
            assert learner.update().logprob_gap_max > 5
        else:
            with pytest.raises(
                LogprobGapError, match=r"index \d: sampler and learner differ by [67]"
            ):
                learner.update()
