"""With exact reduction the updated weights have the same bits, however the step came about."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.benchmarks.exactness import OBJECTIVES
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.limbs import LIMB_BITS
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.statistics import NonFiniteGradientError
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.losses.objectives import grpo, reinforce_pp
from thundersync_jax.transport.messages import UpdateReport

pytestmark = pytest.mark.optimized

MODEL = lc.tiny()
SHARING = {
    "buckets": (64,),
    "tokens_per_step": 128,
    "prompt_buckets": (24,),
    "prompt_slots": 1,
    "min_shared_tokens": 2,
    "held_gradients": 1,
    "pairs_per_call": 1,
}
NUM_STEPS = 3


def batch(step: int) -> list[lc.Case]:
    """Prompts to share and others, and more groups than slots; rewards that drift."""
    rng = np.random.default_rng(step)
    prompts = [tuple(rng.integers(0, lc.VOCAB_SIZE, n).tolist()) for n in (1, 9, 20, 14, 5)]
    cases = lc.random_batch(step, num_groups=5, size=4)
    return [
        dataclasses.replace(
            case,
            prompt=prompt,
            rewards=tuple(r if r is None else r + step for r in case.rewards),
        )
        for case, prompt in zip(cases, prompts, strict=True)
    ]


@functools.cache
def made(pool_size: int) -> tuple[Learner, TrainState]:
    """A learner, and where it began."""
    learner = lc.make_learner(MODEL, **SHARING, pool_size=pool_size, reduction="exact")
    return learner, lc.copied(learner.state)


def fresh(pool_size: int = 1) -> Learner:
    """A learner at the beginning."""
    learner, start = made(pool_size)
    learner.load(lc.copied(start))
    return learner


def bits(learner: Learner) -> list[bytes]:
    """Of weights and moments, and what the next step begins with."""
    return [*(leaf.tobytes() for leaf in lc.copy_state(learner)), repr(learner.state.sums).encode()]


def feed(learner: Learner, cases: list[lc.Case], order: int | None) -> None:
    """In barrier mode, or streamed in a random order."""
    if order is None:
        lc.enqueue(learner, cases)
    else:
        lc.run_events(learner, cases, np.random.default_rng(order))


def run_step(learner: Learner, step: int, order: int | None) -> UpdateReport:
    feed(learner, batch(step), order)
    return learner.update()


@functools.cache
def want() -> tuple[list[bytes], list[int]]:
    """After NUM_STEPS steps in barrier mode; the promotions of every step."""
    learner = fresh()
    reports = [run_step(learner, step, None) for step in range(NUM_STEPS)]
    assert {r.paths["stream"] + r.paths["ahead"] for r in reports} == {0}
    return bits(learner), [r.num_promotions for r in reports]


@pytest.mark.parametrize("pool_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_have_the_same_bits_for_every_order_path_mix_pool_and_mode(pool_size: int):
    paths: set[str] = set()
    for order in range(3):
        learner, promotions = fresh(pool_size), []
        for step in range(NUM_STEPS):
            report = run_step(learner, step, order * NUM_STEPS + step)
            paths |= {name for name, count in report.paths.items() if count}
            promotions.append(report.num_promotions)
        assert (bits(learner), promotions) == want()
    assert paths == {"direct", "stream", "ahead"}


def mean_cases() -> list[lc.Case]:
    """One group's rewards are all exactly the mean of the step's."""
    rewards = ((0.0, 1.0, 1.0, 0.0), (0.5,) * 4)
    return [dataclasses.replace(c, rewards=r) for c, r in zip(batch(1), rewards, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "grpo_kl_entropy", "reinforce_pp"])
def test_every_kind_of_objective_has_the_same_bits_for_every_order(name: str):
    """What streams by trajectory, group and batch; each with terms that count failed attempts."""
    objective, options = OBJECTIVES[name]
    kind = {"objective": objective, "objective_options": options}
    learner = lc.make_learner(MODEL, **SHARING, pool_size=1, reduction="exact", **kind)
    start, found = lc.copied(learner.state), []
    for order in (None, 0, 1):
        learner.load(lc.copied(start))
        for cases in (batch(0), mean_cases()):
            feed(learner, cases, order)
            if order == 0:
                wanted = lc.reference(MODEL, learner.params, cases, LearnerSection(**kind))
                assert lc.rel_l2(learner.gradient(), wanted) <= 1e-5
            assert not learner.update().is_empty
        found.append(bits(learner))
    assert found[0] == found[1] == found[2]
    assert {"terms1", "terms1_adjoint"} <= learner.state.sums.grids.keys()


def test_a_restart_in_the_middle_leaves_no_trace(tmp_path: Path):
    """Through a checkpoint into a learner that was half way through other steps, and with a step
    that is abandoned half way.
    """
    first, second = fresh(1), fresh(2)
    run_step(first, 0, order=7)
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    checkpoints.save(first.state, RunPosition(num_steps=1), reward=0.0)
    feed(second, batch(3), order=0)
    state, _ = checkpoints.restore(second.state, 1)
    checkpoints.close()
    assert state.sums == first.state.sums
    assert state.sums.center != 0 and state.sums.grid("adjoint1")
    second.load(state)
    feed(second, batch(1), order=5)
    second.abandon()
    for step in range(1, NUM_STEPS):
        run_step(second, step, order=step)
    assert bits(second) == want()[0]


def test_the_gradient_is_the_reference_gradient():
    """The first step finds its grids; the others begin with them."""
    learner = fresh()
    for step, limit in enumerate((1e-5, 1e-6, 1e-6)):
        cases = batch(step)
        wanted = lc.reference(MODEL, learner.params, cases, LearnerSection())
        feed(learner, cases, order=step)
        assert lc.rel_l2(learner.gradient(), wanted) <= limit
        learner.update()


def test_rewards_far_from_c_cost_no_digits():
    """Groups a thousand standard deviations from c and from each other, once grids fit: float32
    products would leave 3e-3.
    """
    learner = fresh()
    for step in range(3):
        cases = [
            dataclasses.replace(
                case, rewards=tuple(r if r is None else r + 1000 * (-1) ** at for r in case.rewards)
            )
            for at, case in enumerate(batch(step))
        ]
        wanted = lc.reference(MODEL, learner.params, cases, LearnerSection())
        feed(learner, cases, order=step)
        assert step == 0 or lc.rel_l2(learner.gradient(), wanted) <= 3e-6
        learner.update()


def test_a_gradient_that_cannot_be_held_is_warned_of_by_name(caplog):
    """After one reward of 1e9 the grids of the next step are coarse, and fit again after it; a
    group that lies 1e9 spreads from the others is beyond any grid.
    """
    learner = fresh()

    def gradient_error(step: int, rewards: dict[int, tuple[float, ...]]) -> float:
        cases = [
            dataclasses.replace(case, rewards=rewards.get(at, case.rewards))
            for at, case in enumerate(batch(step))
        ]
        feed(learner, cases, order=step)
        wanted = lc.reference(MODEL, learner.params, cases, LearnerSection())
        error = lc.rel_l2(learner.gradient(), wanted)
        learner.update()
        return error

    gradient_error(0, {})
    assert gradient_error(1, {1: (1e9, 0.0, 1.0, 2.0)}) <= 1e-5
    assert not caplog.messages
    assert gradient_error(2, {}) > 1e-3
    assert caplog.messages
    caplog.clear()
    assert gradient_error(3, {}) <= 1e-5
    assert not caplog.messages
    gradient_error(4, {1: (1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3)})
    (message,) = caplog.messages
    assert message.startswith("group ") and "task-1" in message and "9e+08 of" in message


def test_gradients_beyond_their_grid_promote_it_and_the_bits_stay_the_same():
    """Every second leaf begins with a grid that is finer by 2**37, so that most addends exceed it
    and some do not.
    """
    found = []
    for order in (None, 0, 1):
        learner = fresh()
        run_step(learner, 0, None)
        sums = learner.state.sums
        finer = {
            name: tuple(e - 37 * (at % 2) for at, e in enumerate(grid))
            for name, grid in sums.grids.items()
        }
        finer_sums = dataclasses.replace(sums, grids=finer)
        learner.load(dataclasses.replace(learner.state, sums=finer_sums))
        cases = batch(1)
        wanted = lc.reference(MODEL, learner.params, cases, LearnerSection())
        feed(learner, cases, order)
        assert lc.rel_l2(learner.gradient(), wanted) <= 1e-5
        report = learner.update()
        assert report.num_promotions > 10
        found.append((bits(learner), report.num_promotions))
    assert found[0] == found[1] == found[2]
    assert learner.state.sums.grid("batch") == pytest.approx(sums.grid("batch"), abs=LIMB_BITS // 2)


def test_grids_follow_the_gradients_and_the_center_the_rewards():
    learner = fresh()
    assert learner.state.sums.center == 0.0
    assert run_step(learner, 0, 0).num_promotions > 0  # nothing was known
    rewards = [r for c in batch(0) for r in c.rewards if r is not None]
    assert learner.state.sums.center == pytest.approx(np.median(rewards), rel=1e-15)
    assert run_step(learner, 1, 0).num_promotions == 0
    before = learner.state.sums
    group = learner.open_group("t", (1, 2), 2)
    for index in range(2):
        learner.set_failed(group, index, "sandbox died")
    assert learner.update().is_empty
    assert learner.state.sums == before  # an empty step changes nothing


def test_a_non_finite_gradient_is_refused_by_name_and_never_rounded():
    learner = fresh()
    params = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(jnp.nan), learner.state.params)
    learner.load(dataclasses.replace(learner.state, params=params))
    before = bits(learner)
    lc.enqueue(learner, batch(0)[:1])
    with pytest.raises(NonFiniteGradientError, match=r"task 'task-0'\) index 0"):
        learner.update()
    assert bits(learner) == before


def test_what_exact_sums_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"pool_size = 0: expected at least 1.*through a pair"):
        LearnerSection(reduction="exact", pool_size=0)
    with pytest.raises(ConfigError, match=r"pack_tokens = 64: expected 0.*last bits"):
        LearnerSection(reduction="exact", pack_tokens=64)
    with pytest.raises(ConfigError, match=r"reduction = 'exakt': expected one of"):
        LearnerSection(reduction="exakt")
    with pytest.raises(LearnerError, match=r"group_size 4000 a pair.* holds at most 3276"):
        fresh().open_group("t", (1,), 4000)
    check = REDUCTIONS["exact"].check_group
    check("task 't'", [8] * 500, grpo())
    with pytest.raises(LearnerError, match=r"the batch sum of this step has 4096 addends"):
        check("task 't'", [2] * 2048, grpo())
    with pytest.raises(LearnerError, match=r"a sum of terms of this step has 4500 addends"):
        check("task 't'", [8] * 500, grpo(entropy_coefficient=0.1))
    with pytest.raises(LearnerError, match=r"a pair of this step has 4800 addends"):
        check("task 't'", [8] * 600, reinforce_pp())
    REDUCTIONS["ordered"].check_group("task 't'", [8] * 600, reinforce_pp())
    with jax.enable_x64(True), pytest.raises(ConfigError, match=r"float64.*'ordered'"):
        lc.make_learner(lc.tiny("float64"), reduction="exact", pool_size=1)
