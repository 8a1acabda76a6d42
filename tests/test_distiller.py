"""Distillation by turns: one gradient for every order of arrival, number of caches and policy."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import optax
import pytest

from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.benchmarks.turn_arrivals import open_groups, run_events
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.compilation import CompileCounter
from thundersync_jax.learner.distiller import Distiller, GrowingTrajectoriesError
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.program_names import distillation_program_names
from thundersync_jax.learner.statistics import LogprobGapError, NonFiniteGradientError
from thundersync_jax.trajectory import ScoredTurn, TrajectoryError

pytestmark = pytest.mark.optimized

TESTS = Path(__file__).parent
MODEL = lc.tiny()
COMBINATIONS = [
    ("idle", 3),
    ("never", 3),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in (("idle", 0), ("always", 3))),
]


@functools.cache
def shared(stream_turns: str, num_caches: int) -> Distiller:
    return oc.make_distiller(MODEL, stream_turns=stream_turns, num_caches=num_caches)


def add_turns(distiller: Distiller, group: int, case: oc.TurnCase) -> None:
    for turn in case.turns:
        distiller.add_turn(group, 0, turn)


def descent(distiller: Distiller, cases: list[oc.TurnCase]) -> Any:
    """What the distiller's gradient must be."""
    total = oc.plain_gradient(MODEL, distiller.state.params, cases)
    return jax.tree.map(lambda g: -g / oc.num_scored(cases), total)


@pytest.mark.parametrize(("stream_turns", "num_caches"), COMBINATIONS)
def test_every_order_gives_the_gradient_of_whole_trajectories(stream_turns, num_caches):
    distiller = shared(stream_turns, num_caches)
    cases = [oc.random_case(seed) for seed in range(5)]
    want = descent(distiller, cases)
    for order in range(4):
        run_events(distiller, cases, np.random.default_rng(order))
        assert lc.rel_l2(distiller.gradient(), want) <= 1e-5
        distiller.abandon()


@pytest.mark.slow
def test_every_order_gives_the_same_gradient_in_float64():
    with jax.enable_x64(True):
        model = lc.tiny("float64")
        distiller = oc.make_distiller(model, buckets=(8, oc.LENGTH), num_caches=2, normalizer="sum")
        cases = [oc.random_case(seed) for seed in range(3)]
        total = oc.plain_gradient(model, distiller.state.params, cases)
        want = jax.tree.map(jnp.negative, total)
        for order in range(3):
            run_events(distiller, cases, np.random.default_rng(order))
            assert lc.rel_l2(distiller.gradient(), want) <= 1e-11
            distiller.abandon()


def test_without_replay_the_theorem_fails(monkeypatch):
    """The same batch with replays left out: far outside the tolerance."""
    distiller = shared("always", 3)
    cases = [oc.random_case(seed) for seed in (3, 7, 9)]
    want = descent(distiller, cases)
    buffers, run = distiller._buffers, distiller._buffers.run

    def without_replay(params: Any, work: Any) -> Any:
        return None if work.kind.value == "turn_replay" else run(params, work)

    monkeypatch.setattr(buffers, "run", without_replay)
    groups = open_groups(distiller, cases)
    for group, case in zip(groups, cases, strict=True):
        for turn in case.turns:
            distiller.add_turn(group, 0, turn)
            distiller.work()
        distiller.add_trajectory(group, 0, case.tokens)
    assert lc.rel_l2(distiller.gradient(), want) > 0.05
    distiller.abandon()


def test_a_failed_attempt_is_trained_on_its_scored_turns():
    """Whether they were streamed before or not, and whatever it read after the last of them."""
    for stream_turns, num_caches in (("always", 3), ("never", 3)):
        distiller = shared(stream_turns, num_caches)
        cases = [oc.random_case(3), oc.random_case(7)]
        for group, case in zip(open_groups(distiller, cases), cases, strict=True):
            add_turns(distiller, group, case)
            distiller.work()
            distiller.set_failed(group, 0, "the sandbox died")
        assert lc.rel_l2(distiller.gradient(), descent(distiller, cases)) <= 1e-5
        report = distiller.update()
        assert (report.num_failed, report.num_trajectories) == (2, 2)
        assert math.isnan(report.reward_mean)


