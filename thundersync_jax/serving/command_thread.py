"""`CommandThread`: a thread that owns device state, and the queue through which others reach it.

Invariants:
  * Every command that `send` accepts is applied by the thread's loop or, once that has ended, given
    to `refuse`: none is lost. One whose application raises counts as applied.
  * An exception in the loop ends the thread; it is given to every later `send` and to `close`.
  * Futures are settled on their own event loop, which the thread never blocks.
Owned by the client of a serving loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
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
        serve: the loop; it calls `apply_commands` between two device calls, and ends at its False.
        refuse: called once, in the thread, after the loop has ended: with the commands that were
          not applied, and the reason.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._serve = serve
        self._refuse = refuse
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: close
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

    def apply_commands(self, apply: Callable[[Command], None], *, wait_s: float | None) -> bool:
        """Applies what has arrived, one by one; False ends the loop. For `serve`.

        wait_s: how long the first may take to come; None: for ever.
        """
        while True:
            try:
                command = self._commands.get(wait_s != 0, wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            apply(command)
            wait_s = 0

    def _run(self) -> None:
        error = ServingError(f"the {self._name} was closed")
        try:
            self._serve()
        except BaseException as failure:  # outermost frame: kept for every waiter and the owner
            self._failure = failure
            error = ServingError(f"the {self._name} ended: {failure!r}")
        with self._lock:
            self._is_open = False
        unseen = [self._commands.get() for _ in range(self._commands.qsize())]
        self._refuse([command for command in unseen if command is not None], error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ServingError(f"the {self._name} ended: {self._failure!r}") from self._failure


def settle(answers: Iterable[tuple[asyncio.Future[Result], Result | ServingError]]) -> None:
    """Hands answers to the event loops that wait for them, each with one call.

    A future may be done already.
    """
    by_loop = collections.defaultdict(list)
    for future, answer in answers:
        by_loop[future.get_loop()].append((future, answer))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no waiters left
            loop.call_soon_threadsafe(_settle, settled)


def _settle(answers: Iterable[tuple[asyncio.Future[Result], Result | ServingError]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, ServingError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


async def answer_of(
    future: asyncio.Future[Result],
    *,
    timeout_s: float,
    release: Callable[[], Awaitable[None]],
    over_time: Callable[[], str],
) -> Result:
    """The answer; without one in time, or when cancelled, `release` comes first.

    Raises ServingError at the deadline: what `over_time` says did not happen "within" that time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except asyncio.CancelledError:
        await release()
        raise
    except TimeoutError:
        reason = f"{over_time()} within {timeout_s} s (serving.request_timeout_s)"
        await release()
        raise ServingError(reason) from None
