"""`ExactSum`: a sum with the same bits for every order and grouping of its addends.

Every leaf has a grid of its own, the multiples of 2**exponent. An addend is rounded to it once, to
the nearest, ties to even, and split in two integers that are added limb by limb:

    x ~ (high * 2**20 + low) * 2**exponent

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

A coefficient is two floats, a number and what float32 leaves of it, and its product with x is
rounded once, to the grid (`limbs.py`). So is what closes a pair: a G1 + b G2 may cancel by many
digits, where the rewards lie far from c, before it is rounded to float32: what is left has the
error of G1's grid, 2**-32 of the largest addend where it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.limbs import (
    FIRST_EXPONENT,
    LIMB_BITS,
    MAX_LIMB,
    NO_PEAK,
    TOP_BITS,
    Limbs,
    binary_exponent,
    combination,
    exponent_for,
    product,
    quantize,
    to_float,
)
from thundersync_jax.learner.sums import Tree, in_place

MAX_ADDENDS = (2**31 - 1) // MAX_LIMB
MARGIN_BITS = 6  # by which a step's addends may exceed the last step's before they promote


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

    @staticmethod
    def weights(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        heads = values.astype(dtype)
        return np.stack([heads, (values - heads).astype(dtype)], axis=-1)

    def fold(self, coefficient: jax.Array, addend: Tree) -> Self:
        is_wanted = jnp.any(coefficient != 0)
        # Rounding is monotone: the largest product is that of the largest entry.
        largest = jnp.abs(jnp.ravel(coefficient)[0]) * _largest(addend)
        peak = binary_exponent(jnp.where(is_wanted, largest, 0))

        def add(acc: Self) -> Self:
            def limbs_of(x: jax.Array, exponent: jax.Array) -> Limbs:
                return product(coefficient, x.astype(jnp.float32), exponent)

            limbs = jax.tree.map(limbs_of, addend, acc._by_leaf(acc.grid.exponent))
            return acc.replace(
                high=jax.tree.map(lambda high, new: high + new.high, acc.high, limbs),
                low=jax.tree.map(lambda low, new: low + new.low, acc.low, limbs),
            )

        return in_place(is_wanted, add, self._promoted(peak))

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
        return self.fold(is_used.astype(jnp.float32), first.combined(coefficients, second))

    def combined(self, coefficients: jax.Array, other: Self) -> Tree:
        def one(*limbs: Limbs) -> jax.Array:
            return combination(coefficients, limbs)

        return jax.tree.map(one, self._limbs(), other._limbs(), is_leaf=_is_limbs)

    def read(self) -> Tree:
        return jax.tree.map(to_float, self._limbs(), is_leaf=_is_limbs)

    def snapped(self, addend: Tree) -> Tree:
        start = self.grid.start.reshape(-1, self.grid.start.shape[-1])[0]  # that of all slots
        exponent = exponent_for(binary_exponent(_largest(addend)), start)

        def snap(x: jax.Array, exponent: jax.Array) -> jax.Array:
            return to_float(quantize(x.astype(jnp.float32), exponent))

        return jax.tree.map(snap, addend, self._by_leaf(exponent))

    def total(self) -> Tree:
        exponent = jnp.max(self.grid.exponent, axis=0)

        def one(
            high: jax.Array, low: jax.Array, levels: jax.Array, exponent: jax.Array
        ) -> jax.Array:
            levels = levels.reshape(-1, *[1] * (high.ndim - 1))
            low = jnp.where(levels == 0, low, jnp.where(levels == 1, high, 0))
            high = jnp.where(levels == 0, high, 0)
            return to_float(Limbs(jnp.sum(high, axis=0), jnp.sum(low, axis=0), exponent))

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

    def _limbs(self) -> Tree:
        """Its leaves as `Limbs`."""
        return jax.tree.map(Limbs, self.high, self.low, self._by_leaf(self.grid.exponent))

    def _by_leaf(self, numbers: jax.Array) -> Tree:
        """Numbers [..., N], one a leaf, as a tree."""
        one_each = [numbers[..., at] for at in range(numbers.shape[-1])]
        return jax.tree.unflatten(jax.tree.structure(self.high), one_each)


def start_for(peak: int) -> int:
    """The grid for a step whose largest addend is like one below 2**(peak + 1)."""
    return max(peak + 1 + MARGIN_BITS - TOP_BITS, FIRST_EXPONENT)


def _is_limbs(tree: Any) -> bool:
    return isinstance(tree, Limbs)


def _largest(tree: Tree) -> jax.Array:
    """The largest magnitude of every leaf, float32 [N]; NaN where there is one."""
    return jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in jax.tree.leaves(tree)])
