"""An exact sum has the same bits for every order and grouping, stays near the true sum, and never
makes a number of what is none.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from thundersync_jax.learner import limbs
from thundersync_jax.learner.exact_sum import MAX_ADDENDS, ExactSum, start_for
from thundersync_jax.learner.limbs import FIRST_EXPONENT, LIMB_BITS

pytestmark = pytest.mark.optimized

SHAPE = (3,)
TOP = 2 * LIMB_BITS - 1  # a grid of exponent e holds addends below 2**(e + TOP)

# Any float32 below 2**100 that is not below the normal numbers, or zero.
numbers = st.builds(
    lambda sign, fraction, exponent: sign * (1 + fraction * 2.0**-23) * 2.0**exponent,
    st.sampled_from([-1, 0, 1]),
    st.integers(0, 2**23 - 1),
    st.integers(-126, 99),
)
addends = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8)


def empty(exponent: int = FIRST_EXPONENT, shape: tuple[int, ...] = SHAPE) -> ExactSum:
    """A sum of trees {"a": array} on a grid."""
    values = {"a": jax.ShapeDtypeStruct(shape, jnp.float32)}
    abstract = ExactSum.abstract(values, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    return zeros.started((exponent,))


@jax.jit
def fold(acc: ExactSum, coefficient: float | np.ndarray, addend: np.ndarray) -> ExactSum:
    """The coefficient: a number, or a row of `ExactSum.weights`."""
    return acc.fold(jnp.asarray(coefficient, jnp.float32), {"a": addend})


@jax.jit
def read(acc: ExactSum) -> jax.Array:
    return acc.read()["a"]


@jax.jit
def total(sums: ExactSum) -> jax.Array:
    return sums.total()["a"]


def summed(acc: ExactSum, rows, coefficient: float = 1.0) -> ExactSum:
    return functools.reduce(lambda a, row: fold(a, coefficient, np.float32(row)), rows, acc)


def bits(x) -> list[int]:
    return np.asarray(x, np.float32).view(np.int32).tolist()


@given(rows=addends, start=st.integers(FIRST_EXPONENT, 90), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_order_and_grouping_has_the_same_bits(rows, start, data):
    """Also where addends promote the grid at different times, on one replica or on three."""
    acc = summed(empty(start), rows)
    other = summed(empty(start), data.draw(st.permutations(rows)))
    assert bits(read(acc)) == bits(read(other))
    for one, two in zip(*map(jax.tree.leaves, (acc.grid, other.grid)), strict=True):
        assert one.tolist() == two.tolist()
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    replicas = [
        summed(empty(start), [row for row, at in zip(rows, places, strict=True) if at == replica])
        for replica in range(3)
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *replicas)
    assert bits(total(stacked)) == bits(read(acc))


@given(rows=addends, start=st.integers(FIRST_EXPONENT, 90))
@settings(max_examples=60, deadline=None)
def test_the_sum_is_within_half_a_grid_step_an_addend_and_two_roundings(rows, start):
    acc = summed(empty(start), rows)
    (exponent,) = acc.grid.exponent.tolist()
    assert (exponent - start) % LIMB_BITS == 0
    step = Fraction(2) ** exponent
    largest = max(abs(Fraction(x)) for row in rows for x in row)
    assert exponent == start or largest >= step * 2 ** (TOP - LIMB_BITS)  # no coarser than needed
    assert largest < step * 2**TOP
    for got, column in zip(read(acc).tolist(), zip(*rows, strict=True), strict=True):
        true = sum(map(Fraction, column))
        near = abs(true) + len(rows) * step / 2
        assert abs(Fraction(got) - true) <= len(rows) * step / 2 + near * Fraction(2) ** -23


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("is_promoted", [False, True])
def test_no_limb_overflows_with_as_many_addends_as_are_allowed(sign: int, is_promoted: bool):
    """Found by search: a product whose low limb is among the largest there are."""
    start = -40
    coefficient, x = worst_product(sign)
    worst = np.float32(x * 2.0 ** (start + TOP))
    one = jax.jit(limbs.product)(coefficient, worst, start)
    assert abs(int(one.low)) > 0.98 * 2**19 and abs(int(one.high)) > 0.98 * 2**19

    @jax.jit
    def many(acc: ExactSum, count: int) -> ExactSum:
        addend = {"a": jnp.full(SHAPE, worst)}
        return jax.lax.fori_loop(0, count, lambda _, a: a.fold(coefficient, addend), acc)

    count = MAX_ADDENDS - is_promoted
    acc = many(empty(start), count)
    want = float(np.float64(coefficient).sum() * worst) * count
    if is_promoted:
        beyond = 2.0 ** (start + TOP) * sign
        acc = fold(acc, 1.0, np.full(SHAPE, beyond, np.float32))
        want += beyond
    error = count * 2.0 ** (start - 1 + is_promoted * LIMB_BITS)
    for got in read(acc).tolist():
        assert abs(got - want) <= error + abs(want) * 2.0**-23
        assert math.copysign(1, got) == sign


def worst_product(sign: int) -> tuple[np.ndarray, float]:
    """A coefficient, and x below 1, whose product's limbs are all large on the grid of its size."""
    rng = np.random.default_rng(0)
    coefficients = ExactSum.weights(rng.uniform(0.99, 1, 4096), np.dtype(np.float32))
    xs = np.float32(sign * rng.uniform(0.995, 1, 4096))
    made = jax.vmap(limbs.product, (0, 0, None))(coefficients, xs, -TOP)
    at = int(np.argmax(np.minimum(np.abs(made.low), np.abs(made.high) * 2)))
    return coefficients[at], float(xs[at])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**125])
