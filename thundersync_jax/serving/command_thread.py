"""`CommandThread`: a thread that owns device state, and the queue through which others reach it.

Invariants:
  * Every command that `send` accepts is handed to the thread's loop or, once that has ended, to
    `refuse`: none is lost.
  * An exception in the loop ends the thread; it is given to every later `send` and to `close`.
  * Futures are settled on their own event loop, which the thread never blocks.
Owned by the client of a serving loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from thundersync_jax.transport.client import ServingError

Command = TypeVar("Command")
Result = TypeVar("Result")


class CommandThread(Generic[Command]):
    """Runs `serve` in a thread of its own until `close`."""

    def __init__(
        self,
        *,
        name: str,
        timeout_s: float,
        serve: Callable[[], None],
        refuse: Callable[[Iterable[Command], ServingError], None],
    ) -> None:
        """Args:
        serve: the loop; it calls `take` between two device calls and returns at its None.
        refuse: called once, in the thread, after the loop has ended: with the commands that it has
          not seen, and the reason.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._serve = serve
        self._refuse = refuse
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: close
        self._unseen: list[Command] = []
        self._is_open = True  # commands are taken; changed under the lock, so that none is lost
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the loop; raises what the thread died of."""
        with contextlib.suppress(ServingError):
            self.send(None)
        if self._thread.ident is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise ServingError(f"the {self._name} did not end within {self._timeout_s} s")
        self._raise_failure()

    def send(self, command: Command | None) -> None:
        with self._lock:
            self._raise_failure()
            if not (self._is_open and self._thread.is_alive()):
                raise ServingError(f"the {self._name} is not running: start() first, close() last")
            self._commands.put(command)

    def take(self, *, wait: bool) -> list[Command] | None:
        """What has arrived, waiting for it only when asked to; None ends the loop. For `serve`."""
        taken: list[Command] = []
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=wait and not taken)
                if command is None:
                    self._unseen = taken
                    return None
                taken.append(command)
        return taken

    def _run(self) -> None:
        error = ServingError(f"the {self._name} was closed")
        try:
            self._serve()
        except BaseException as failure:  # outermost frame: kept for every waiter and the owner
            self._failure = failure
            error = ServingError(f"the {self._name} ended: {failure!r}")
        with self._lock:
            self._is_open = False
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    self._unseen.append(command)
        self._refuse(self._unseen, error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ServingError(f"the {self._name} ended: {self._failure!r}") from self._failure


def settle(future: asyncio.Future[Result], answer: Result | ServingError) -> None:
    """Hands an answer to the event loop that waits for it; the future may be done already."""
    with contextlib.suppress(RuntimeError):  # a closed loop has no waiters left
        future.get_loop().call_soon_threadsafe(_settle, future, answer)


def _settle(future: asyncio.Future[Result], answer: Result | ServingError) -> None:
    if future.done():
        return
    if isinstance(answer, ServingError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