def test_the_last_turn_is_never_replayed_and_waiting_turns_run_once_more():
    rng = np.random.default_rng(0)
    turns = [oc.turn(rng, 1, 2, 0) for _ in range(4)]  # 3 positions each; the first one more
    case = oc.TurnCase(prompt=(1, 2), turns=tuple(turns))
    seen, flops = {}, {}
    for stream_turns, is_eager in (("always", True), ("always", False), ("never", True)):
        distiller = shared(stream_turns, 3)
        distiller.take_work_log()
        (group,) = open_groups(distiller, [case])
        for number, turn in enumerate(case.turns):
            distiller.add_turn(group, 0, turn)
            if is_eager or number == 0:
                distiller.work()
        distiller.add_trajectory(group, 0, case.tokens)
        distiller.work()
        kinds = [item.path for item in distiller.take_work_log()]
        report = distiller.update()
        seen[stream_turns, is_eager] = (kinds, report.replayed_tokens, dict(report.paths))
        flops[stream_turns, is_eager] = report.replayed_flops
        assert report.num_by_turns == report.paths["turns"]
    by_turns, whole = {"turns": 1, "whole": 0}, {"turns": 0, "whole": 1}
    stream, forward, close, replay = "turn_stream", "turn_forward", "turn_close", "turn_replay"
    assert seen == {
        ("always", True): ([stream] * 4 + [replay] * 3, 10, by_turns),
        ("always", False): ([stream] + [forward] * 2 + [close] * 3 + [replay], 10, by_turns),
        ("never", True): (["turn_whole"], 0, whole),
    }
    first, second, third = (MODEL.forward_flops(*sizes) for sizes in ((4, 0), (3, 4), (3, 7)))
    assert flops == {
        ("always", True): 3 * (first + second + third),
        ("always", False): 3 * first + second + third,
        ("never", True): 0,
    }


def test_the_tail_is_one_trajectory_whatever_the_batch():
    """All others are done when the last scores come: what is left is its own segments, once each,
    and the update.
    """
    tails = [tail_of(num_others) for num_others in (7, 15, 63)]
    assert tails[0] == tails[1] == tails[2]


def test_unscored_turns_that_come_one_by_one_or_at_once_have_the_same_bits():
    """They are run when a scored turn follows, each by itself, however long they waited."""
    rng = np.random.default_rng(5)
    turns = [oc.turn(rng, 2, 3, 1, is_scored=number in (0, 4)) for number in range(5)]
    case = oc.TurnCase(prompt=(1, 2), turns=tuple(turns))
    gradients, distiller = [], shared("always", 3)
    for is_eager in (True, False):
        (group,) = open_groups(distiller, [case])
        for number, turn in enumerate(case.turns):
            distiller.add_turn(group, 0, turn)
            if is_eager or number in (0, 4):
                distiller.work()
        distiller.add_trajectory(group, 0, case.tokens)
        gradients.append(distiller.gradient())
        distiller.abandon()
    for one, two in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_array_equal(one, two)
    assert lc.rel_l2(gradients[0], descent(distiller, [case])) <= 1e-5


def tail_of(num_others: int) -> list[str]:
    """The calls after the last score of a step, whose last trajectory is always the same."""
    distiller = shared("idle", 3)
    cases = [*(oc.random_case(8 + seed) for seed in range(num_others)), oc.random_case(7)]
    groups = open_groups(distiller, cases)
    for group, case in zip(groups[:-1], cases[:-1], strict=True):
        add_turns(distiller, group, case)
        distiller.add_trajectory(group, 0, case.tokens)
    for turn in cases[-1].turns[:-1]:
        distiller.add_turn(groups[-1], 0, turn)
    distiller.work()
    distiller.take_work_log()
    last = cases[-1].turns[-1]
    distiller.add_turn(groups[-1], 0, last)
    distiller.add_trajectory(groups[-1], 0, cases[-1].tokens)
    report = distiller.update()
    work = distiller.take_work_log()
    assert all(item.num_trajectories == 1 for item in work[:-1]) and work[-1].path == "update"
    kinds = [item.path for item in work[:-1]]
    assert len(kinds) <= len(cases[-1].turns) and set(kinds) <= {"turn_close", "turn_replay"}
    assert report.action_tokens == oc.num_scored(cases)
    return kinds


