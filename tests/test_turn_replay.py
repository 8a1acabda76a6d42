"""Turn replay is the chain rule: the gradients of the turns sum to that of the trajectory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.learner import turn_replay
from thundersync_jax.learner.buckets import LaneItem, Lanes, pad_lanes
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.learner.streaming import zeros_like_params
from thundersync_jax.learner.sums import OrderedSum
from thundersync_jax.learner.turn_replay import TrajectoryCaches, empty_caches
from thundersync_jax.learner.turns import Segment, TurnSequence
from thundersync_jax.losses.objective import Tokens, lane_sums
from thundersync_jax.losses.opd import distillation, distillation_weights
from thundersync_jax.trajectory import ScoredTurn, TrajectoryBuilder

pytestmark = pytest.mark.optimized

LENGTH = oc.LENGTH
MODEL = lc.tiny()
CAP = 1.5
SETTINGS = ScoreSettings(model=MODEL, objective=distillation(ratio_cap=CAP))


@functools.cache
def program(name: str, settings: ScoreSettings, prefix_bucket: int) -> Any:
    function = functools.partial(getattr(turn_replay, name), settings, prefix_bucket)
    return jax.jit(function)


def sequence_of(case: oc.TurnCase) -> TurnSequence:
    sequence = TurnSequence("a trajectory", np.asarray(case.prompt, np.int32))
    for turn in case.turns:
        sequence.add(turn)
    return sequence


class Replay:
    """Runs the programs for one trajectory, in cache `slot` of three."""

    def __init__(self, settings: ScoreSettings, params: Any, *, slot: int = 1) -> None:
        self.settings, self.params, self.slot = settings, params, slot
        self._sum = OrderedSum(values=zeros_like_params(params))
        self.caches = empty_caches(settings.model, 3, LENGTH)

    @property
    def batch(self) -> Any:
        return self._sum.read()

    def forward(self, segment: Segment) -> None:
        self.caches = self._program("segment_forward", segment)(
            self.params, self.caches, self._lanes(segment)
        )

    def score(self, segment: Segment, *, with_ledger: bool) -> None:
        (self._sum,), self.caches, _ = self._program("score_segment", segment)(
            self.params,
            (self._sum,),
            self.caches,
            np.ones((1, 1), self._dtype),
            np.full(1, with_ledger, self._dtype),
            self._lanes(segment),
        )

    def replay(self, segment: Segment) -> None:
        (self._sum,), self.caches, _ = self._program("replay_segment", segment)(
            self.params,
            (self._sum,),
            self.caches,
            np.ones((1, 1), self._dtype),
            self._lanes(segment),
        )

    def stream(self, segments: list[Segment]) -> None:
        for segment in segments:
            if segment.is_scored:
                self.score(segment, with_ledger=False)
            else:
                self.forward(segment)

    def close(self, segments: list[Segment]) -> None:
        """Replays what was streamed; nothing reads the last one."""
        for segment in segments[-2::-1]:
            self.replay(segment)

    @property
    def _dtype(self) -> Any:
        return jax.tree.leaves(self.batch)[0].dtype

    def _program(self, name: str, segment: Segment) -> Any:
        return program(name, self.settings, LENGTH if segment.example.prefix_length else 0)

    def _lanes(self, segment: Segment) -> Lanes:
        item = LaneItem(examples=(segment.example,), slot=self.slot)
        return jax.tree.map(lambda x: x[0], pad_lanes([[item]], 1, LENGTH, self._dtype))


def gradient_by_turns(settings: ScoreSettings, params: Any, case: oc.TurnCase) -> Any:
    run, segments = Replay(settings, params), sequence_of(case).to_run()
    run.stream(segments)
    run.close(segments)
    return run.batch


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 12))]
)
def test_turns_sum_to_the_trajectory(seed):
    params, case = lc.init_params(MODEL, 0), oc.random_case(seed)
    want = oc.plain_gradient(MODEL, params, [case], cap=CAP)
    assert lc.rel_l2(gradient_by_turns(SETTINGS, params, case), want) <= 1e-5


@pytest.mark.slow
def test_turns_sum_to_the_trajectory_in_float64():
    with jax.enable_x64(True):
        model = lc.tiny("float64")
        params = lc.init_params(model, 0)
        for seed in range(6):
            case = oc.random_case(seed)
            got = gradient_by_turns(ScoreSettings(model=model), params, case)
            assert lc.rel_l2(got, oc.plain_gradient(model, params, [case])) <= 1e-11


def test_the_cap_of_the_ratio_matters():
    params, case = lc.init_params(MODEL, 0), oc.random_case(3)
    uncapped = oc.plain_gradient(MODEL, params, [case])
    assert lc.rel_l2(gradient_by_turns(SETTINGS, params, case), uncapped) > 1e-2


def test_holding_the_prefix_constant_is_far_from_the_gradient():
    """What is left out without replay; the tolerance of the theorem would never pass it."""
    params, missing = lc.init_params(MODEL, 0), []
    for seed in range(12):
        case = oc.random_case(seed)
        segments = sequence_of(case).to_run()
        if len(segments) > 2:
            run = Replay(SETTINGS, params)
            run.stream(segments)
            missing.append(lc.rel_l2(run.batch, oc.plain_gradient(MODEL, params, [case], cap=CAP)))
    print("relative L2 left out:", np.round(missing, 3))
    assert len(missing) >= 5 and min(missing) > 0.02 and np.median(missing) > 0.05


def test_a_turn_that_waits_for_the_end_joins_its_score_and_its_ledger():
    """One backward instead of two; the sum is the same."""
    params, case = lc.init_params(MODEL, 0), oc.random_case(3)
    segments = sequence_of(case).to_run()
    assert len(segments) >= 3
    run = Replay(SETTINGS, params)
    run.stream(segments[:1])
    for segment in segments[1:-1]:
        run.forward(segment)
    for segment in segments[:0:-1]:
        if segment.is_scored:
            run.score(segment, with_ledger=True)
        else:
            run.replay(segment)
    run.replay(segments[0])
    want = oc.plain_gradient(MODEL, params, [case], cap=CAP)
    assert lc.rel_l2(run.batch, want) <= 1e-5


def test_deferred_and_eager_unscored_turns_agree_bitwise():
    """Their keys and values are those of the same program, whatever ran in between."""
    params, rng = lc.init_params(MODEL, 0), np.random.default_rng(5)
    turns = [oc.turn(rng, 2, 3, 1, is_scored=number in (0, 4)) for number in range(5)]
    segments = sequence_of(oc.TurnCase(prompt=(1, 2), turns=tuple(turns))).to_run()
    other = sequence_of(oc.random_case(3)).to_run()
    gradients = []
    for is_eager in (True, False):
        run = Replay(SETTINGS, params)
        neighbor = Replay(SETTINGS, params, slot=2)
        run.stream(segments[:1])
        unscored = segments[1:4]
        if is_eager:
            run.stream(unscored)
        neighbor.caches = run.caches
        neighbor.stream(other)  # in another cache of the same pool
        run.caches = neighbor.caches
        if not is_eager:
            run.stream(unscored)
        run.stream(segments[4:])
        run.close(segments)
        gradients.append(run.batch)
    for one, two in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_the_gradient_is_the_slope_of_the_objective():
    """Finite differences in float64 along a random direction: sum_t c_t log p_t, c fixed."""
    with jax.enable_x64(True):
        model, case = lc.tiny("float64"), oc.random_case(7)
        params = lc.init_params(model, 0)
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
        whole = sequence_of(case).whole()
        lane = jax.tree.map(
            lambda x: x[0, 0],
            pad_lanes([[LaneItem(examples=(whole,))]], 1, LENGTH, np.float64).replace(
                num_lanes=None
            ),
        )

        def objective(step: float) -> float:
            moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
            return float(score(ScoreSettings(model=model), moved, None, lane)[0][0])

        slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
        gradient = gradient_by_turns(ScoreSettings(model=model), params, case)
        along = sum(
            float(jnp.sum(g * d))
            for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
        )
        assert along == pytest.approx(slope, rel=1e-7)


def test_segments_of_a_small_trajectory_by_hand():
    """Prompt 1 2; turn: read 3, sampled 4 5, read 6; turn: sampled 7; turn: read 8, sampled 9."""

    def turn(ids: list[int], mask: list[int], scores: list[float] | None) -> ScoredTurn:
        builder = TrajectoryBuilder()
        for token, is_action in zip(ids, mask, strict=True):
            if is_action:
                builder.append_action([token], [-1.0], [0])
            else:
                builder.append_observation([token])
        return ScoredTurn(
            tokens=builder.build(),
            teacher_logprobs=None if scores is None else np.asarray(scores),
        )

    sequence = TurnSequence("x", np.asarray([1, 2], np.int32))
    sequence.add(turn([3, 4, 5, 6], [0, 1, 1, 0], [-9, -2, -3, -9]))
    sequence.add(turn([7], [1], [-4]))
    sequence.add(turn([8], [0], [-9]))  # opens no segment
    sequence.add(turn([9, 10], [1, 0], None))
    found = [
        (s.example.prefix_length, s.example.tokens.tolist(), s.example.targets.tolist())
        for s in sequence.segments
    ]
    assert found == [
        (0, [1, 2, 3, 4], [2, 3, 4, 5]),
        (4, [5, 6], [6, 7]),
        (6, [7, 8], [8, 9]),
    ]
    weights = [s.example.weights.tolist() for s in sequence.segments]
    assert weights == [[0, 0, -1, -2], [0, -3], [0, 0]]
    assert [s.is_scored for s in sequence.to_run()] == [True, True]
    assert sequence.whole().tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (sequence.num_scored_tokens, sequence.teacher_kl) == (3, 6.0)


def test_coefficients_of_a_small_example_by_hand():
    """p = 1/2, 1/4; b = 1/4, 1/2; q = b/2; C = 1.5: min(2, C) log(1/2), min(1/2, C) log(1/2)."""
    behavior, teacher = np.log([0.25, 0.5, 0.1]), np.log([0.125, 0.25, 0.9])
    weights = distillation_weights(np.asarray([True, True, False]), teacher, behavior)
    np.testing.assert_allclose(weights, [np.log(0.5), np.log(0.5), 0.0])

    def score_of(logprobs: jax.Array) -> jax.Array:
        tokens = Tokens(
            logprobs=logprobs,
            behavior_logprobs=jnp.asarray(behavior),
            action_mask=jnp.asarray([True, True, False]),
            segment_ids=jnp.ones(3, jnp.int32),
        )
        return lane_sums(distillation(ratio_cap=1.5), tokens, jnp.asarray(weights), None)[0]

    gradient = jax.grad(score_of)(jnp.log(jnp.asarray([0.5, 0.25, 0.3])))
    np.testing.assert_allclose(gradient, [1.5 * np.log(0.5), 0.5 * np.log(0.5), 0.0], rtol=1e-6)


def shifted(turn: ScoredTurn) -> ScoredTurn:
    """The teacher's scores one token late."""
    return ScoredTurn(tokens=turn.tokens, teacher_logprobs=np.roll(turn.teacher_logprobs, 1))


