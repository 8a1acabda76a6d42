"""`WeightStore`: the engine's own copy of the policy's weights, and their version.

The learner donates what trains to its next update, so the engine never shares that. What is frozen
nobody donates: it is placed once, and shared where it lies as the engine wants it. JetStream binds
its `params` argument once per thread: it is given this store, which is read at every call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from thundersync_jax.model import transformer
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.trainable import join, partition
from thundersync_jax.serving.placement import place_weights, shardings
from thundersync_jax.transport.client import ServingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """One version of the policy in `config.dtype`."""

    params: transformer.Params
    version: int


class WeightStore:
    """Holds one version. Only the owner of the decode state calls `publish` and `current`."""

    def __init__(self, config: TransformerConfig, mesh: Mesh) -> None:
        self._config = config
        self._stored = transformer.abstract_params(config)
        self._weights = place_weights(mesh, config)
        self._copy: Any = None
        self._current: Weights | None = None
        self._published: list[Any] = []  # the frozen arrays as they came last, and
        self._frozen: transformer.Params = {}  # where the engine has them

    @property
    def abstract(self) -> transformer.Params:
        """Shape, dtype and place of the engine's weights."""
        return self._weights

    def compile(self) -> None:
        """Compiles the copy, so that publishing compiles nothing."""

        def copy(params: transformer.Params) -> transformer.Params:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), params)

        wanted, _ = partition(self._config, self._weights)
        self._copy = jax.jit(copy, out_shardings=shardings(wanted)).lower(wanted).compile()

    def publish(self, params: transformer.Params, version: int) -> None:
        """Copies what trains of `params`; that may be donated as soon as this returns.

        Args:
          params: as the learner's replicas hold them, or the masters, which are cast first. The
            frozen ones are taken as they are, and not again while they are the same arrays.
          version: not below the present one.
        """
        self._check_version(version)
        self._check(params)
        self._current = None  # frees the previous version before the copy is made
        trainable, frozen = partition(self._config, params)
        wanted, wanted_frozen = partition(self._config, self._weights)
        leaves = jax.tree.leaves(frozen)
        if [id(x) for x in leaves] != [id(x) for x in self._published]:
            self._published, self._frozen = leaves, _placed(frozen, wanted_frozen)
        copied = self._copy(_placed(trainable, wanted))
        joined = jax.block_until_ready(join(copied, self._frozen))
        self._current = Weights(params=joined, version=version)

    def current(self) -> Weights:
        if self._current is None:
            raise ServingError(
                "no weights: publish(params, version) comes before the first request"
            )
        return self._current

    def _check_version(self, version: int) -> None:
        least = 0 if self._current is None else self._current.version
        if type(version) is not int or version < least:
            raise ServingError(
                f"weights of version {version!r} were published, expected an int of at least "
                f"{least}: versions only grow"
            )

    def _check(self, params: transformer.Params) -> None:
        want_tree: Any = jax.tree.structure(self._weights)
        got_tree: Any = jax.tree.structure(params)
        if got_tree != want_tree:
            raise ServingError(
                f"published parameters have the structure {got_tree}, expected {want_tree}: were "
                "they made for another configuration?"
            )
        for (path, want), stored, got in zip(
            jax.tree_util.tree_leaves_with_path(self._weights),
            jax.tree.leaves(self._stored),
            jax.tree.leaves(params),
            strict=True,
        ):
            if got.shape != want.shape or got.dtype not in (want.dtype, stored.dtype):
                raise ServingError(
                    f"published parameter {jax.tree_util.keystr(path)} is {got.dtype}{got.shape}, "
                    f"expected {want.dtype}{want.shape}"
                )


def _placed(params: transformer.Params, like: transformer.Params) -> transformer.Params:
    """Where `like` is, in its dtype; the same arrays where they already are."""
    on_device = jax.device_put(params, shardings(like))
    return jax.tree.map(lambda x, want: x.astype(want.dtype), on_device, like)
