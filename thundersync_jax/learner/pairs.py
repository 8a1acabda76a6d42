"""`Pairs`: the pool of group sums (G1, G2), on the device or in pinned host memory between calls.

A pair index is an array over all replicas; on each of them it may belong to another group. A call
reaches `pairs_per_call` indices, which are on the device then; with `in_host_memory` the others lie
in the host's memory and are moved when a call needs them, the least recently used one making room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from thundersync_jax.learner.sums import Sum


class Pairs:
    """Owns the accumulators of all pairs.

    Args:
      make: one zero accumulator on the device.
      size: pair indices.
      per_call: indices that every call takes.
      in_host_memory: keep those that no call has just used in pinned host memory.
    """

    def __init__(
        self, make: Callable[[], Sum], *, size: int, per_call: int, in_host_memory: bool
    ) -> None:
        self._make = make
        self._size = size
        self._per_call = per_call
        self._in_host_memory = in_host_memory
        self._pairs: list[tuple[Sum, Sum]] = []
        self._used: list[int] = []  # indices on the device, the least recently used first
        self.num_moved = 0

    def clear(self) -> None:
        """Begins with zeros again."""
        self._pairs, self._used = [], []
        for index in range(self._size):
            self._pairs.append((self._make(), self._make()))
            self._used.append(index)
            self._make_room(self._per_call)

    def begin(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Sets the grids of G1 and of G2 for a step; all are zero."""
        self._pairs = [(g1.started(first), g2.started(second)) for g1, g2 in self._pairs]

    def reach(self, wanted: Sequence[int]) -> tuple[list[int], tuple[Sum, ...]]:
        """The indices of a call, filled up with others to `per_call`, and G1, G2 of each in turn.

        They are the caller's to donate, until `put`.
        """
        others = [i for i in reversed(self._used) if i not in wanted]
        others += [i for i in range(self._size) if i not in wanted and i not in others]
        reached = sorted([*wanted, *others[: self._per_call - len(wanted)]])
        missing = [i for i in reached if i not in self._used]
        self._used = [i for i in self._used if i not in reached]
        self._make_room(self._per_call - len(reached))
        for index in missing:
            self._pairs[index] = _move(self._pairs[index], "device")
            self.num_moved += 1
        self._used += reached
        return reached, tuple(acc for index in reached for acc in self._pairs[index])

    def put(self, reached: Sequence[int], accumulators: Sequence[Sum]) -> None:
        """Takes the results of the call back."""
        for at, index in enumerate(reached):
            self._pairs[index] = (accumulators[2 * at], accumulators[2 * at + 1])

    def _make_room(self, most: int) -> None:
        """Leaves at most so many of the used on the device, unless all may lie there."""
        while self._in_host_memory and len(self._used) > most:
            index = self._used.pop(0)
            self._pairs[index] = _move(self._pairs[index], "pinned_host")
            self.num_moved += 1


def _move(pair: tuple[Sum, Sum], memory_kind: str) -> tuple[Sum, Sum]:
    """Copies leaf by leaf, each freed before the next; JAX donates within one memory only."""

    def move(x: jax.Array) -> jax.Array:
        moved = jax.device_put(x, x.sharding.with_memory_kind(memory_kind))
        moved.block_until_ready()
        x.delete()
        return moved

    return jax.tree.map(move, pair)