def inverted(turn: ScoredTurn) -> ScoredTurn:
    """What was read is trained on, and what was sampled is not."""
    tokens = turn.tokens
    wrong = dataclasses.replace(tokens, action_mask=~tokens.action_mask)
    return ScoredTurn(tokens=wrong, teacher_logprobs=turn.teacher_logprobs)


def with_synthetic_eos(turn: ScoredTurn) -> ScoredTurn:
    """A token that nobody sampled, as an action of log-probability 0."""
    builder = TrajectoryBuilder()
    builder.append_action([1], [0.0], [0])
    tokens = oc.joined([turn.tokens, builder.build()])
    return ScoredTurn(tokens=tokens, teacher_logprobs=np.append(turn.teacher_logprobs, -3.0))


@pytest.mark.parametrize("mistake", [shifted, inverted, with_synthetic_eos])
def test_a_mistake_in_the_scores_is_far_beyond_the_tolerance(mistake):
    params, rng = lc.init_params(MODEL, 0), np.random.default_rng(2)
    turns = [oc.turn(rng, 2, 2, 0) for _ in range(4)]
    case = oc.TurnCase(prompt=(3, 4), turns=tuple(turns))
    want = oc.plain_gradient(MODEL, params, [case], cap=CAP)
    wrong = oc.TurnCase(prompt=case.prompt, turns=tuple(mistake(t) for t in turns))
    assert lc.rel_l2(gradient_by_turns(SETTINGS, params, case), want) <= 1e-5
    assert lc.rel_l2(gradient_by_turns(SETTINGS, params, wrong), want) > 0.1


