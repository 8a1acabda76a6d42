"""Integers of 40 bits in two int32 arrays: the arithmetic of `exact_sum.py` on one array.

On the grid of the multiples of 2**exponent, which is one number for the whole array,

    value = (high * 2**20 + low) * 2**exponent.

What is rounded to a grid has |high|, |low| <= 2**19, and its rounding to the grid that is coarser
by 2**20 is `high` alone: a sum of such limbs is promoted by dropping the lower one. Every product
of floats here is exact in float32, so it does not matter whether a compiler fuses it with an
addition. All functions are traced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

LIMB_BITS = 20
TOP_BITS = 2 * LIMB_BITS - 1  # of the largest value that a grid holds, without its sign
MAX_LIMB = 2**19 + 2**17  # of what `product` gives
FIRST_EXPONENT = -130  # the lowest: every magnitude of float32 is promoted from there
NO_PEAK = -127  # binary exponent of zero
_PEAK_LIMIT = 125  # beyond, 2**-(exponent + 20) could leave the normal numbers
OVERFLOW = 2**20  # the exponent of limbs that read NaN
_HALF_BITS = 12  # of a float32's 24: the product of two halves is exact


class Limbs(NamedTuple):
    """High and low, int32 of one shape, and the grid's exponent, int32 []."""

    high: jax.Array
    low: jax.Array
    exponent: jax.Array


def quantize(x: jax.Array, exponent: jax.Array) -> Limbs:
    """Float32 values below 2**(exponent + 39), each rounded to the nearest."""
    return _limbs(x * power_of_two(-(exponent + LIMB_BITS)), exponent)


def product(coefficient: jax.Array, x: jax.Array, exponent: jax.Array) -> Limbs:
    """coefficient * x of float32 values, below 2**(exponent + 39), rounded to the grid.

    It is rounded as the sum of two floats, which are within 2**-36 of the true product; |low| is
    at most 2**19 + 2**17.

    Args:
      coefficient: float32 [], or [2]: a number and what float32 leaves of it. Neither is 0.
    """
    first, *rest = jnp.ravel(coefficient)
    scale = jnp.minimum(binary_exponent(first), 126)
    c1, c2 = _halves(first * power_of_two(-scale))
    x1, x2 = _halves(_scaled(x, scale - exponent - LIMB_BITS))
    large, middle = c1 * x1, c1 * x2 + c2 * x1  # the two of `middle` have at most 23 bits
    head = large + middle
    tail = (middle - (head - large)) + c2 * x2
    for left in rest:
        c3, _ = _halves(left * power_of_two(-scale))
        tail = tail + c3 * x1
    limbs = _limbs(head, exponent)
    return limbs._replace(low=limbs.low + _rounded(tail))


def combination(coefficients: jax.Array, values: Sequence[Limbs]) -> jax.Array:
    """The float32 nearest to a u + b v, but for two roundings of the result and an error of 2**-35
    of the larger of |a u| and |b v|: these may cancel.

    Args:
      coefficients: (a, b), each as `product` takes it, but that it may be 0.
      values: sums, of 51 bits each.
    """
    terms = [
        (c, x) for c, limbs in zip(coefficients, values, strict=True) for x in to_floats(limbs)
    ]
    largest = [jnp.abs(jnp.ravel(c)[0]) * jnp.max(jnp.abs(x)) for c, x in terms]
    exponent = closest_exponent(binary_exponent(jnp.max(jnp.stack(largest))))
    products = [product(c, x, exponent) for c, x in terms]
    high = functools.reduce(jnp.add, [limbs.high for limbs in products])
    low = functools.reduce(jnp.add, [limbs.low for limbs in products])
    return to_float(Limbs(high, low, exponent))


def to_float(limbs: Limbs) -> jax.Array:
    """The float32 nearest to their value, but for two roundings; it depends on nothing else."""
    high, low, exponent = _carried(limbs)
    scaled = high.astype(jnp.float32) + low.astype(jnp.float32) * 2.0**-LIMB_BITS
    value = scaled * power_of_two(exponent + LIMB_BITS)
    return jnp.where(exponent == OVERFLOW, jnp.nan, value)


def to_floats(limbs: Limbs) -> tuple[jax.Array, jax.Array]:
    """Two float32 whose sum is the limbs' value, but for 2**-47 of it."""
    high, low, exponent = _carried(limbs)
    head = high.astype(jnp.float32)
    left = ((high - head.astype(jnp.int32)) << LIMB_BITS) + low
    tail = left.astype(jnp.float32) * 2.0**-LIMB_BITS
    unit = power_of_two(exponent + LIMB_BITS)
    return jnp.where(exponent == OVERFLOW, jnp.nan, head * unit), tail * unit


def exponent_for(peak: jax.Array, exponent: jax.Array) -> jax.Array:
    """The grid that `exponent` is promoted to for addends below 2**(peak + 1)."""
    missing = peak + 1 - TOP_BITS - exponent
    levels = jnp.maximum(-(-missing // LIMB_BITS), 0)
    return jnp.where(peak >= _PEAK_LIMIT, OVERFLOW, exponent + levels * LIMB_BITS)


def closest_exponent(peak: jax.Array) -> jax.Array:
    """The finest grid for values below 2**(peak + 1)."""
    return jnp.where(
        peak >= _PEAK_LIMIT, OVERFLOW, jnp.maximum(peak + 1 - TOP_BITS, FIRST_EXPONENT)
    )


def binary_exponent(x: jax.Array) -> jax.Array:
    """floor(log2 |x|) of float32 values; NO_PEAK of 0 and below the normal numbers, 128 of what is
    not finite.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return ((bits >> 23) & 255) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent in float32, exactly; of the normal numbers."""
    bits = (jnp.clip(exponent, -126, 127) + 127) << 23
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def _limbs(scaled: jax.Array, exponent: jax.Array) -> Limbs:
    """Of values in units of the high limb."""
    high = jnp.round(scaled)
    return Limbs(high.astype(jnp.int32), _rounded(scaled - high), exponent)


def _rounded(scaled: jax.Array) -> jax.Array:
    return jnp.round(scaled * 2.0**LIMB_BITS).astype(jnp.int32)


def _carried(limbs: Limbs) -> Limbs:
    """The same for all limbs of one value: |low| <= 2**19."""
    high, low, exponent = limbs
    carry = (low >> LIMB_BITS) + ((low >> (LIMB_BITS - 1)) & 1)
    return Limbs(high + carry, low - (carry << LIMB_BITS), exponent)


def _scaled(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2**exponent, exactly if both are normal numbers: in two steps, for 2**exponent may not be
    one.
    """
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x1, x2) with x = x1 + x2: the nearest of 12 bits, and what it leaves, of at most 11."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    half = jnp.int32(1 << (_HALF_BITS - 1))
    first = jax.lax.bitcast_convert_type((bits + half) & jnp.int32(-1 << _HALF_BITS), jnp.float32)
    return first, x - first
