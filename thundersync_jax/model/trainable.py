"""Which parameters train: all of them, or the adapters of a configuration that has some.

`partition` splits a tree with the structure of the parameters (their values, shapes or places),
`join` puts the parts together again, and `parameter_vjp` differentiates in one part alone. Who
keeps sums of gradients, moments or checkpoints keeps them of the first part; with nothing frozen it
is the whole tree, and the other is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from thundersync_jax.model.layers import ADAPTER
from thundersync_jax.model.presets import TransformerConfig

Tree = Any  # nested dicts, as the parameters are


def partition(config: TransformerConfig, tree: Tree) -> tuple[Tree, Tree]:
    """(what trains, what is frozen) of a tree like the parameters."""
    if config.lora is None:
        return tree, {}
    flat = flatten_dict(tree)
    trainable = {path: leaf for path, leaf in flat.items() if ADAPTER in path}
    frozen = {path: leaf for path, leaf in flat.items() if ADAPTER not in path}
    return unflatten_dict(trainable), unflatten_dict(frozen)


def join(trainable: Tree, frozen: Tree) -> Tree:
    """The tree of which these are the parts."""
    return unflatten_dict({**flatten_dict(trainable), **flatten_dict(frozen)})


def parameter_vjp(
    config: TransformerConfig,
    function: Callable[..., Any],
    params: Tree,
    *inputs: Any,
    has_aux: bool = False,
) -> Any:
    """`jax.vjp` of function(params, *inputs), in what trains of the parameters and in the inputs.

    No gradient of a frozen parameter is computed, nor what only that would need.
    """
    trainable, frozen = partition(config, params)

    def of_trainable(trainable: Tree, *inputs: Any) -> Any:
        return function(join(trainable, frozen), *inputs)

    vjp: Any = jax.vjp  # an overload for each has_aux
    return vjp(of_trainable, trainable, *inputs, has_aux=has_aux)


def fingerprint(params: Tree) -> str:
    """Of names, shapes and bits, the same on every mesh; "" without parameters."""
    flat = flatten_dict(params, sep="/")
    if not flat:
        return ""
    sums = jax.device_get(_checksums(flat))
    text = [f"{name} {x.dtype}{x.shape} {sums[name]}" for name, x in sorted(flat.items())]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


@jax.jit
def _checksums(flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Of every array, sums of its bits modulo 2**32, each weighted by its place."""

    def checksum(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize == 8:  # a whole new axis, of halves
            low, high = jnp.moveaxis(jax.lax.bitcast_convert_type(x, jnp.uint32), -1, 0)
            bits = low + high * jnp.uint32(0x85EBCA77)
        else:
            bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits * (place * jnp.uint32(0x9E3779B1) | jnp.uint32(1)), dtype=jnp.uint32)

    return jax.tree.map(checksum, flat)