def test_every_lane_reaches_its_own_buffer_alone():
    """One call, two trajectories, three buffers; the other's not-a-number stays out."""
    params = lc.init_params(MODEL, 0)
    rng = np.random.default_rng(0)
    cases = [oc.TurnCase(prompt=(1, 2), turns=(oc.turn(rng, 2, 3, 1),)) for _ in range(2)]
    items = [
        LaneItem(examples=(sequence_of(case).segments[0].example,), slot=slot)
        for slot, case in enumerate(cases)
    ]
    lanes = jax.tree.map(lambda x: x[0], pad_lanes([items], 3, LENGTH))
    weights = lanes.weights.copy()
    weights[1] = np.nan
    buffers = tuple(OrderedSum(values=zeros_like_params(params)) for _ in range(3))
    coefficients = np.asarray([[0, 1, 0], [2, 0, 0], [0, 0, 1]], np.float32)
    buffers, _, stats = program("score_segment", SETTINGS, 0)(
        params,
        buffers,
        empty_caches(MODEL, 3, LENGTH),
        coefficients,
        np.zeros(3, np.float32),
        lanes.replace(weights=weights),
    )
    got = jax.tree.map(lambda g: g / 2, buffers[1].read())
    assert lc.rel_l2(got, oc.plain_gradient(MODEL, params, cases[:1], cap=CAP)) <= 1e-5
    assert stats[-1].tolist() == [1, 0, 0]
    assert not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(buffers[0]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(buffers[2]))


def test_what_another_trajectory_left_behind_is_not_read():
    """Not-a-number in the rest of the cache and in its ledger, from a trajectory before."""
    params, case = lc.init_params(MODEL, 0), oc.random_case(3)
    run, segments = Replay(SETTINGS, params), sequence_of(case).to_run()
    full: TrajectoryCaches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), run.caches)
    run.caches = full
    run.stream(segments)
    run.close(segments)
    want = oc.plain_gradient(MODEL, params, [case], cap=CAP)
    assert lc.rel_l2(run.batch, want) <= 1e-5
    for leaf in jax.tree.leaves(run.caches):
        assert jnp.all(jnp.isnan(leaf[jnp.asarray([0, 2])]))