def test_what_no_grid_holds_reads_nan_until_it_is_cleared(bad: float):
    row = np.array([1.0, bad, 2.0], np.float32)
    assert read(fold(empty(), 0.0, row)).tolist() == [0, 0, 0]  # not even read
    acc = summed(empty(), [(1, 1, 1), row, (1, 1, 1)])
    assert np.isnan(read(acc)).all()
    stacked = jax.tree.map(lambda *x: jnp.stack(x), acc, fold(empty(), 1.0, np.ones(SHAPE)))
    assert np.isnan(total(stacked)).all()
    assert read(fold(acc.cleared(), 1.0, np.ones(SHAPE, np.float32))).tolist() == [1, 1, 1]


def test_the_largest_magnitude_that_is_held():
    below = np.full(SHAPE, np.nextafter(np.float32(2.0**125), np.float32(0)), np.float32)
    assert bits(read(fold(empty(), -1.0, below))) == bits(-below)


@given(row=st.tuples(numbers, numbers, numbers), start=st.integers(FIRST_EXPONENT, 90))
@settings(max_examples=25, deadline=None)
def test_snapping_is_what_a_lone_addend_reads_as_and_changes_it_no_more(row, start):
    acc, values = empty(start), np.float32(row)
    snapped = acc.snapped({"a": values})["a"]
    assert bits(snapped) == bits(read(fold(acc, 1.0, values)))
    assert bits(acc.snapped({"a": snapped})["a"]) == bits(snapped)


wide = st.floats(1e-3, 1e3, allow_subnormal=False)


