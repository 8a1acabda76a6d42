"""Runs an environment's own code so that it can hurt its own attempt only.

Invariants:
  * Whatever such code raises becomes an `AttemptError` that names the phase and the attempt; so do
    a deadline and a cancellation that nobody asked for.
  * A phase that ignores its cancellation is left behind after `CANCEL_GRACE_S`; the attempt goes on
    without it.

  * A deadline is extended by what the event loop was late: what one environment's code blocks, the
    others are not charged for.

Code that blocks its thread cannot be stopped from inside the process, and holds everything up until
it returns: environments run their tools in sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from thundersync_jax.factory import type_and_message
from thundersync_jax.trajectory import TrajectoryKey

CANCEL_GRACE_S = 1.0

T = TypeVar("T")


class AttemptError(RuntimeError):
    """Why an attempt has no reward. Becomes the failure of its verdict."""


@contextlib.contextmanager
def contained(phase: str, key: TrajectoryKey) -> Iterator[None]:
    """The outermost frame of what may break one attempt: exceptions leave as AttemptError."""
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        raise  # a left-behind phase that is closed at exit gets GeneratorExit; see `run_phase`
    except BaseException as error:  # SystemExit and its like included: it is a user's code
        raise AttemptError(f"{phase} of {key} raised {type_and_message(error)}") from error


async def run_phase(
    phase: str, key: TrajectoryKey, timeout_s: float, work: Callable[[], Awaitable[T]]
) -> T:
    """Calls and awaits `work` for at most `timeout_s`.

    Raises:
      AttemptError: it raised, took longer, or cancelled itself.
    """

    async def outermost() -> T:
        with contained(phase, key):
            return await work()

    task = asyncio.create_task(outermost(), name=f"{phase} of {key}")
    try:
        due_s = time.monotonic() + timeout_s
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            await asyncio.wait({task}, timeout=max(0.0, time.monotonic() - due_s))
        if not task.done():
            raise AttemptError(f"{phase} of {key} took more than {timeout_s:g} s")
        if task.cancelled():
            raise AttemptError(f"{phase} of {key} cancelled itself")
        if isinstance(task.exception(), GeneratorExit):
            raise AttemptError(f"{phase} of {key} raised GeneratorExit")
        return task.result()
    finally:
        if not task.done():
            task.add_done_callback(_discard)
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


async def to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, which has a deadline, to its end; raises a cancellation afterwards."""
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


def _discard(task: asyncio.Task[Any]) -> None:
    """Retrieves the outcome of an abandoned phase, which nobody waits for."""
    if not task.cancelled():
        task.exception()
