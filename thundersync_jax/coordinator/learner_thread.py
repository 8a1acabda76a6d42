"""The learner behind one thread, so that neither its programs nor its locks ever block the event
loop.

Invariants:
  * Every call of the learner happens on one thread, in the order in which it was made here.
  * What the loop enqueues is delivered by the next `work` call in one batch: one hop between
    threads for many commands and one program.
  * An exception of the learner is raised to whoever awaits the call.
  * Decode has priority: a call that would stall it is postponed, and `work` says so.

Who calls it: the coordinator, from one asyncio loop.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from thundersync_jax.coordinator.decode_priority import DecodePriority
from thundersync_jax.trajectory import ScoredTurn, TrajectoryKey, TrajectoryTokens
from thundersync_jax.transport.messages import UpdateReport

T = TypeVar("T")


class LearnerPort(Protocol):
    """What the coordinator needs of a learner. The first five only enqueue."""

    def open_group(self, task_id: str, prompt_ids: Sequence[int], group_size: int) -> int: ...

    def add_turn(self, group: int, index: int, turn: ScoredTurn) -> None: ...

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None: ...

    def set_reward(self, group: int, index: int, reward: float) -> None: ...

    def set_failed(self, group: int, index: int, reason: str) -> None: ...

    def work(self, max_steps: int | None = None, *, max_call_s: float = ...) -> int:
        """Runs up to `max_steps` ready programs to their completion; returns how many it ran.
        One that is expected to take more than `max_call_s` is postponed.
        """
        ...

    @property
    def has_postponed(self) -> bool: ...

    def update(self) -> UpdateReport: ...


class LearnerThread:
    """Enqueues on the loop, runs on the thread. Groups are named by their place in the step."""

    def __init__(self, learner: LearnerPort, priority: DecodePriority) -> None:
        self._learner = learner
        self._priority = priority
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._queue: list[Callable[[], None]] = []
        self._group_ids: dict[int, int] = {}

    def close(self) -> None:
        """Waits for the call in progress, if any."""
        self._executor.shutdown(cancel_futures=True)

    @property
    def has_queue(self) -> bool:
        return bool(self._queue)

    def begin_step(self) -> None:
        """Forgets the groups and the undelivered commands of the step before."""
        self._queue = []
        self._group_ids = {}
        self._priority.take_stall_s()

    @property
    def has_postponed(self) -> bool:
        """Whether the last `work` postponed a call, for rows decode."""
        return self._learner.has_postponed

    def take_stall_s(self) -> float:
        """Seconds of calls that began while rows decoded, since the last take."""
        return self._priority.take_stall_s()

    def open_group(
        self, group: int, task_id: str, prompt_ids: tuple[int, ...], group_size: int
    ) -> None:
        group_ids = self._group_ids

        def open_it() -> None:
            group_ids[group] = self._learner.open_group(task_id, prompt_ids, group_size)

        self._queue.append(open_it)

    def add_turn(self, key: TrajectoryKey, turn: ScoredTurn) -> None:
        self._enqueue(self._learner.add_turn, key, turn)

    def add_trajectory(self, key: TrajectoryKey, tokens: TrajectoryTokens) -> None:
        self._enqueue(self._learner.add_trajectory, key, tokens)

    def set_reward(self, key: TrajectoryKey, reward: float) -> None:
        self._enqueue(self._learner.set_reward, key, reward)

    def set_failed(self, key: TrajectoryKey, reason: str) -> None:
        self._enqueue(self._learner.set_failed, key, reason)

    async def work(self, is_released: bool) -> int:
        """Delivers the queue and, if released, runs one program. Returns the programs it ran."""
        queue, self._queue = self._queue, []
        return await self.call(self._deliver_and_work, queue, is_released)

    async def update(self) -> UpdateReport:
        return await self.call(self._learner.update)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs `function` on the learner's thread, after the calls before it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, functools.partial(function, *args))

    def _enqueue(
        self, method: Callable[[int, int, Any], None], key: TrajectoryKey, value: Any
    ) -> None:
        group_ids = self._group_ids
        self._queue.append(lambda: method(group_ids[key.group], key.index, value))

    def _deliver_and_work(self, queue: list[Callable[[], None]], is_released: bool) -> int:
        for deliver in queue:
            deliver()
        if not is_released:
            return 0
        return self._priority.run(
            lambda max_call_s: self._learner.work(max_steps=1, max_call_s=max_call_s),
            time.monotonic,
        )