@given(
    coefficient=st.tuples(wide, st.floats(-(2.0**-25), 2.0**-25)),
    row=st.tuples(numbers, numbers, numbers),
    finer=st.integers(0, 3 * LIMB_BITS),
)
@settings(max_examples=80, deadline=None)
def test_a_product_is_rounded_to_the_grid_alone(coefficient, row, finer):
    """To half a step and 2**-35 of itself; on a grid coarser by a limb it is the high limb."""
    head, rest = np.float32(coefficient[0]), np.float32(coefficient[0] * coefficient[1])
    values = np.float32(row)
    largest = np.abs(head * values).max()
    if not 2.0**-60 < largest < 2.0**100:
        return
    exponent = int(limbs.closest_exponent(limbs.binary_exponent(largest))) + finer
    weight = jnp.stack([head, rest])
    made = product(weight, values, exponent)
    coarse = product(weight, values, exponent + LIMB_BITS)
    exact = Fraction(float(head)) + Fraction(float(rest))
    for at, x in enumerate(values):
        true = exact * Fraction(float(x)) / Fraction(2) ** exponent
        got = integer(made, at)
        assert abs(got - true) <= 1 + abs(true) * Fraction(2) ** -35
        assert integer(coarse, at) == int(made.high[at])
        assert abs(int(made.low[at])) <= limbs.MAX_LIMB
        assert abs(int(made.high[at])) <= 2**19


def test_what_a_compiler_fuses_does_not_show():
    """The bits are those of the integers computed here, whole and unfused."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=1000).astype(np.float32)
    weight = ExactSum.weights(np.float64(1.7) / 3, np.dtype(np.float32))
    jitted = product(weight, values, -36)
    with jax.disable_jit():
        unfused = limbs.product(jnp.asarray(weight), jnp.asarray(values), jnp.int32(-36))
    for one, other in zip(jitted, unfused, strict=True):
        assert np.array_equal(one, other)


product = jax.jit(limbs.product)


def integer(made: limbs.Limbs, at: int) -> int:
    return int(made.high[at]) * 2**LIMB_BITS + int(made.low[at])


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4, 1e6])
def test_closing_keeps_what_is_left_when_a_pair_cancels(offset: float):
    """a G1 + b G2 with G1 = sum (r - c) g, against float64, on the grids of a step like the last:
    an error of G1's grid, and no more of the rounding to float32.
    """
    rng = np.random.default_rng(1)
    grads = rng.normal(size=(5, 3)).astype(np.float32)
    rewards = rng.normal(size=5) + offset
    peaks = np.log2([np.abs(rewards[:, None] * grads).max(), np.abs(grads).max()])
    first, second = (empty(start_for(math.floor(peak))) for peak in peaks)
    for reward, grad in zip(rewards, grads, strict=True):
        weight = ExactSum.weights(reward, np.dtype(np.float32))
        first, second = fold(first, weight, grad), fold(second, 1.0, grad)
    a, b = 1 / rewards.std(), -rewards.mean() / rewards.std()
    coefficients = ExactSum.weights(np.array([a, b]), np.dtype(np.float32))
    batch = fold(empty(), 1.0, np.full(SHAPE, 7.0, np.float32))
    closed = batch.close(coefficients, jnp.bool_(True), first, second)
    want = 7.0 + ((rewards - rewards.mean()) / rewards.std()) @ np.float64(grads)
    bound = 2.0**-23 * np.abs(want) + 2 * len(rewards) * 2.0 ** int(first.grid.exponent[0])
    assert (np.abs(np.float64(read(closed)) - want) <= bound).all()
    assert bits(read(batch.close(coefficients, jnp.bool_(False), first, second))) == bits([7.0] * 3)


def test_a_slot_is_a_sum_of_its_own():
    """Folding into one leaves the others and their grids alone."""
    slots = empty(shape=(2, 1, 4))
    slots = slots.replace(
        grid=jax.tree.map(lambda x: jnp.broadcast_to(x, (2, 1)), slots.grid)
    ).started((-30,))
    part = slots.part(1, 2).fold(jnp.float32(1), {"a": jnp.full((1, 2), 2.0**20)})
    stored = slots.with_part(1, part)
    assert stored.grid.exponent.tolist() == [[-30], [-10]]
    assert stored.part(1, None).read()["a"].tolist() == [[2.0**20, 2.0**20, 0, 0]]
    assert stored.part(0, None).read()["a"].tolist() == [[0, 0, 0, 0]]
