"""The learner's compiled programs: one per (path, bucket), one close, one update. Nothing else ever
compiles.

Owns no state: buffers go in donated and come back. `warm_up` compiles all of it ahead of time; a
  program that is asked
for before is compiled then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from thundersync_jax.learner.buckets import Lanes, lanes_shape
from thundersync_jax.learner.compilation import compile_all
from thundersync_jax.learner.groups import Path
from thundersync_jax.learner.streaming import (
    LaneStats,
    Params,
    ScoreSettings,
    accumulate,
    apply_update,
    close_group,
    zeros_like_params,
)

_NUM_BUFFERS = {Path.DIRECT: 1, Path.STREAM: 2}


class Programs:
    """Compiled programs for one model, ladder and optimizer."""

    def __init__(
        self,
        settings: ScoreSettings,
        optimizer: optax.GradientTransformation,
        params: Params,
        *,
        num_lanes: int,
    ) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._num_lanes = num_lanes
        self._params = jax.eval_shape(lambda p: p, params)
        self._accumulator = jax.eval_shape(zeros_like_params, self._params)
        # Coefficients travel in the accumulators' precision: fp32, or fp64 for fp64 parameters.
        self.scalar_dtype = np.dtype(jax.tree.leaves(self._accumulator)[0].dtype)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self.zeros = jax.jit(zeros_like_params)

    @property
    def num_programs(self) -> int:
        return len(self._compiled)

    def warm_up(self, buckets: Sequence[int], *, has_pool: bool) -> None:
        """Compiles every program that a run with this ladder can need, in parallel."""
        paths = [Path.DIRECT, Path.STREAM] if has_pool else [Path.DIRECT]
        names: list[Any] = [(path, bucket) for path in paths for bucket in buckets]
        names += ["update", *(["close"] if has_pool else [])]
        missing = {name: self._lowering(name) for name in names if name not in self._compiled}
        self._compiled |= compile_all(missing)

    def fold(
        self,
        path: Path,
        params: Params,
        buffers: tuple[Params, ...],
        coefficients: np.ndarray,
        lanes: Lanes,
    ) -> tuple[tuple[Params, ...], LaneStats]:
        """`streaming.accumulate` with `buffers` donated; coefficients [num buffers, K]."""
        bucket = lanes.tokens.shape[1]
        program = self._get((path, bucket))
        return program(params, buffers, coefficients.astype(self.scalar_dtype), lanes)

    def close(
        self, batch: Params, pair: tuple[Params, Params], coefficients: tuple[float, float]
    ) -> tuple[Params, tuple[Params, Params]]:
        """`streaming.close_group` with everything donated."""
        batch, *zeroed = self._get("close")(
            batch, *pair, np.asarray(coefficients, self.scalar_dtype)
        )
        return batch, (zeroed[0], zeroed[1])

    def update(
        self, params: Params, opt_state: optax.OptState, batch: Params, denominator: float
    ) -> tuple[Params, optax.OptState, Params, jax.Array]:
        """`streaming.apply_update` with everything donated."""
        return self._get("update")(params, opt_state, batch, self.scalar_dtype.type(denominator))

    def _get(self, name: Any) -> jax.stages.Compiled:
        if name not in self._compiled:
            self._compiled[name] = self._lowering(name)().compile()
        return self._compiled[name]

    def _lowering(self, name: Any) -> Callable[[], jax.stages.Lowered]:
        scalar = functools.partial(jax.ShapeDtypeStruct, dtype=self.scalar_dtype)
        acc = self._accumulator
        if name == "close":
            program = jax.jit(close_group, donate_argnums=(0, 1, 2))
            return lambda: program.lower(acc, acc, acc, scalar((2,)))
        if name == "update":
            program = jax.jit(
                functools.partial(apply_update, self._optimizer), donate_argnums=(0, 1, 2)
            )
            opt_state = jax.eval_shape(self._optimizer.init, self._params)
            return lambda: program.lower(self._params, opt_state, acc, scalar(()))
        path, bucket = name
        num_buffers = _NUM_BUFFERS[path]
        program = jax.jit(functools.partial(accumulate, self._settings), donate_argnums=(1,))
        lanes = lanes_shape(self._num_lanes, bucket)
        coefficients = scalar((num_buffers, self._num_lanes))
        return lambda: program.lower(self._params, (acc,) * num_buffers, coefficients, lanes)
