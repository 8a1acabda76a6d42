"""`WeightStore`: the engine's own copy of the policy's weights, and their version.

The learner donates its buffers to its next update, so the engine never shares them. JetStream binds
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
        self._dtype = jnp.dtype(config.dtype)
        self._stored = transformer.abstract_params(config)
        self._weights = place_weights(mesh, config)
        self._copy: Any = None
        self._current: Weights | None = None

    @property
    def abstract(self) -> transformer.Params:
        """Shape, dtype and place of the engine's copy."""
        return self._weights

    def compile(self) -> None:
        """Compiles the copy, so that publishing compiles nothing."""

        def copy(params: transformer.Params) -> transformer.Params:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), params)

        self._copy = (
            jax.jit(copy, out_shardings=shardings(self._weights)).lower(self._weights).compile()
        )

    def publish(self, params: transformer.Params, version: int) -> None:
        """Copies `params`; they may be donated or changed as soon as this returns.

        Args:
          params: as the learner's replicas hold them, or the masters, which are cast first.
          version: not below the present one.
        """
        self._check_version(version)
        self._check(params)
        self._current = None  # frees the previous version before the copy is made
        on_device = jax.device_put(params, shardings(self._weights))
        if any(x.dtype != self._dtype for x in jax.tree.leaves(on_device)):
            on_device = jax.tree.map(lambda x: x.astype(self._dtype), on_device)
        self._current = Weights(
            params=jax.block_until_ready(self._copy(on_device)), version=version
        )

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