def test_update_is_the_optimizer_step_on_that_gradient():
    section = OptimizerSection(learning_rate=1e-2, clip_norm=0.05)
    distiller = oc.make_distiller(MODEL, optimizer=section, num_caches=3)
    cases = [oc.random_case(seed) for seed in range(3)]
    params = jax.tree.map(jnp.array, distiller.state.params)
    run_events(distiller, cases, np.random.default_rng(0))
    gradient = distiller.gradient()
    report = distiller.update()
    optimizer = make_optimizer(section)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.asarray, gradient), optimizer.init(params), params
    )
    expected = optax.apply_updates(params, updates)
    assert lc.rel_l2(distiller.state.params, expected) <= 1e-6
    assert (report.policy_version, report.is_empty) == (1, False)
    gains = [oc.targets(case)[2] for case in cases]
    assert report.teacher_kl_mean == pytest.approx(-np.concatenate(gains).mean())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(distiller._buffers.batch))


def test_a_step_without_a_scored_turn_changes_nothing():
    distiller = oc.make_distiller(MODEL, num_caches=3)
    before = [np.array(x) for x in jax.tree.leaves((distiller.state.params,))]
    rng = np.random.default_rng(0)
    case = oc.TurnCase(prompt=(1,), turns=(oc.turn(rng, 1, 2, 0, is_scored=False),))
    (group,) = open_groups(distiller, [case])
    add_turns(distiller, group, case)
    distiller.set_failed(group, 0, "the teacher died")
    report = distiller.update()
    assert (report.is_empty, report.policy_version, report.grad_norm) == (True, 0, 0.0)
    for one, two in zip(before, jax.tree.leaves((distiller.state.params,)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_observations_have_no_gradient_and_their_scores_are_not_read():
    """LESSONS 15: not-a-number as the teacher's score of what was read."""
    distiller, case = shared("always", 3), oc.random_case(3)
    turns = []
    for turn in case.turns:
        scores = None
        if turn.teacher_logprobs is not None:
            scores = np.where(turn.tokens.action_mask, turn.teacher_logprobs, np.nan)
        turns.append(ScoredTurn(tokens=turn.tokens, teacher_logprobs=scores))
    other = oc.TurnCase(prompt=case.prompt, turns=tuple(turns))
    run_events(distiller, [other], np.random.default_rng(0))
    assert lc.rel_l2(distiller.gradient(), descent(distiller, [case])) <= 1e-5
    distiller.abandon()


def test_a_long_run_compiles_nothing_after_warm_up():
    distiller = oc.make_distiller(MODEL, num_caches=3)
    num_programs = distiller.warm_up()
    counter = CompileCounter()
    counter.start()
    for seed in range(6):
        run_events(distiller, [oc.random_case(seed)], np.random.default_rng(seed))
        distiller.update()
    counter.close()
    assert (num_programs, counter.count) == (3 + 1 + 1 + 3 * 2, 0)
    config = LearnerSection()
    names = distillation_program_names(config.buckets, config.buckets[-1:], has_caches=True)
    assert len(names) <= 32


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda s: s[:-1], r"the teacher gave scores of shape \(3,\) for a turn of 4"),
        (lambda s: np.where(s < 0, np.nan, s), r"the teacher's log-prob.*hold \[nan"),
        (lambda s: np.full_like(s, -np.inf), r"hold \[-inf.*finite numbers of at most 0"),
        (lambda s: -s, r"expected finite numbers of at most 0"),
    ],
)
def test_scores_that_are_none_are_refused_when_they_are_made(scores, message):
    turn = oc.turn(np.random.default_rng(0), 2, 2, 0)
    assert turn.teacher_logprobs is not None
    with pytest.raises(TrajectoryError, match=message):
        ScoredTurn(tokens=turn.tokens, teacher_logprobs=scores(turn.teacher_logprobs))


