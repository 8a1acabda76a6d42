"""`RowStore`: keys and values that are in no slot, in bounded device and host memory.

Invariants:
  * Rows on the device take at most `device_bytes`, rows on the host at most `host_bytes`. A new row
    makes room first: the least recently used moves to the host, and there is dropped.
  * A device row has the length of a slot, a host row that of its valid entries.
  * A name has one row. What the store lacks is prefilled again by who needs it: losing a row costs
    time and changes nothing.
  * Rows are of one version of the weights: their owner clears the store when it changes.
Called by `SlotTable` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.trajectory import TrajectoryKey

# A session's row, or that of a prompt whose token ids these are.
RowName = TrajectoryKey | tuple[int, ...]


class RowDevice(Protocol):
    """Where the slots are; `batch.DecodeBatch`."""

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token."""
        ...

    def take_row(self, slot: int) -> KVCache:
        """A copy of a slot's row."""
        ...

    def put_row(self, row: KVCache, slot: int) -> None:
        """Copies a row, of the device or the host, into a slot."""
        ...

    def row_to_host(self, row: KVCache, length: int) -> KVCache:
        """The first `length` entries in the host's memory."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    row: KVCache
    length: int


class RowStore:
    """Rows by name, in order of their last use."""

    def __init__(
        self, device: RowDevice, *, row_length: int, device_bytes: int, host_bytes: int
    ) -> None:
        self._device = device
        self._row_bytes = row_length * device.token_bytes
        self._max_device_rows = device_bytes // self._row_bytes
        self._max_host_tokens = host_bytes // device.token_bytes
        self._on_device: dict[RowName, _Stored] = {}
        self._on_host: dict[RowName, _Stored] = {}
        self._host_tokens = 0
        self.num_to_host = 0
        self.num_dropped = 0
        self.max_rows = 0

    @property
    def device_bytes(self) -> int:
        """In use, without a row on its way to or from a slot."""
        return len(self._on_device) * self._row_bytes

    @property
    def host_bytes(self) -> int:
        """In use."""
        return self._host_tokens * self._device.token_bytes

    def __contains__(self, name: RowName) -> bool:
        return name in self._on_device or name in self._on_host

    def put(self, name: RowName, length: int, take: Callable[[], KVCache]) -> bool:
        """Stores the row that `take` copies, of which `length` entries are valid.

        Returns:
          Whether there is room for it at all.
        """
        self.discard(name)
        if self._max_device_rows:
            while len(self._on_device) >= self._max_device_rows:
                oldest = next(iter(self._on_device))
                self._move_to_host(oldest, self._on_device.pop(oldest))
            self._on_device[name] = _Stored(row=take(), length=length)
        elif length <= self._max_host_tokens:
            self._move_to_host(name, _Stored(row=take(), length=length))
        else:
            self.num_dropped += 1
        self.max_rows = max(self.max_rows, len(self._on_device) + len(self._on_host))
        return name in self

    def get(self, name: RowName) -> KVCache | None:
        """The row, which is now the one used last."""
        for rows in (self._on_device, self._on_host):
            if name in rows:
                rows[name] = rows.pop(name)
                return rows[name].row
        return None

    def pop(self, name: RowName) -> KVCache | None:
        """The row, which the store then lacks."""
        row = self.get(name)
        self.discard(name)
        return row

    def discard(self, name: RowName) -> None:
        """Forgets a row that nobody will need; unknown names are ignored."""
        self._on_device.pop(name, None)
        if name in self._on_host:
            self._host_tokens -= self._on_host.pop(name).length

    def clear(self) -> None:
        self._on_device.clear()
        self._on_host.clear()
        self._host_tokens = 0

    def _move_to_host(self, name: RowName, stored: _Stored) -> None:
        if stored.length > self._max_host_tokens:
            self.num_dropped += 1
            return
        while self._host_tokens + stored.length > self._max_host_tokens:
            self.discard(next(iter(self._on_host)))
            self.num_dropped += 1
        row = self._device.row_to_host(stored.row, stored.length)
        self._on_host[name] = dataclasses.replace(stored, row=row)
        self._host_tokens += stored.length
        self.num_to_host += 1
