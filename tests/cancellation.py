"""Cancels a piece of work at its n-th await, for n = 1, 2, ... until it completes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

MAX_AWAITS = 500


async def cancelled_at_every_await(
    make: Callable[[], Coroutine[Any, Any, Any]],
) -> AsyncIterator[tuple[int, Any]]:
    """Runs `make()` again and again, cancelled at n = 1, 2, ...; yields n and what it returned or
    raised. The last run completes.
    """
    for number in range(1, MAX_AWAITS):
        outcome, is_cancelled = await cancelled_at(number, make())
        yield number, outcome
        if not is_cancelled:
            return
    raise AssertionError(f"the work did not complete within {MAX_AWAITS} awaits")


async def cancelled_at(number: int, work: Coroutine[Any, Any, Any]) -> tuple[Any, bool]:
    """Runs `work` and cancels it when it and the tasks that it made have suspended `number` times.

    Returns what it returned or raised, and whether it was cancelled.
    """
    loop = asyncio.get_running_loop()
    left, is_cancelled = number, False
    victim: asyncio.Task[Any]

    def note() -> None:
        nonlocal left, is_cancelled
        left -= 1
        if left == 0 and not victim.done():
            is_cancelled = True
            victim.cancel()

    def make_task(loop: Any, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(coroutine, note), loop=loop, **named)

    loop.set_task_factory(make_task)
    try:
        victim = loop.create_task(work)
        (outcome,) = await asyncio.gather(victim, return_exceptions=True)
    finally:
        loop.set_task_factory(None)
    return outcome, is_cancelled


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that tells when it suspends, before its task waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], note: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._note = note

    def send(self, value: Any) -> Any:
        waited = self._coroutine.send(value)
        self._note()
        return waited

    def throw(self, *error: Any) -> Any:
        waited = self._coroutine.throw(*error)
        self._note()
        return waited

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()
