"""The compiled programs of turn replay, on the mesh and beside the update of `Programs`.

As all of the learner's programs but the update they run under shard_map, manual over `data`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner import turn_replay
from thundersync_jax.learner.buckets import Lanes, pad_lanes
from thundersync_jax.learner.placement import device_bytes
from thundersync_jax.learner.program_names import Caches, Name, Part, Shapes, Turn
from thundersync_jax.learner.programs import Program, Programs, zeros
from thundersync_jax.learner.residuals import Residuals
from thundersync_jax.learner.streaming import Params, ScoreSettings
from thundersync_jax.learner.sums import Sum
from thundersync_jax.learner.turn_replay import TrajectoryCaches
from thundersync_jax.learner.turn_schedule import SegmentKind
from thundersync_jax.model.kv_cache import KeysValues

PART = {
    SegmentKind.FORWARD: Part.FORWARD,
    SegmentKind.STREAM: Part.SCORE,
    SegmentKind.CLOSE: Part.SCORE,
    SegmentKind.REPLAY: Part.REPLAY,
    SegmentKind.REPLAY_KEPT: Part.REPLAY_KEPT,
    SegmentKind.WHOLE: Part.WHOLE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShapes:
    """The pool of every replica: `num_caches` trajectories of up to `length` positions.

    Attributes:
      num_places: how many of them the device holds; the others lie in the host.
      is_held: turns are folded into the held gradients, not into the batch sum.
      num_residuals: segments of every shape whose residuals are kept.
      shapes: (prefix bucket, bucket) of them.
    """

    num_caches: int
    length: int
    num_places: int
    is_held: bool = False
    num_residuals: int = 0
    shapes: tuple[tuple[int, int], ...] = ()


def held_caches(config: LearnerSection) -> CacheShapes:
    """Those of trajectories whose turns run ahead of their content."""
    size = config.num_turn_caches
    return CacheShapes(num_caches=size, num_places=size, length=config.buckets[-1], is_held=True)


class TurnPrograms(Programs):
    """`Programs` with those of turn replay.

    Attributes:
      caches: trajectory caches on the device, abstract TrajectoryCaches; None without any.
      host_caches: those of the pool that lie in the host, abstract; None without any.
      num_places: trajectory caches of a replica on the device.
      num_residuals: segments of every shape whose residuals are kept.
    """

    def __init__(
        self,
        settings: ScoreSettings,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        caches: CacheShapes,
        shapes: Shapes,
    ) -> None:
        super().__init__(settings, optimizer, mesh, shapes)
        self.num_residuals = caches.num_residuals
        self._is_held = caches.is_held
        self.num_places = caches.num_places
        if caches.num_places:
            pool = self._pool(caches.num_places, caches.length)
            kept = {shape: self._residuals(pool.kv, *shape) for shape in caches.shapes}
            self.caches = pool.replace(residuals=kept)
        if caches.num_caches > caches.num_places:
            self.host_caches = self._pool(caches.num_caches - caches.num_places, caches.length)

    @property
    def turn_sums(self) -> tuple[Any, ...]:
        """The buffers that turns are folded into, abstract."""
        return (self.placement.held,) * self.shapes.num_held if self._is_held else self._sums

    def _pool(self, num_caches: int, length: int) -> TrajectoryCaches:
        """So many caches without residuals, abstract."""
        place, pool = self.placement, (self._settings.model, num_caches, length)
        kv, ledger = (
            place.keys_values(*pool, dtype)
            for dtype in (self._settings.model.dtype, place.scalar_dtype)
        )
        return TrajectoryCaches(kv=kv, ledger=ledger)

    def _residuals(self, kv: KeysValues, prefix_bucket: int, bucket: int) -> Residuals:
        """Of the segments of one shape [R, N, ...], abstract; each replica is one device."""
        function = functools.partial(turn_replay.segment_residuals, self._settings, prefix_bucket)
        lanes = pad_lanes([[]] * self.num_replicas, 1, bucket, self.placement.scalar_dtype)
        lane = jax.tree.map(lambda x: x[:, 0], lanes.replace(num_lanes=None))
        with jax.set_mesh(self._mesh):
            found = jax.eval_shape(self._on_replicas(function, 3), self.placement.params, kv, lane)
        return self.placement.local(
            [
                jax.ShapeDtypeStruct((x.shape[0], self.num_residuals, *x.shape[1:]), x.dtype)
                for x in found
            ]
        )

    def zero_caches(self) -> TrajectoryCaches | None:
        return None if self.caches is None else self._get(Caches.ZERO)()

    def temporaries(self) -> dict[Name, int]:
        found = super().temporaries()
        if Caches.WRITE in found:
            found[Caches.WRITE] += device_bytes(self._page)
        return {name: size for name, size in found.items() if name != Caches.ZERO}

    def read_cache(self, caches: TrajectoryCaches, index: np.ndarray) -> TrajectoryCaches:
        """`turn_replay.read_cache` on every replica. index int32 [R]."""
        return self._get(Caches.READ)(caches, index)

    def write_cache(
        self, caches: TrajectoryCaches, index: np.ndarray, cache: TrajectoryCaches
    ) -> TrajectoryCaches:
        """`turn_replay.write_cache` on every replica; caches are donated. index int32 [R]."""
        return self._get(Caches.WRITE)(caches, index, cache)

    def forward(
        self, name: Turn, params: Params, caches: TrajectoryCaches, lanes: Lanes
    ) -> TrajectoryCaches:
        """`turn_replay.segment_forward` on every replica; caches are donated."""
        return self._get(name)(params, caches, lanes)

    def score(
        self,
        name: Turn,
        params: Params,
        buffers: tuple[Sum, ...],
        caches: TrajectoryCaches | None,
        coefficients: np.ndarray,
        ledger_weights: np.ndarray,
        lanes: Lanes,
    ) -> tuple[tuple[Sum, ...], TrajectoryCaches | None, jax.Array]:
        """`turn_replay.score_segment` on every replica; buffers and caches are donated.

        Args:
          coefficients: [R, num buffers, K]; ledger_weights: [R, K].
        """
        scalars = (self._scalars(coefficients), self._scalars(ledger_weights))
        return self._get(name)(params, buffers, caches, *scalars, lanes)

    def replay(
        self,
        name: Turn,
        params: Params,
        buffers: tuple[Sum, ...],
        caches: TrajectoryCaches,
        coefficients: np.ndarray,
        lanes: Lanes,
    ) -> tuple[tuple[Sum, ...], TrajectoryCaches, jax.Array]:
        """`turn_replay.replay_segment` on every replica; buffers and caches are donated.

        Args:
          coefficients: [R, num buffers, K].
        """
        return self._get(name)(params, buffers, caches, self._scalars(coefficients), lanes)

    def _declare(self, name: Name) -> Program:
        match name:
            case Turn():
                return self._turn_program(name)
            case Caches():
                return self._cache_program(name)
            case _:
                return super()._declare(name)

    @property
    def _page(self) -> Any:
        """One cache of every replica, abstract."""

        def one(x: Any) -> Any:
            spec = PartitionSpec(x.sharding.spec[0], *x.sharding.spec[2:])
            sharding = NamedSharding(self._mesh, spec)
            return jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype, sharding=sharding)

        return jax.tree.map(one, self.caches.replace(residuals={}))

    def _cache_program(self, name: Caches) -> Program:
        index = self.placement.local(np.zeros(self.num_replicas, np.int32))
        match name:
            case Caches.ZERO:
                return zeros(self.caches)
            case Caches.READ:
                return Program(
                    self._on_replicas(turn_replay.read_cache, 2, num_shared=0),
                    donated=(),
                    arguments=(self.caches, index),
                    results=self._page,
                )
            case Caches.WRITE:
                return Program(
                    self._on_replicas(turn_replay.write_cache, 3, num_shared=0),
                    donated=(0,),
                    arguments=(self.caches, index, self._page),
                    results=self.caches,
                )

    def _turn_program(self, name: Turn) -> Program:
        place, sums, settings = self.placement, self.turn_sums, self._settings
        num_lanes = self.lanes_per_call(name.bucket)
        coefficients = place.local_scalars(len(sums), num_lanes)
        lanes, stats = place.lanes(num_lanes, name.bucket), place.stats(num_lanes)
        match name.part:
            case Part.FORWARD:
                forward = functools.partial(
                    turn_replay.segment_forward, settings, name.prefix_bucket
                )
                return Program(
                    self._on_replicas(forward, 3),
                    donated=(1,),
                    arguments=(place.params, self.caches, lanes),
                    results=self.caches,
                )
            case Part.REPLAY | Part.REPLAY_KEPT:
                is_kept = name.part is Part.REPLAY_KEPT
                function = turn_replay.replay_kept if is_kept else turn_replay.replay_segment
                replay = functools.partial(function, settings, name.prefix_bucket)
                return Program(
                    self._on_replicas(replay, 5),
                    donated=(1, 2),
                    arguments=(place.params, sums, self.caches, coefficients, lanes),
                    results=(sums, self.caches, stats),
                )
            case Part.SCORE | Part.WHOLE:
                caches = self.caches if name.part is Part.SCORE else None
                score = functools.partial(turn_replay.score_segment, settings, name.prefix_bucket)
                scalars = (coefficients, place.local_scalars(num_lanes))
                return Program(
                    self._on_replicas(score, 6),
                    donated=(1, 2),
                    arguments=(place.params, sums, caches, *scalars, lanes),
                    results=(sums, caches, stats),
                )
