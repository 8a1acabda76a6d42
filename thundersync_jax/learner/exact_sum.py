"""`ExactSum`: a sum with the same bits for every order and grouping of its addends.

Every leaf has a grid of its own, the multiples of 2**exponent. An addend is rounded to it once, to
the nearest, ties to even, and split in two integers that are added limb by limb:

    x ~ (high * 2**20 + low) * 2**exponent,    |high|, |low| <= 2**19

Integer addition does not round, so the order does not show. An addend of 2**(exponent + 39) or more
*promotes* the grid: exponent + 20, low <- high, high <- 0. Since `high` alone is x rounded to the
coarser grid, and limbs are never carried before they are read, a promoted sum is what it would be
had every addend met the coarser grid: when a grid is promoted does not show either.

Invariants:
  * Of n addends the sum is within n * 2**(exponent - 1) of the true one, and reading it rounds to
    float32: twice at most, each time by 2**-24 of the result. The largest addend is 2**32 steps of
    the grid where a grid fits (`start_for`), at least 2**19 where it was promoted, and less only
    after gradients that were larger by more than 2**13. A third limb would give all of them a
    factor of 2**20, for half as much memory again.
  * At most MAX_ADDENDS addends, those of all replicas together: no limb leaves an int32.
  * An addend that is not finite, or from 2**125 on, makes the sum read NaN until it is cleared. It
    is never rounded to a number.

The coefficient of a fold multiplies in float32 first: q(fl32(coefficient * x)) is folded. Scaling
by powers of two is exact, so it does not matter whether a compiler fuses it with an addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.sums import Tree, in_place

LIMB_BITS = 20
MAX_ADDENDS = 2 ** (32 - LIMB_BITS) - 1  # each takes 2**19 of an int32's 2**31
FIRST_EXPONENT = -130  # the lowest: every magnitude of float32 is promoted from there
MARGIN_BITS = 6  # by which a step's addends may exceed the last step's before they promote
NO_PEAK = -127  # binary exponent of zero
_TOP_BITS = 2 * LIMB_BITS - 1  # of the largest addend, without its sign
_PEAK_LIMIT = 125  # beyond, 2**-(exponent + 20) could leave the normal numbers
_OVERFLOW = 2**20  # the exponent of a sum that reads NaN


class Grid(struct.PyTreeNode):
    """The grids of a sum's N leaves, int32 [..., N].

    Attributes:
      exponent: of the grid now; start + 20 k.
      start: of the grid that a cleared sum begins with.
      peak: binary exponent of the largest addend so far.
    """

    exponent: jax.Array
    start: jax.Array
    peak: jax.Array


class ExactSum(struct.PyTreeNode):
    """See the module's docstring.

    Attributes:
      high, low: int32 arrays of the addends' shapes.
      grid: see `Grid`.
    """

    high: Tree
    low: Tree
    grid: Grid

    @classmethod
    def abstract(cls, values: Tree, numbers: Callable[..., Any]) -> Self:
        def limb(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, jnp.int32, sharding=x.sharding)

        dtypes = {x.dtype.name for x in jax.tree.leaves(values)}
        if dtypes != {"float32"}:
            raise ConfigError(
                f"exact sums are of float32, got {sorted(dtypes)}: use model.dtype = 'float32' or "
                "'bfloat16', or learner.reduction = 'ordered'"
            )
        limbs, one = jax.tree.map(limb, values), numbers(len(jax.tree.leaves(values)))
        return cls(high=limbs, low=limbs, grid=Grid(exponent=one, start=one, peak=one))

    def fold(self, coefficient: jax.Array, addend: Tree) -> Self:
        # Rounding is monotone: the largest product is that of the largest entry.
        largest = jnp.where(coefficient == 0, 0, jnp.abs(coefficient) * _largest(addend))

        def add(acc: Self) -> Self:
            def limbs_of(x: jax.Array, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
                return quantize(coefficient * x.astype(jnp.float32), exponent)

            limbs = jax.tree.map(limbs_of, addend, acc._by_leaf(acc.grid.exponent))
            return acc.replace(
                high=jax.tree.map(lambda high, pair: high + pair[0], acc.high, limbs),
                low=jax.tree.map(lambda low, pair: low + pair[1], acc.low, limbs),
            )

        return in_place(coefficient != 0, add, self._promoted(binary_exponent(largest)))

    def _promoted(self, peak: jax.Array) -> Self:
        """On a grid that holds addends of these binary exponents."""
        grid = self.grid
        exponent = exponent_for(peak, grid.exponent)
        levels = (exponent - grid.exponent) // LIMB_BITS

        def promote(done: jax.Array, acc: Self) -> Self:
            """One level: the lowest limb is dropped, wherever the grid is still too fine."""
            is_due = acc._by_leaf(done < levels)
            low = jax.tree.map(jnp.where, is_due, acc.high, acc.low)
            high = jax.tree.map(lambda due, high: jnp.where(due, 0, high), is_due, acc.high)
            return acc.replace(high=high, low=low)

        rounds = jnp.minimum(jnp.max(levels), 2)  # then nothing is left
        grid = grid.replace(exponent=exponent, peak=jnp.maximum(grid.peak, peak))
        return jax.lax.fori_loop(0, rounds, promote, self).replace(grid=grid)

    def close(self, coefficients: jax.Array, is_used: jax.Array, first: Self, second: Self) -> Self:
        def combined(first: jax.Array, second: jax.Array) -> jax.Array:
            a, b = coefficients.astype(jnp.float32)
            return a * first + b * second

        values = jax.tree.map(combined, first.read(), second.read())
        return self.fold(is_used.astype(jnp.float32), values)

    def read(self) -> Tree:
        return jax.tree.map(to_float, self.high, self.low, self._by_leaf(self.grid.exponent))

    def snapped(self, addend: Tree) -> Tree:
        start = self.grid.start.reshape(-1, self.grid.start.shape[-1])[0]  # that of all slots
        exponent = exponent_for(binary_exponent(_largest(addend)), start)

        def snap(x: jax.Array, exponent: jax.Array) -> jax.Array:
            return to_float(*quantize(x.astype(jnp.float32), exponent), exponent)

        return jax.tree.map(snap, addend, self._by_leaf(exponent))

    def total(self) -> Tree:
        exponent = jnp.max(self.grid.exponent, axis=0)

        def one(
            high: jax.Array, low: jax.Array, levels: jax.Array, exponent: jax.Array
        ) -> jax.Array:
            levels = levels.reshape(-1, *[1] * (high.ndim - 1))
            low = jnp.where(levels == 0, low, jnp.where(levels == 1, high, 0))
            high = jnp.where(levels == 0, high, 0)
            return to_float(jnp.sum(high, axis=0), jnp.sum(low, axis=0), exponent)

        levels = self._by_leaf((exponent - self.grid.exponent) // LIMB_BITS)
        return jax.tree.map(one, self.high, self.low, levels, self._by_leaf(exponent))

    def cleared(self) -> Self:
        high, low = jax.tree.map(jnp.zeros_like, (self.high, self.low))
        peak = jnp.full_like(self.grid.peak, NO_PEAK)
        return self.replace(
            high=high, low=low, grid=self.grid.replace(exponent=self.grid.start, peak=peak)
        )

    def part(self, slot: jax.Array, length: int | None) -> Self:
        high, low = jax.tree.map(lambda x: x[slot, :, :length], (self.high, self.low))
        return self.replace(high=high, low=low, grid=jax.tree.map(lambda x: x[slot], self.grid))

    def with_part(self, slot: jax.Array, part: Self) -> Self:
        def store(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[slot, :, : new.shape[1]].set(new)

        high, low = jax.tree.map(store, (self.high, self.low), (part.high, part.low))
        grid = jax.tree.map(lambda x, new: x.at[slot].set(new), self.grid, part.grid)
        return self.replace(high=high, low=low, grid=grid)

    def started(self, exponents: Sequence[int]) -> Self:
        """Args: exponents: of every leaf; none before anything is known of their sizes."""

        def put(values: Sequence[int] | int, old: jax.Array) -> jax.Array:
            return jax.device_put(np.full(old.shape, values, np.int32), old.sharding)

        start, grid = exponents or FIRST_EXPONENT, self.grid
        return self.replace(
            grid=Grid(
                exponent=put(start, grid.exponent),
                start=put(start, grid.start),
                peak=put(NO_PEAK, grid.peak),
            )
        )

    def _by_leaf(self, numbers: jax.Array) -> Tree:
        """Numbers [..., N], one a leaf, as a tree."""
        one_each = [numbers[..., at] for at in range(numbers.shape[-1])]
        return jax.tree.unflatten(jax.tree.structure(self.high), one_each)


# -- one leaf -------------------------------------------------------------------------------------


def quantize(x: jax.Array, exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(high, low) of float32 values below 2**(exponent + 39)."""
    scaled = x * power_of_two(-(exponent + LIMB_BITS))
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * 2.0**LIMB_BITS)
    return high.astype(jnp.int32), low.astype(jnp.int32)


