"""`Sum`: what a sum of gradients can do on a device, and `OrderedSum`, the plain one.

A sum is a pytree that is donated to the programs and comes back. `exact_sum.py` has the other kind;
`reduction.py` says which kind a learner keeps. The streaming programs know only this interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

if TYPE_CHECKING:
    from thundersync_jax.learner.exact_sum import Grid

Tree = Any  # a pytree of arrays
Buffers = TypeVar("Buffers")


class Sum(Protocol):
    """A sum of trees of one structure. Methods are pure; all but `started` are traced."""

    @property
    def grid(self) -> Grid | None:
        """What the host must know of it, if anything."""

    @classmethod
    def abstract(cls, values: Tree, numbers: Callable[..., Any]) -> Self:
        """The sum of abstract float values.

        Args:
          numbers: an abstract int32 array of the given trailing shape, one entry a replica or slot.
        """

    @staticmethod
    def weights(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """On the host: these float64 coefficients as arrays of coefficients that it takes."""

    def fold(self, coefficient: jax.Array, addend: Tree) -> Self:
        """self + coefficient * addend; with a coefficient of 0 it is not even read.

        Args:
          coefficient: one of the weights of any kind of sum, or a number [].
        """

    def close(self, coefficients: jax.Array, is_used: jax.Array, first: Self, second: Self) -> Self:
        """self + a first + b second with (a, b) = `coefficients`, two of `weights`, where
        `is_used`.
        """

    def combined(self, coefficients: jax.Array, other: Self) -> Tree:
        """The value of a self + b other."""

    def read(self) -> Tree:
        """Its value."""

    def snapped(self, addend: Tree) -> Tree:
        """What `read` gives of a sum of this addend alone."""

    def total(self) -> Tree:
        """The value of the replicas' sums [R, ...] together."""

    def cleared(self) -> Self:
        """Zero again."""

    def part(self, slot: jax.Array, length: int | None) -> Self:
        """One slot of sums [S, L, P, ...], its first `length` positions."""

    def with_part(self, slot: jax.Array, part: Self) -> Self:
        """`part` in that slot."""

    def started(self, exponents: Sequence[int]) -> Self:
        """On the host, of a zero sum: the grid that a step begins with."""


class OrderedSum(struct.PyTreeNode):
    """The values themselves, in at least float32: their last bits depend on the order.

    Attributes:
      values: arrays.
    """

    values: Tree

    @property
    def grid(self) -> Grid | None:
        return None

    @classmethod
    def abstract(cls, values: Tree, numbers: Callable[..., Any]) -> Self:
        return cls(values=values)

    @staticmethod
    def weights(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return values.astype(dtype)

    def fold(self, coefficient: jax.Array, addend: Tree) -> Self:
        nearest = jnp.ravel(coefficient)[0]  # of the weights of an exact sum

        def add(acc: Self) -> Self:
            return acc.replace(
                values=jax.tree.map(
                    lambda a, g: a + nearest.astype(a.dtype) * g.astype(a.dtype),
                    acc.values,
                    addend,
                )
            )

        return in_place(nearest != 0, add, self)

    def close(self, coefficients: jax.Array, is_used: jax.Array, first: Self, second: Self) -> Self:
        def add(batch: Self) -> Self:
            added = first.combined(coefficients, second)
            return batch.replace(values=jax.tree.map(jnp.add, batch.values, added))

        return in_place(is_used, add, self)

    def combined(self, coefficients: jax.Array, other: Self) -> Tree:
        def one(first: jax.Array, second: jax.Array) -> jax.Array:
            a, b = coefficients.astype(first.dtype)
            return a * first + b * second

        return jax.tree.map(one, self.values, other.values)

    def read(self) -> Tree:
        return self.values

    def snapped(self, addend: Tree) -> Tree:
        return addend

    def total(self) -> Tree:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), self.values)

    def cleared(self) -> Self:
        return jax.tree.map(jnp.zeros_like, self)

    def part(self, slot: jax.Array, length: int | None) -> Self:
        return jax.tree.map(lambda x: x[slot, :, :length], self)

    def with_part(self, slot: jax.Array, part: Self) -> Self:
        def store(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[slot, :, : new.shape[1]].set(new)

        return jax.tree.map(store, self, part)

    def started(self, exponents: Sequence[int]) -> Self:
        return self


def fold_at(acc: Sum, slot: jax.Array, coefficient: jax.Array, addend: Tree) -> Sum:
    """`Sum.fold` into one slot, as far as the addend reaches."""
    length = jax.tree.leaves(addend)[0].shape[1]
    return acc.with_part(slot, acc.part(slot, length).fold(coefficient, addend))


def clear_at(acc: Sum, slot: jax.Array, length: int | None, is_wanted: jax.Array) -> Sum:
    """One slot is zero again, where wanted."""
    part = acc.part(slot, length)
    kept = jax.tree.map(lambda new, old: jnp.where(is_wanted, new, old), part.cleared(), part)
    return acc.with_part(slot, kept)


def in_place(
    is_wanted: jax.Array, change: Callable[[Buffers], Buffers], buffers: Buffers
) -> Buffers:
    """`change(buffers)` where wanted; otherwise the buffers are not even read.

    A loop of one round or none: XLA updates its carry in place everywhere, while the branches of a
    conditional copy theirs on the CPU.
    """
    rounds = is_wanted.astype(jnp.int32)
    return jax.lax.fori_loop(0, rounds, lambda _, buffers: change(buffers), buffers)
