"""`CachePages`: trajectory caches of which the device holds some and pinned host memory the others.

Before a call the caches of its lanes are brought to the device, and those that have to make room
are copied to the host, the least recently used one first. A trajectory that begins brings nothing,
and one that is over leaves nothing. `TurnCaches` calls `reach` before every call.

One exchange handles a place of every replica: that cache is read, the shards of the replicas where
something leaves are copied to the host and those where something comes are replaced, and it is
written again. So a replica that has nothing to exchange gets back what it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from thundersync_jax.learner.cache_places import CachePlaces, Exchange
from thundersync_jax.learner.turn_programs import TurnPrograms
from thundersync_jax.learner.turn_replay import TrajectoryCaches
from thundersync_jax.learner.turn_schedule import SegmentWork
from thundersync_jax.learner.turns import TurnSequence

Exchanges = Sequence[Exchange[TurnSequence] | None]  # of every replica


class CachePages:
    """Owns what lies in the host.

    Attributes:
      num_moved: caches that were copied, either way.
    """

    def __init__(self, programs: TurnPrograms) -> None:
        self._programs = programs
        self.num_moved = 0
        self.clear()

    def clear(self) -> None:
        """Forgets every trajectory."""
        programs = self._programs
        self._places = [
            CachePlaces[TurnSequence](programs.num_places) for _ in range(programs.num_replicas)
        ]
        # Of every trajectory in the host: (leaf of its cache, device that it comes from) -> shard.
        self._pages: dict[TurnSequence, dict[tuple[int, jax.Device], jax.Array]] = {}

    def place(self, sequence: TurnSequence) -> int:
        """Where on the device the cache of a trajectory lies that the last `reach` was for."""
        assert sequence.cache is not None
        return self._places[sequence.cache.replica][sequence]

    def reach(self, caches: TrajectoryCaches, work: SegmentWork) -> TrajectoryCaches:
        """The caches, donated, with those of the call's lanes among them."""
        exchanges = []
        for places, lanes in zip(self._places, work.replicas, strict=True):
            for sequence in places.release(lambda sequence: sequence.cache is None):
                del self._pages[sequence]
            exchanges.append(places.reach([lane.sequence for lane in lanes]))
        for every in itertools.zip_longest(*exchanges):
            caches = self._exchange(caches, every)
        return caches

    def _exchange(self, caches: TrajectoryCaches, exchanges: Exchanges) -> TrajectoryCaches:
        index = np.array([0 if e is None else e.place for e in exchanges], np.int32)
        leaves, structure = jax.tree.flatten(self._programs.read_cache(caches, index))
        leaving = [e.leaving for e in exchanges if e is not None and e.leaving is not None]
        entering = [e.entering for e in exchanges if e is not None and e.entering is not None]
        self._pages |= {sequence: {} for sequence in leaving}
        leaves = [self._replaced(number, leaf, exchanges) for number, leaf in enumerate(leaves)]
        for sequence in entering:
            del self._pages[sequence]
        self.num_moved += len(leaving) + len(entering)
        return self._programs.write_cache(caches, index, jax.tree.unflatten(structure, leaves))

    def _replaced(self, number: int, leaf: jax.Array, exchanges: Exchanges) -> jax.Array:
        """A leaf [R, L, M, K, H] with what enters in the stead of what leaves, which is kept."""
        shards = []
        for shard in leaf.addressable_shards:
            exchange, data = exchanges[shard.index[0].start or 0], shard.data
            key, device = (number, shard.device), data.sharding
            if exchange is not None and exchange.leaving is not None:
                host = device.with_memory_kind("pinned_host")
                self._pages[exchange.leaving][key] = _copy(data, host)
            if exchange is not None and exchange.entering is not None:
                data.delete()  # freed before its successor comes
                data = _copy(self._pages[exchange.entering].pop(key), device)
            shards.append(data)
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _copy(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy, complete."""
    return jax.device_put(x, sharding).block_until_ready()
