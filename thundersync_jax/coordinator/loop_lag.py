"""Measures how late an asyncio loop runs, which is how a blocking call on it shows."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.05


class LoopLag:
    """From `start` to `stop` a timer fires every INTERVAL_S; the lag is how late it does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._max_s = 0.0

    def start(self) -> None:
        self._timer = self._loop.call_later(INTERVAL_S, self._fire)

    def stop(self) -> float:
        """The longest lag in seconds, a timer that is late now included."""
        if self._timer is not None:
            self._timer.cancel()
            self._note(self._timer)
        return self._max_s

    def _fire(self) -> None:
        if self._timer is not None:
            self._note(self._timer)
        self.start()

    def _note(self, timer: asyncio.TimerHandle) -> None:
        self._max_s = max(self._max_s, self._loop.time() - timer.when())
