"""A cancel at every await of closing sandboxes and of a rollout leaves nothing alive and no slot
taken; test_sandbox_pool.py does the same for one sandbox's life.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
import serving_cases as sc
from cancellation import cancelled_at, cancelled_at_every_await
from sandbox_cases import ends, fresh_mark, is_running, pool

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.rollout.renderer import WordRenderer
from thundersync_jax.rollout.rollout import RolloutRunner
from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.trajectory import Rollout, Task, Verdict

pytestmark = pytest.mark.optimized

BACKENDS = pytest.mark.parametrize("backend", ("bubblewrap", "restricted"))
T = 10.0


@BACKENDS
def test_a_close_cancelled_anywhere_has_killed_all_and_the_next_one_frees_the_rest(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sandboxes, one with a process in the background and one in a command."""

    async def closed_twice(number: int) -> bool:
        mark = fresh_mark()
        async with pool(backend, num_slots=2) as sandboxes:  # closes once more at its end
            idle, busy = [await sandboxes.acquire(name) for name in ("idle", "busy")]
            await idle.run(f"setsid sleep {mark} & true", T)
            running = asyncio.create_task(busy.run(f"sleep {mark}", T))
            await asyncio.sleep(0)
            _, is_cancelled = await cancelled_at(number, sandboxes.close())
            assert await ends(mark), f"cancelled at await {number} of close"
            with pytest.raises(SandboxError):
                await running
        return is_cancelled

    async def body(directory: Path) -> None:
        for number in range(1, 100):
            is_cancelled = await closed_twice(number)
            assert not list(directory.iterdir()), f"cancelled at await {number} of close"
            if not is_cancelled:
                assert number > 2
                return
        raise AssertionError("close did not complete within 100 awaits")

    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        asyncio.run(body(Path(directory)))


class Daemons:
    """An environment whose every phase leaves a process behind in its sandbox."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._mark = attempt.task.metadata["mark"]

    async def reset(self) -> None:
        self._lease = None
        self._lease = await self._attempt.sandboxes.acquire(str(self._attempt.key))
        await self._lease.write_file("file", "1")
        await self._daemon()

    async def step(self, action: Action) -> Observation:
        await self._daemon()
        return Observation(text="w0")

    async def grade(self) -> float:
        await self._lease.write_file("grader", "exit 0")
        await self._daemon()
        return 1.0

    async def close(self) -> None:
        if self._lease is not None:
            await self._lease.release()

    async def _daemon(self) -> None:
        await self._lease.run(f"setsid sleep {self._mark} & true", T)


class DaemonSuite:
    """Speaks the vocabulary of the tests' engine."""

    vocabulary = ("<bos>", "<eos>", *(f"w{i}" for i in range(sc.CONFIG.vocab_size - 2)))
    solved_reward = 1.0

    def make(self, attempt: Attempt) -> Daemons:
        return Daemons(attempt)


@BACKENDS
def test_a_rollout_cancelled_anywhere_leaves_no_process_no_row_and_no_slot(backend: str) -> None:
    """A real engine, a real sandbox; counted are the awaits of the attempt and of its phases."""
    mark = fresh_mark()
    task = Task(task_id="daemons", instruction="", metadata={"mark": mark})
    contents: list[Rollout] = []

    async def body() -> None:
        async with pool(backend, num_slots=1) as sandboxes:
            runner = RolloutRunner(
                client=worker,
                suite=DaemonSuite(),
                renderer=WordRenderer(DaemonSuite()),
                sandboxes=sandboxes,
                limits=RolloutSection(max_turns=2, max_turn_tokens=2),
                sampling=SamplingSection(),
                run_seed=0,
                max_context=sc.ROW_LENGTH,
            )
            async for num_awaits, outcome in cancelled_at_every_await(
                lambda: runner.run(sc.key(0), task, (0, 3), contents.append)
            ):
                assert not is_running(mark), f"cancelled at await {num_awaits}"
                assert sandboxes.owners == ()
                worker.publish(sc.policy(), 7)  # refused while a session is open
                assert outcome == Verdict(reward=1.0) or isinstance(outcome, asyncio.CancelledError)
            assert outcome == Verdict(reward=1.0) and contents and num_awaits > 10

    worker = ServingWorker(sc.warm_engine())
    worker.start()
    try:
        asyncio.run(body())
    finally:
        worker.close()
