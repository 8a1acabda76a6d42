"""Turns that run ahead of their content change nothing, and leave only the last one for its end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.config import RunConfig
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.learner.turn_schedule import SegmentKind
from thundersync_jax.losses.objective import Objective, Streams, Tokens
from thundersync_jax.losses.objective_check import ObjectiveError, check_turns
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.trajectory import ScoredTurn, TrajectoryTokens

MODEL = lc.tiny()
LINEAR: dict[str, dict[str, Any]] = {
    "grpo": {"normalizer": "trajectory_mean"},
    "dr_grpo": {"normalizer_tokens": 32},
    "rloo": {},
    "dapo": {"ratio": "learner"},
    "gspo": {"ratio": "learner"},
    "ppo": {"ratio": "learner", "normalizer": "sum"},
    "cispo": {"normalizer": "group_token_mean"},
    "reinforce_pp": {"tis_cap": 1.5},
    "tis_reinforce": {"cap": 1.5, "normalizer": "trajectory_mean"},
}


def make(model: Any = MODEL, **changes: Any) -> Learner:
    """One bucket, so that few programs compile."""
    sizes = {"pool_size": 1, "held_gradients": 2, "num_turn_caches": 2}
    options = {"stream_turns": "idle", "buckets": (64,), "tokens_per_step": 128, **sizes, **changes}
    return lc.make_learner(model, **options)


@functools.cache
def made() -> Learner:
    return make(objective_options=LINEAR["grpo"])


@pytest.fixture
def learner() -> Iterator[Learner]:
    """One for all, empty."""
    yield made()
    made().abandon()


def section(learner: Learner) -> LearnerSection:
    return learner._config


def report_of(learner: Learner) -> Any:
    """The report that an update would give, without one."""
    return learner._report(is_empty=False, grad_norm=0.0, learning_rate=0.0)


def worst(learner: Learner, model: Any, num_orders: int) -> tuple[float, int]:
    """The worst distance from the reference, and how many trajectories ran by turns."""
    cases, distances, num_by_turns = lc.random_batch(0), [], 0
    want = lc.reference(model, learner.state.params, cases, section(learner))
    for order in range(num_orders):
        lc.run_turn_events(learner, cases, np.random.default_rng(order))
        distances.append(lc.rel_l2(learner.gradient(), want))
        report = report_of(learner)
        num_by_turns += report.num_by_turns
        assert sum(report.paths.values()) == report.num_trajectories - report.num_failed
        learner.abandon()
    return max(distances), num_by_turns


def test_the_gradient_is_the_reference_whatever_ran_ahead(learner):
    """With a length normaliser, which no turn knows."""
    distance, num_by_turns = worst(learner, MODEL, 12)
    assert distance <= 1e-5
    assert num_by_turns >= 12


@pytest.mark.slow
def test_the_gradient_is_the_reference_in_float64():
    """With weights of the sampler."""
    with jax.enable_x64(True):
        model = lc.tiny("float64")
        objective = "tis_reinforce"
        options = {"objective": objective, "objective_options": LINEAR[objective]}
        learner = make(model, held_gradients=1, num_turn_caches=1, **options)
        distance, num_by_turns = worst(learner, model, 4)
        assert distance <= 1e-11
        assert num_by_turns >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEAR)
def test_every_linear_objective_streams_by_turns(name):
    learner = make(objective=name, objective_options=LINEAR[name])
    distance, num_by_turns = worst(learner, MODEL, 8)
    assert distance <= 1e-5
    assert num_by_turns >= 8


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(0, 4, 4), (1, 1, 4), (8, 4, 1), (8, 1, 1), (1, 4, 0)], ids=str)
def test_pools_of_any_size_give_the_same_gradient(sizes):
    pool_size, held_gradients, num_turn_caches = sizes
    learner = make(
        pool_size=pool_size, held_gradients=held_gradients, num_turn_caches=num_turn_caches
    )
    distance, num_by_turns = worst(learner, MODEL, 8)
    assert distance <= 1e-5
    assert (num_by_turns > 0) == (num_turn_caches > 0)


@pytest.mark.slow
def test_groups_that_share_their_prompt_mix_with_turns():
    """Trajectories by turns run the prompt themselves; the others of their group share it."""
    learner = make(prompt_buckets=(24,), prompt_slots=2, min_shared_tokens=2)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, lc.VOCAB_SIZE, n).tolist()) for n in (1, 9, 20, 14)]
    cases = [
        dataclasses.replace(case, prompt=prompt)
        for case, prompt in zip(lc.random_batch(0), prompts, strict=True)
    ]
    want = lc.reference(MODEL, learner.state.params, cases, section(learner))
    paths: set[str] = set()
    num_by_turns = 0
    for order in range(6):
        lc.run_turn_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        report = report_of(learner)
        num_by_turns += report.num_by_turns
        paths |= {name for name, count in report.paths.items() if count}
        learner.abandon()
    assert paths == {"direct", "stream", "ahead"}
    assert num_by_turns > 0


def grow(learner: Learner, tokens: TrajectoryTokens, *, num_turns: int | None = None) -> int:
    """A group of two whose first trajectory has some of its turns; every one ran."""
    group = learner.open_group("a", (1, 2), 2)
    for turn in lc.turns_of(tokens)[:num_turns]:
        learner.add_turn(group, 0, turn)
        learner.work()
    return group


def recorded(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[SegmentKind, int]]:
    """The kinds and positions of the calls of turns from now on."""
    calls: list[tuple[SegmentKind, int]] = []
    run: Callable[..., Any] = learner._buffers.run_turns

    def run_turns(params: Any, work: Any) -> Any:
        calls.append((work.kind, work.num_tokens))
        return run(params, work)

    monkeypatch.setattr(learner._buffers, "run_turns", run_turns)
    return calls


@pytest.mark.parametrize("num_before", [4, 5])
def test_only_the_last_turn_is_left_when_the_content_is_final(learner, monkeypatch, num_before):
    """What sees the output head then is the last segment, or nothing; the rest are replays."""
    rng = np.random.default_rng(3)
    tokens = lc.random_tokens(rng, 5)
    other = lc.random_tokens(rng, 1)
    turns = lc.turns_of(tokens)
    group = grow(learner, tokens, num_turns=num_before)
    calls = recorded(learner, monkeypatch)
    for turn in turns[num_before:]:
        learner.add_turn(group, 0, turn)
    learner.add_trajectory(group, 0, tokens)
    learner.work()
    heads = [positions for kind, positions in calls if kind is SegmentKind.CLOSE]
    last = int(np.flatnonzero(tokens.action_mask)[-1]) - int(
        np.flatnonzero(turns[-2].tokens.action_mask)[-1]
        + sum(turn.tokens.num_tokens for turn in turns[:-2])
    )
    assert heads == ([] if num_before == 5 else [last])
    num_before_last = len((1, 2)) + tokens.num_tokens - 1 - last
    num_tail = tokens.num_tokens - 1 - int(np.flatnonzero(tokens.action_mask)[-1])
    replayed = [positions for kind, positions in calls if kind is SegmentKind.REPLAY]
    assert sum(replayed) == num_before_last - num_tail and len(replayed) == 4
    assert {kind for kind, _ in calls} <= {SegmentKind.CLOSE, SegmentKind.REPLAY}
    learner.add_trajectory(group, 1, other)
    for index, reward in enumerate((1.0, 0.0)):
        learner.set_reward(group, index, reward)
    case = lc.Case(prompt=(1, 2), trajectories=(tokens, other), rewards=(1.0, 0.0))
    want = lc.reference(MODEL, learner.state.params, [case], section(learner))
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    assert report_of(learner).replayed_tokens == sum(replayed)


def test_without_replays_the_theorem_fails(learner, monkeypatch):
    """Holding the keys and values of earlier turns constant is not the gradient."""
    rng = np.random.default_rng(3)
    contents = (lc.random_tokens(rng, 5), lc.random_tokens(rng, 1))
    case = lc.Case(prompt=(1, 2), trajectories=contents, rewards=(1.0, 0.0))
    want = lc.reference(MODEL, learner.state.params, [case], section(learner))
    run: Callable[..., Any] = learner._buffers.run_turns

    def without_replays(params: Any, work: Any) -> Any:
        return None if work.kind is SegmentKind.REPLAY else run(params, work)

    monkeypatch.setattr(learner._buffers, "run_turns", without_replays)
    group = grow(learner, contents[0])
    for index, content in enumerate(contents):
        learner.add_trajectory(group, index, content)
        learner.set_reward(group, index, case.rewards[index])
    assert lc.rel_l2(learner.gradient(), want) > 1e-2


@pytest.mark.parametrize("when", ["growing", "content", "closed"])
def test_a_failed_attempt_is_dropped_and_touches_no_sum(learner, when):
    """Its cache and its buffer serve the next one."""
    tokens = lc.random_tokens(np.random.default_rng(5), 4)
    for _ in range(3):  # more than there are caches
        group = grow(learner, tokens)
        assert any(np.any(leaf) for leaf in jax.tree.leaves(learner._buffers._held))
        if when != "growing":
            learner.add_trajectory(group, 0, tokens)
        if when == "closed":
            learner.work()
        learner.set_failed(group, 0, "the sandbox died")
        learner.set_failed(group, 1, "the sandbox died")
        learner.work()
    for leaf in jax.tree.leaves((learner._buffers.sums, learner._buffers._held)):
        assert not np.any(leaf)
    report = learner.update()
    assert (report.is_empty, report.num_failed, report.num_by_turns) == (True, 6, 0)


def test_a_turn_that_was_postponed_when_its_attempt_failed_is_dropped_too(learner):
    """It runs in its own cache and buffer, before anybody else can take them."""
    tokens = lc.random_tokens(np.random.default_rng(5), 4)
    group = grow(learner, tokens, num_turns=2)
    learner.add_turn(group, 0, lc.turns_of(tokens)[2])
    assert learner.work(max_call_s=0.0) == 0 and learner.has_postponed
    learner.set_failed(group, 0, "the sandbox died")
    learner.set_failed(group, 1, "the sandbox died")
    case = lc.random_batch(1, num_groups=1)[0]
    want = lc.reference(MODEL, learner.state.params, [case], section(learner))
    lc.run_turn_events(learner, [case], np.random.default_rng(0))
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(learner._buffers._held))


def test_a_group_without_an_advantage_is_dropped_before_its_replays(learner, monkeypatch):
    tokens = lc.random_tokens(np.random.default_rng(5), 4)
    group = grow(learner, tokens)
    calls = recorded(learner, monkeypatch)
    for index in range(2):
        learner.add_trajectory(group, index, tokens)
    for index in range(2):
        learner.set_reward(group, index, 0.5)
    report = learner.update()
    assert report.is_empty and not calls
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(learner._buffers._held))


def test_a_gradient_that_is_not_finite_is_named_unless_its_attempt_failed(learner):
    state, rng = learner.state, np.random.default_rng(5)
    tokens, other = lc.random_tokens(rng, 4), lc.random_tokens(rng, 1)
    broken = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(np.nan), state.params)
    sound = jax.tree.map(lambda p: p.copy(), state.params)
    learner.load(dataclasses.replace(state, params=broken))
    group = grow(learner, tokens)
    learner.set_failed(group, 0, "the sandbox died")
    learner.set_failed(group, 1, "the sandbox died")
    assert learner.update().is_empty
    group = grow(learner, tokens)
    for index, content in enumerate((tokens, other)):
        learner.add_trajectory(group, index, content)
        learner.set_reward(group, index, float(index))
    with pytest.raises(NonFiniteGradientError, match=rf"group {group} \(task 'a'\) index 0"):
        learner.update()
    learner.load(dataclasses.replace(state, params=sound))


def test_wrong_turns_are_refused_by_name(learner):
    tokens = lc.random_tokens(np.random.default_rng(5), 4)
    turns = lc.turns_of(tokens)
    group = grow(learner, tokens, num_turns=2)
    with pytest.raises(LearnerError, match=r"index 0: its turns hold .* expected the same ones"):
        learner.add_trajectory(group, 0, tokens)
    taught = oc.turn(np.random.default_rng(0), 1, 2, 0)
    with pytest.raises(LearnerError, match=r"a scored turn came, and no teacher .* opd\.teacher"):
        learner.add_turn(group, 1, taught)
    foreign = dataclasses.replace(tokens, token_ids=tokens.token_ids + lc.VOCAB_SIZE)
    with pytest.raises(LearnerError, match="index 1: token ids"):
        learner.add_turn(group, 1, ScoredTurn(tokens=foreign, teacher_logprobs=None))
    long = oc.joined([tokens] * 20)
    with pytest.raises(LearnerError, match="exceed the longest bucket 64"):
        learner.add_turn(group, 1, ScoredTurn(tokens=long, teacher_logprobs=None))
    for turn in turns[2:]:
        learner.add_turn(group, 0, turn)
    learner.add_trajectory(group, 0, tokens)
    with pytest.raises(LearnerError, match="is waiting for a reward: no turn can follow"):
        learner.add_turn(group, 0, turns[0])


def test_weights_that_change_further_on_than_the_checks_go_are_refused_with_the_content(
    learner, monkeypatch
):
    tokens = lc.random_tokens(np.random.default_rng(5), 12)
    limit = tokens.num_action_tokens - 1
    assert limit > 18

    def capped(mask: np.ndarray) -> np.ndarray:
        return mask * min(1.0, limit / max(1, mask.sum()))

    mine = dataclasses.replace(learner._objective, name="mine", token_weights=capped)
    check_turns(mine)
    monkeypatch.setattr(learner._contents, "_objective", mine)
    group = grow(learner, tokens)
    message = (
        rf"group {group} .* index 0: objective 'mine': later turns change .* of token 0 is 1.0"
    )
    with pytest.raises(ObjectiveError, match=message):
        learner.add_trajectory(group, 0, tokens)


def discounted(mask: np.ndarray) -> np.ndarray:
    """Future credit: a token weighs more the fewer follow it."""
    num_after = mask[::-1].cumsum()[::-1] - 1
    return np.where(mask, 0.9**num_after, 0.0)


def whole_trajectory(tokens: Tokens) -> jax.Array:
    """The ratio of a sequence, without a clip."""
    return jax.numpy.exp(tokens.trajectory_mean(tokens.logprobs - tokens.behavior_logprobs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_weights": discounted}, "later turns change .* discounted future credit"),
        ({"score": whole_trajectory}, "a token's score reads tokens of other turns"),
    ],
)
def test_what_later_turns_change_is_refused(changes, message):
    objective = dataclasses.replace(make_objective("grpo", {}), name="mine", **changes)
    with pytest.raises(ObjectiveError, match=f"'mine': {message}.*stream_turns = 'never'"):
        check_turns(objective)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, "needs every reward of a group"),
        ("grpo", {"kl_coefficient": 0.1}, r"reward-free terms \(kl"),
        ("reinforce_pp", {"entropy_coefficient": 0.1}, r"reward-free terms \(entropy"),
    ],
)
def test_what_cannot_run_by_turns_is_refused_when_the_learner_is_made(name, options, message):
    with pytest.raises(ObjectiveError, match=message):
        make(objective=name, objective_options=options)


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_passes(name):
    objective: Objective = make_objective(name, LINEAR[name])
    assert objective.streams is not Streams.GROUP
    check_turns(objective)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_turns": "always"}, r"learner\.stream_turns = 'always'"),
        ({"num_turn_caches": -1}, r"learner\.num_turn_caches = -1: expected 0 or more"),
        ({"stream_turns": "idle", "reduction": "exact"}, "'never' with learner.reduction"),
        (
            {"stream_turns": "idle", "held_gradients": 0},
            r"learner\.held_gradients = 0: expected at least 1 with learner\.stream_turns = 'idle'",
        ),
    ],
)
def test_options_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        LearnerSection(**changes)


def test_a_teacher_has_its_own_option():
    with pytest.raises(ConfigError, match=r"'never' with opd\.teacher"):
        RunConfig(
            learner=LearnerSection(stream_turns="idle", buckets=(16, 512), tokens_per_step=512),
            opd=OpdSection(teacher="runs/teacher"),
        )
