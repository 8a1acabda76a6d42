"""What the backward pass of a segment reads, kept so that its replay needs no second forward pass.

The function that jax.vjp returns is a pytree, whose leaves are what the backward pass reads. Three
kinds need no keeping: parameters and prefix are inputs of the replay too, and integers and masks
follow from the tokens. The replay traces the same forward pass for the structure, puts the kept
leaves in its place, and the compiler drops what nothing reads any more.

Invariant: `kept` and `restored` see vjps of one function at one shape. Called by `turn_replay.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Residuals = list[Any]  # of one segment, or of a pool of them with a leading axis


def kept(pull_back: Callable[..., Any], inputs: Any) -> Residuals:
    """The leaves of `pull_back` to keep.

    Args:
      inputs: what it was made at, a pytree.
    """
    leaves = jax.tree.leaves(pull_back)
    return [leaves[at] for at in _places(leaves, inputs)]


def restored(
    pull_back: Callable[..., Any], inputs: Any, residuals: Sequence[Any]
) -> Callable[..., Any]:
    """`pull_back` with the leaves that were kept of another; arguments as of `kept`."""
    leaves, structure = jax.tree.flatten(pull_back)
    for at, leaf in zip(_places(leaves, inputs), residuals, strict=True):
        leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)


def _places(leaves: Sequence[Any], inputs: Any) -> list[int]:
    own = {id(leaf) for leaf in jax.tree.leaves(inputs)}
    return [
        at
        for at, leaf in enumerate(leaves)
        if id(leaf) not in own and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
