"""The cursor that walks through a run's tasks.

It holds no state: which tasks belong to a position follows from (seed, position) alone, so a
checkpoint stores one integer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thundersync_jax.errors import UserError
from thundersync_jax.trajectory import Task


class DataError(UserError, ValueError):
    """A data set that cannot be used: which, what was expected, and what to do."""


class TaskCursor:
    """Maps positions in an endless stream to tasks: each epoch is a permutation of its own, drawn
    from (seed, epoch).

    The draw uses the raw stream of a Philox bit generator, which numpy keeps stable across
    versions.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not len(tasks):
            raise DataError(
                "a task cursor needs at least one task, got none: check data.train_split"
            )
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def indices_at(self, position: int, count: int) -> list[int]:
        """The indices of the `count` tasks from `position` on."""
        return [self._index(p) for p in range(position, position + count)]

    def tasks_at(self, position: int, count: int) -> list[Task]:
        return [self._tasks[index] for index in self.indices_at(position, count)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            keys = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._tasks))
            self._epoch, self._order = epoch, np.argsort(keys, kind="stable").tolist()
        return self._order[offset]
