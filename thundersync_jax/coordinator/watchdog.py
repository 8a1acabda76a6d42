"""Says what a step waits for when nothing happens for a while. Deadlines act, this only speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watchdog:
    """From `start` to `stop` looks every `quiet_s` seconds, and warns when nothing has happened.

    Args:
      num_events: how many events there were so far.
      describe: what is waited for.
      warn: hears it, on the loop.
    """

    def __init__(
        self,
        quiet_s: float,
        *,
        num_events: Callable[[], int],
        describe: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._quiet_s = quiet_s
        self._num_events = num_events
        self._describe = describe
        self._warn = warn
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._quiet_s, self._look, self._num_events())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before: int) -> None:
        if self._num_events() == before:
            self._warn(f"nothing happened for {self._quiet_s:g} s: {self._describe()}")
        self.start()
