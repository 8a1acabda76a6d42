"""`DecodeBatch`: the `DecodeState` of one engine, and the calls that replace it.

Owned by the decode thread: every call donates the state and keeps the new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thundersync_jax.model.kv_cache import KVCache
from thundersync_jax.serving.decode_state import DecodeState, Piece, Sampled
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.memory import token_bytes


class DecodeBatch:
    """All slots. `start` allocates them."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._started: DecodeState | None = None
        self.token_bytes = token_bytes(engine.config)

    def start(self) -> None:
        self._started = self._engine.init_decode_state()

    def close(self) -> None:
        """Frees the slots."""
        self._started = None

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Appends pieces of distinct slots, at most `serving.extend_rows`."""
        self._started = self._engine.extend(self._engine.weights, self._state, pieces)

    def generate(self, slots: Sequence[int], until_ended: int) -> Sampled:
        """Samples tokens of `slots`, and stops every other; blocks until they are on the host."""
        is_kept = np.zeros(self._engine.serving.num_slots, bool)
        is_kept[list(slots)] = True
        self._started, results = self._engine.generate(
            self._engine.weights, self._state, is_kept=is_kept, until_ended=until_ended
        )
        return self._engine.unpack(results)

    def take_row(self, slot: int) -> KVCache:
        return self._engine.take_row(self._state, slot)

    def put_row(self, row: KVCache, slot: int) -> None:
        self._started = self._engine.put_row(self._state, row, slot)

    def row_to_host(self, row: KVCache, length: int) -> KVCache:
        return self._engine.row_to_host(row, length)

    @property
    def _state(self) -> DecodeState:
        assert self._started is not None, "start() comes first"
        return self._started