def to_float(high: jax.Array, low: jax.Array, exponent: jax.Array) -> jax.Array:
    """The float32 nearest to the limbs' value, but for two roundings; it depends on nothing else.

    Carrying first makes it the same for all limbs of one value.
    """
    carried = (low >> LIMB_BITS) + ((low >> (LIMB_BITS - 1)) & 1)
    high, low = high + carried, low - (carried << LIMB_BITS)
    scaled = high.astype(jnp.float32) + low.astype(jnp.float32) * 2.0**-LIMB_BITS
    value = scaled * power_of_two(exponent + LIMB_BITS)
    return jnp.where(exponent == _OVERFLOW, jnp.nan, value)


def exponent_for(peak: jax.Array, exponent: jax.Array) -> jax.Array:
    """The grid that `exponent` is promoted to for addends below 2**(peak + 1)."""
    missing = peak + 1 - _TOP_BITS - exponent
    levels = jnp.maximum(-(-missing // LIMB_BITS), 0)
    return jnp.where(peak >= _PEAK_LIMIT, _OVERFLOW, exponent + levels * LIMB_BITS)


def start_for(peak: int) -> int:
    """The grid for a step whose largest addend is like one below 2**(peak + 1)."""
    return max(peak + 1 + MARGIN_BITS - _TOP_BITS, FIRST_EXPONENT)


def binary_exponent(x: jax.Array) -> jax.Array:
    """floor(log2 x) of float32 values from 0 on; NO_PEAK of 0 and below the normal numbers, 128 of
    what is not finite.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return ((bits >> 23) & 255) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, exactly; of the normal numbers."""
    bits = (jnp.clip(exponent, -126, 127) + 127) << 23
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def _largest(tree: Tree) -> jax.Array:
    """The largest magnitude of every leaf, float32 [N]; NaN where there is one."""
    return jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(tree)])
