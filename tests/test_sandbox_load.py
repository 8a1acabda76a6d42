"""Thousands of tool calls through many sandboxes at once leave no process, file, uid, mount or
descriptor behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_cases import fresh_mark, is_running, pool

from thundersync_jax.sandbox.base import SandboxError, SandboxLease, SandboxPool
from thundersync_jax.sandbox.slots import UIDS

BACKENDS = pytest.mark.parametrize("backend", ("bubblewrap", "restricted"))
LOCKS = Path("/run/thundersync-sandbox-uids")
WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")
T = 120.0  # far above what a call takes: a loaded host must not turn calls into timeouts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call, and what it must end with: an exit code, or None for a kill at its deadline."""

    command: str
    exit_code: int | None = 0
    timeout_s: float = T


# `$MARK` names processes that sleep; every call but the first wants to leave something behind.
CALLS = (
    Call(command="echo hello"),
    Call(command="mkdir -p a/b && echo 1 > a/b/file && ln -s /etc/passwd link && mkfifo pipe"),
    Call(command="setsid sleep $MARK & true"),
    Call(command="echo 1 > $TMPDIR/file; echo 1 > /dev/shm/file; (exit 3)", exit_code=3),
    Call(command="(trap '' TERM HUP INT; sleep $MARK) & disown; head -c 100000 /dev/zero"),
    Call(command="mkdir -p locked/in && echo 1 > locked/in/file && chmod 000 locked/in locked"),
    Call(command="exec 5<> <(sleep $MARK); true"),
    Call(command="mount -t tmpfs none /tmp", exit_code=1),
    Call(command="yes 2>&1 | head -c 1000000 > large; tail -f large > /dev/null & true"),
)
CALLS_PER_LEASE = 1 + len(CALLS)  # the first asks for the uid
KILLED = Call(command="setsid sleep $MARK & sleep $MARK", exit_code=None, timeout_s=0.05)
ENDED = Call(command="setsid sleep $MARK & exit 7", exit_code=7)


@BACKENDS
def test_500_tool_calls_leave_nothing(backend: str) -> None:
    check_nothing_is_left(backend, num_calls=500, num_slots=16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@BACKENDS
def test_10_000_tool_calls_through_64_sandboxes_leave_nothing(backend: str) -> None:
    check_nothing_is_left(backend, num_calls=10_000, num_slots=64)


def check_nothing_is_left(backend: str, *, num_calls: int, num_slots: int) -> None:
    mark = fresh_mark()
    with own_temporary_directory() as directory:
        asyncio.run(nothing())  # what asyncio itself opens once
        before = traces(set())
        uids, most_at_once = asyncio.run(make_calls(backend, mark, num_calls, num_slots))
        after = traces(uids)
        assert not list(directory.iterdir())
    assert most_at_once == num_slots
    assert len(uids) == (num_slots if os.getuid() == 0 else 1)
    assert not is_running(mark)
    for name, found in after.items():
        assert not found - before[name], f"{name} left behind"


async def make_calls(
    backend: str, mark: str, num_calls: int, num_slots: int
) -> tuple[set[int], int]:
    """Makes `num_calls` calls; returns the uids that ran them and the most leases at one time."""
    uids: set[int] = set()
    lease_numbers = iter(range(num_calls // CALLS_PER_LEASE))
    counts: collections.Counter[str] = collections.Counter()
    all_hold = asyncio.Barrier(num_slots)

    async def agent(name: int) -> None:
        is_first = True
        for number in lease_numbers:
            lease = await sandboxes.acquire(f"agent {name}")
            try:
                counts["most"] = max(counts["most"], len(sandboxes.owners))
                if is_first:  # every sandbox is alive at one time, whatever the pace
                    await asyncio.wait_for(all_hold.wait(), T)
                    is_first = False
                uids.add(int((await called(lease, mark, Call(command="id -u"))).strip()))
                for at in range(len(CALLS)):
                    await called(lease, mark, CALLS[(number + at) % len(CALLS)])
                counts["calls"] += CALLS_PER_LEASE
                if number % 16 == 0:  # ends of the shell and of the whole sandbox, beyond the count
                    await called(lease, mark, KILLED if number % 32 else ENDED)
            finally:
                await lease.release()

    async with pool(
        backend, num_slots=num_slots, acquire_timeout_s=T, start_timeout_s=T
    ) as sandboxes:
        await asyncio.gather(*(agent(name) for name in range(num_slots)))
        await refused_when_closed(sandboxes)
    assert counts["calls"] == num_calls
    return uids, counts["most"]


async def called(lease: SandboxLease, mark: str, call: Call) -> str:
    result = await lease.run(call.command.replace("$MARK", mark), call.timeout_s)
    is_expected = result.exit_code == call.exit_code or (call.exit_code and result.exit_code)
    assert is_expected, (call, result)
    return result.output


async def refused_when_closed(sandboxes: SandboxPool) -> None:
    await sandboxes.close()
    with pytest.raises(SandboxError, match="closed pool"):
        await sandboxes.acquire("late")


async def nothing() -> None:
    """Starts the loop and its thread."""
    await asyncio.to_thread(int)


@contextlib.contextmanager
def own_temporary_directory() -> Iterator[Path]:
    """Where this test's slots have their files, apart from other runs of this host."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)  # the sandboxes' uids pass through
        tempfile.tempdir, default = directory, tempfile.tempdir
        try:
            yield Path(directory)
        finally:
            tempfile.tempdir = default


def traces(uids: set[int]) -> dict[str, set[str]]:
    """What a sandbox could leave on this host; `uids` are those that ran commands."""
    own_uids = uids & set(UIDS) if os.getuid() == 0 else set()
    return {
        "descriptor": {f"{number} in use" for number in range(len(os.listdir("/proc/self/fd")))},
        "child": children(),
        "process": processes_of(own_uids),
        "mount": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "file": files_of(own_uids),
        "IPC object": ipc_objects_of(own_uids),
        "leased uid": {str(uid) for uid in own_uids if holds_lock(uid)},
    }


def children() -> set[str]:
    """This process's children, zombies too."""
    own, found = str(os.getpid()), set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # Behind its command's name, which may contain anything: state, parent.
            state_and_parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if state_and_parent[1] == own:
                found.add(name)
    return found


def processes_of(uids: set[int]) -> set[str]:
    """Processes of these uids, but of a uid that another run has leased since."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            uid = os.stat(f"/proc/{name}").st_uid
            if uid in uids and not is_leased(uid):
                found.add(f"{name} of uid {uid}")
    return found


def files_of(uids: set[int]) -> set[str]:
    found = set()
    for place in WORLD_WRITABLE:
        with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid in uids:
                        found.add(entry.path)
    return found


def ipc_objects_of(uids: set[int]) -> set[str]:
    found = set()
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(FileNotFoundError):
            header, *lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
            column = header.split().index("uid")
            found |= {line for line in lines if int(line.split()[column]) in uids}
    return found


def is_leased(uid: int) -> bool:
    """Whether some run of this host holds the uid."""
    with (LOCKS / str(uid)).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holds_lock(uid: int) -> bool:
    """Whether this process has the uid's lock file open."""
    path = str(LOCKS / str(uid))
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return any(os.path.lexists(link) and os.readlink(link) == path for link in links)
