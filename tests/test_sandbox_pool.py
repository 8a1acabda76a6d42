"""One owner a sandbox, bounded numbers, and nothing alive after a cancel at any await or after
close.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cancellation import cancelled_at_every_await
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_cases import begins, ends, fresh_mark, is_running, pool, require

from thundersync_jax.sandbox.base import CommandResult, SandboxError, SandboxPool

BACKENDS = pytest.mark.parametrize("backend", ("bubblewrap", "restricted"))
T = 10.0


@BACKENDS
def test_an_owner_gets_a_clean_sandbox_and_loses_it_on_release(backend):
    async def body():
        mark = fresh_mark()
        async with pool(backend, num_slots=1) as sandboxes:
            first = await sandboxes.acquire("first")
            assert sandboxes.owners == ("first",)
            await first.run(f"echo 1 > file; x=1; setsid sleep {mark} & true", T)
            assert await begins(mark)
            await first.release()
            await first.release()
            assert not is_running(mark) and sandboxes.owners == ()
            with pytest.raises(SandboxError, match="lease of first was released"):
                await first.run("true", T)
            second = await sandboxes.acquire("second")
            assert (await second.run("ls -A; echo x=$x", T)).output == "x=\n"

    asyncio.run(body())


@BACKENDS
def test_sandboxes_start_lazily_in_parallel_and_each_has_its_own_uid(backend):
    async def body():
        async with pool(backend, num_slots=6) as sandboxes:
            leases = await asyncio.gather(*(sandboxes.acquire(str(i)) for i in range(6)))
            results = await asyncio.gather(
                *(lease.run("id -u; echo 1 > mine", T) for lease in leases)
            )
            uids = {result.output for result in results}
            assert len(uids) == (6 if os.getuid() == 0 else 1)
            await leases[0].release()
            assert (await leases[1].run("cat mine", T)).output == "1\n"

    asyncio.run(body())


@BACKENDS
def test_waiting_for_a_sandbox_is_fair_and_ends_at_a_named_deadline(backend):
    async def body():
        async with pool(backend, num_slots=1, acquire_timeout_s=0.3) as sandboxes:
            lease = await sandboxes.acquire("owner")
            waiting = asyncio.create_task(sandboxes.acquire("waiter"))
            await asyncio.sleep(0.05)
            await lease.release()
            lease = await waiting
            with pytest.raises(
                SandboxError, match=r"late waited 0.3 s for one of 1 .*held by waiter"
            ):
                await sandboxes.acquire("late")
            await lease.release()
            await (await sandboxes.acquire("again")).release()

    asyncio.run(body())


@BACKENDS
def test_close_kills_everything_removes_files_and_wakes_waiters(backend):
    async def body():
        mark = fresh_mark()
        async with pool(backend, num_slots=2) as sandboxes:
            leases = [await sandboxes.acquire(str(i)) for i in range(2)]
            for lease in leases:
                await lease.write_file(f"of-{mark}", "")
            own = _slot_directories(of=mark)
            assert len(own) == 2
            running = [
                asyncio.create_task(lease.run(f"setsid sleep {mark} & sleep {mark}", T))
                for lease in leases
            ]
            waiting = [asyncio.create_task(sandboxes.acquire(f"waiter {i}")) for i in range(3)]
            assert await begins(mark)
            await sandboxes.close()
            assert not is_running(mark)
            assert not own & _slot_directories()
            outcomes = await asyncio.gather(*running, *waiting, return_exceptions=True)
            assert all(isinstance(outcome, SandboxError) for outcome in outcomes), outcomes
            await leases[0].release()
            with pytest.raises(SandboxError, match="closed pool"):
                await sandboxes.acquire("late")
            assert sandboxes.owners == ()

    asyncio.run(body())


@BACKENDS
def test_a_sweep_releases_the_leases_of_the_dead_only(backend):
    async def body():
        mark = fresh_mark()
        async with pool(backend, num_slots=2) as sandboxes:
            lost, kept = await sandboxes.acquire("lost"), await sandboxes.acquire("kept")
            await lost.run(f"sleep {mark} &", T)
            await kept.run("x=1", T)
            assert await sandboxes.sweep({"kept"}) == ("lost",)
            assert not is_running(mark) and sandboxes.owners == ("kept",)
            with pytest.raises(SandboxError, match="released"):
                await lost.run("true", T)
            assert (await kept.run("echo $x", T)).output == "1\n"

    asyncio.run(body())


@BACKENDS
def test_a_cancel_at_every_await_of_an_attempt_leaves_nothing_alive(backend):
    """Cancelled at the first suspension, the second, and so on, until it completes."""

    async def attempt(sandboxes: SandboxPool, mark: str) -> str:
        lease = await sandboxes.acquire("attempt")
        try:
            await lease.write_file("file", "x" * (2 << 20))
            await lease.read_file("file")
            await lease.run(f"setsid sleep {mark} & true", T)
            await lease.run("exit 1", T)
            await lease.run("sleep 60", 0.01)
            await lease.reset()
            await lease.run(f"sleep {mark} &", T)
            return (await lease.run("echo done", T)).output
        finally:
            await lease.release()

    async def body():
        async with pool(backend, num_slots=1) as sandboxes:
            mark = fresh_mark()
            async for num_awaits, outcome in cancelled_at_every_await(
                lambda: attempt(sandboxes, mark)
            ):
                assert await ends(mark), f"cancelled at await {num_awaits}"
                assert sandboxes.owners == ()
                assert outcome == "done\n" or isinstance(outcome, asyncio.CancelledError), outcome
            assert outcome == "done\n" and num_awaits > 10

    asyncio.run(body())


class _FakeSandbox:
    """Counts what is alive; dirty once used."""

    def __init__(self, index: int, fail_resets: list[bool]) -> None:
        self.owner_state = ""
        self.is_alive = self.is_closed = False
        self._fail_resets = fail_resets

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        before, self.owner_state = self.owner_state, command
        await asyncio.sleep(0)
        return CommandResult(output=before, exit_code=0)

    async def reset(self) -> None:
        await asyncio.sleep(0)
        if self._fail_resets and self._fail_resets.pop():
            raise SandboxError("does not start")
        self.is_alive, self.owner_state = True, ""

    def kill(self) -> None:
        self.is_alive, self.owner_state = False, ""

    async def close(self) -> None:
        self.kill()
        self.is_closed = True


class _FakeBackend:
    name = "fake"

    def __init__(self, fail_resets: list[bool]) -> None:
        self.made: list[_FakeSandbox] = []
        self._fail_resets = fail_resets

    def create(self, index: int) -> _FakeSandbox:
        self.made.append(_FakeSandbox(index, self._fail_resets))
        return self.made[-1]


OPERATION = st.tuples(st.sampled_from(["run", "release", "cancel", "forget"]), st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.lists(OPERATION, max_size=4), max_size=12),
    st.lists(st.booleans(), max_size=6),
)
def test_no_sandbox_is_lost_or_shared_whatever_owners_do(num_slots, owners, fail_resets):
    """After any mix of use, failure, cancel and forgotten leases, a sweep makes every sandbox free
    again.
    """

    async def owner(sandboxes: SandboxPool, name: str, operations: list[tuple[str, int]]) -> None:
        lease = await sandboxes.acquire(name)
        state = ""
        for operation, delay in operations:
            for _ in range(delay):
                await asyncio.sleep(0)
            if operation == "run":
                assert (await lease.run(name, 1)).output == state, "another owner's state"
                state = name
            elif operation == "cancel":
                asyncio.current_task().cancel()
                await asyncio.sleep(0)
            elif operation == "forget":
                return
            elif operation == "release":
                break
        await lease.release()

    async def body() -> None:
        backend = _FakeBackend(list(fail_resets))
        sandboxes = SandboxPool(backend, num_slots=num_slots, acquire_timeout_s=0.02)
        tasks = [
            asyncio.create_task(owner(sandboxes, str(i), operations))
            for i, operations in enumerate(owners)
        ]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            assert outcome is None or isinstance(outcome, (SandboxError, asyncio.CancelledError)), (
                outcome
            )
        await sandboxes.sweep(live_owners=())
        fail_resets.clear()
        backend._fail_resets[:] = []
        leases = [await sandboxes.acquire(f"last {i}") for i in range(num_slots)]
        assert len({id(lease._sandbox) for lease in leases}) == num_slots
        await sandboxes.close()
        assert all(made.is_closed and not made.is_alive for made in backend.made)

    asyncio.run(body())


@BACKENDS
def test_a_run_that_is_killed_leaves_no_process_and_the_next_one_removes_its_files(backend):
    require(backend)
    mark = fresh_mark()
    program = f"""
import asyncio
from sandbox_cases import pool
async def main():
    async with pool({backend!r}, num_slots=1) as sandboxes:
        lease = await sandboxes.acquire("owner")
        await lease.run("setsid sleep {mark} & > of-{mark}", 5.0)
        print("running", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"running\n"
        assert is_running(mark)
        left = _slot_directories(of=mark)
        run.kill()
    assert len(left) == 1 and asyncio.run(ends(mark))

    async def next_run() -> None:
        async with pool(backend, num_slots=64) as sandboxes:
            await asyncio.gather(*(sandboxes.acquire(str(i)) for i in range(8)))

    if os.getuid() == 0:
        asyncio.run(next_run())
        assert not left & _slot_directories()


def _slot_directories(of: str = "") -> set[Path]:
    """Those of every run on this machine, or the ones with the file of a mark."""
    found = Path(tempfile.gettempdir()).glob("thundersync-sandbox-*")
    return {path for path in found if not of or (path / "work" / f"of-{of}").exists()}