def test_calls_out_of_order_are_refused_by_name():
    distiller, turn = shared("idle", 3), oc.turn(np.random.default_rng(0), 2, 2, 0)
    group = distiller.open_group("task", (1, 2), 2)
    with pytest.raises(LearnerError, match=r"index 1.*hold 0 tokens and its content 4"):
        distiller.add_trajectory(group, 1, turn.tokens)
    distiller.add_turn(group, 0, turn)
    with pytest.raises(GrowingTrajectoriesError, match=r"2 still grow: group \d+ \(task 'task'\)"):
        distiller.update()
    distiller.add_trajectory(group, 0, turn.tokens)
    with pytest.raises(LearnerError, match="waiting for a reward: no turn can follow"):
        distiller.add_turn(group, 0, turn)
    with pytest.raises(LearnerError, match="indices 0 to 1, got 2"):
        distiller.add_turn(group, 2, turn)
    with pytest.raises(
        LearnerError, match=r"42 tokens exceed the longest bucket 40 .*and model.max_context"
    ):
        long = oc.turn(np.random.default_rng(0), 30, 10, 0)
        distiller.add_turn(group, 1, long)
    distiller.abandon()


def test_a_gap_between_sampler_and_learner_is_refused_unless_it_is_weighted():
    for cap in (0.0, 2.0):
        distiller = Distiller(
            LearnerSection(buckets=(oc.LENGTH,), tokens_per_step=80, max_logprob_gap=1e-3),
            OpdSection(ratio_cap=cap, stream_turns="never"),
            OptimizerSection(),
            MODEL,
            lc.init_params(MODEL, 0),
        )
        run_events(distiller, [oc.random_case(3)], np.random.default_rng(0))
        if cap:
            assert distiller.update().policy_version == 1
        else:
            with pytest.raises(LogprobGapError, match=r"index 0: sampler and .* opd\.ratio_cap"):
                distiller.update()


def test_a_gradient_that_is_not_finite_names_its_trajectory_and_updates_nothing():
    params = lc.init_params(MODEL, 0)
    params["embedding"] = params["embedding"].at[5].set(jnp.nan)
    distiller = Distiller(
        LearnerSection(buckets=(oc.LENGTH,), tokens_per_step=80, max_logprob_gap=100.0),
        OpdSection(num_caches=3),
        OptimizerSection(),
        MODEL,
        params,
    )
    rng = np.random.default_rng(0)
    groups = [distiller.open_group(name, (prompt,), 1) for name, prompt in (("a", 5), ("b", 1))]
    turn = oc.turn(rng, 0, 2, 0)
    tokens = oc.joined([turn.tokens])
    tokens.token_ids[:] = [1, 2]
    chosen = ScoredTurn(tokens=tokens, teacher_logprobs=turn.teacher_logprobs)
    for group in groups:
        distiller.add_turn(group, 0, chosen)
        distiller.work()
        distiller.add_trajectory(group, 0, tokens)
    with pytest.raises(NonFiniteGradientError, match=r"not finite for group 0 \(task 'a'\)"):
        distiller.update()


@pytest.mark.slow
def test_on_a_mesh_the_gradient_is_the_same_and_replicas_do_not_communicate():
    """Two replicas of four devices; caches for some of the trajectories, partly in the host."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "turn_mesh_run.py"), "2", "2", "2"],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=TESTS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert max(found["distances"]) <= 1e-5
    assert found["paths"]["turns"] > 0 < found["num_moved"]
    assert len(found["programs"]) == 7 + 2
    for name, report in found["programs"].items():
        assert report == {"crosses_data": 0, "is_in_place": True}, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_turns": "sometimes"}, r"opd\.stream_turns = 'sometimes'"),
        ({"num_caches": -1}, r"opd\.num_caches = -1: expected 0 or more"),
        ({"temperature": 0.0}, r"opd\.temperature = 0\.0: expected a number from"),
        ({"normalizer": "mean"}, r"opd\.normalizer = 'mean'"),
        ({"ratio_cap": math.inf}, r"opd\.ratio_cap = inf: expected a finite"),
        ({"prefix_buckets": (8, 4)}, r"opd\.prefix_buckets = \(8, 4\): expected ascending"),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        OpdSection(**changes)
