"""The self-test: every property of a backend, tried for real in one of its sandboxes.

A property counts as enforced only when the attempt to break it failed in the expected way; nothing
is concluded from an installed program or a version. `selection` uses the reports; tests and `python
-m thundersync_jax.sandbox` print them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox.base import (
    Check,
    OwnedSandbox,
    SandboxBackend,
    SandboxError,
    SelfTestReport,
)

_COMMAND_TIMEOUT_S = 5.0
# The tests run with these smaller limits, which makes them fast.
_MAX_PROCESSES, _MAX_FILE_BYTES, _OUTPUT_BYTES = 16, 1 << 20, 4096
_SURVIVOR_TIMEOUT_S = 2.0

_Outcome = tuple[bool, str]


async def self_test(
    make_backend: Callable[[SandboxSection], SandboxBackend], limits: SandboxSection
) -> SelfTestReport:
    """Tries every property in one sandbox; about a quarter of a second. Never raises
    SandboxError.
    """
    limits = dataclasses.replace(
        limits,
        num_slots=1,
        max_processes=_MAX_PROCESSES,
        max_file_bytes=_MAX_FILE_BYTES,
        output_bytes=_OUTPUT_BYTES,
    )
    backend = make_backend(limits)
    sandbox = backend.create(0)
    checks: list[Check] = []
    try:
        with _host_directory() as host:
            for name, is_required, attempt in _ATTEMPTS:
                await sandbox.reset()
                is_enforced, detail = await attempt(sandbox, host)
                checks.append(
                    Check(
                        name=name, is_required=is_required, is_enforced=is_enforced, detail=detail
                    )
                )
        return SelfTestReport(backend=backend.name, checks=tuple(checks))
    except SandboxError as error:
        return SelfTestReport(backend=backend.name, checks=tuple(checks), error=str(error))
    finally:
        await sandbox.close()


@contextlib.contextmanager
def _host_directory() -> Iterator[Path]:
    """A directory of the caller in the host's /tmp, with a file that anyone may read."""
    with tempfile.TemporaryDirectory(prefix="thundersync-self-test-") as name:
        host = Path(name)
        host.chmod(0o755)
        (host / "canary").write_text("canary")
        yield host


async def _command_runs(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    result = await sandbox.run(
        "x=7; cd /; false || printf '%s %s' $x $PWD; (exit 3)", _COMMAND_TIMEOUT_S
    )
    return (result.output, result.exit_code) == ("7 /", 3), f"printed {result.output[-80:]!r}"


async def _network_off(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = await sandbox.run(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&1", _COMMAND_TIMEOUT_S)
    is_refused = result.exit_code not in (0, None)
    return (
        is_refused,
        "no connection to the host's loopback"
        if is_refused
        else "connected to the host's loopback",
    )


async def _read_only_system(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    places = ("/", "/usr", "/etc", str(host))
    names = " ".join(f"{place.rstrip('/')}/thundersync-probe" for place in places)
    result = await sandbox.run(
        f"for f in {names}; do (: > $f) 2>/dev/null && echo $f; done", _COMMAND_TIMEOUT_S
    )
    written = result.output.split()
    for name in written:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return (
        not written,
        f"wrote {written[0]}" if written else "no write outside the working directory",
    )


async def _private_tmp(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    result = await sandbox.run(f"cat {host}/canary 2>/dev/null", _COMMAND_TIMEOUT_S)
    is_private = "canary" not in result.output
    return is_private, "host's /tmp is out of reach" if is_private else "reads the host's /tmp"


async def _no_shadow(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    result = await sandbox.run("cat /etc/shadow >/dev/null 2>&1", _COMMAND_TIMEOUT_S)
    is_hidden = result.exit_code != 0
    return is_hidden, "/etc/shadow is out of reach" if is_hidden else "reads /etc/shadow"


async def _process_limit(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    loop = f"i=0; while [ $i -lt {2 * _MAX_PROCESSES} ]; do sleep 5 & i=$((i+1)); done; echo all"
    result = await sandbox.run(f"sh -c '{loop}' 2>&1", 1.0)
    is_limited = "all" not in result.output.split()
    return (
        is_limited,
        f"{_MAX_PROCESSES} at most" if is_limited else f"started {2 * _MAX_PROCESSES} processes",
    )


async def _file_size_limit(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    result = await sandbox.run(f"head -c {2 * _MAX_FILE_BYTES} /dev/zero > big", _COMMAND_TIMEOUT_S)
    is_limited = "max_file_bytes" in result.limits_hit
    return is_limited, "SIGXFSZ" if is_limited else f"wrote {2 * _MAX_FILE_BYTES} bytes"


async def _tree_kill(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    mark = f"86400.{secrets.randbelow(10**9)}"
    daemon = f"setsid nohup sleep {mark} >/dev/null 2>&1 </dev/null & echo started"
    for how in ("reset", "timeout"):
        await sandbox.run(daemon, _COMMAND_TIMEOUT_S)
        if how == "reset":
            await sandbox.reset()
        elif not (await sandbox.run("sleep 60", 0.05)).is_timeout:
            return False, "a command outlived its deadline"
        deadline_s = asyncio.get_running_loop().time() + _SURVIVOR_TIMEOUT_S
        while _is_running(mark):
            if asyncio.get_running_loop().time() > deadline_s:
                return False, f"a setsid daemon survived the {how}"
            await asyncio.sleep(0.002)
    return True, "no setsid daemon survived a reset or a timeout"


async def _clean_reset(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    places = ". $TMPDIR /tmp /dev/shm"
    leave = f"for d in {places}; do (: > $d/thundersync-left) 2>/dev/null; done"
    await sandbox.run(f"{leave}; x=1; f() {{ :; }}; cd /usr", _COMMAND_TIMEOUT_S)
    await sandbox.reset()
    look = f"for d in {places}; do ls $d/thundersync-left 2>/dev/null; done"
    result = await sandbox.run(f"pwd; {look}; echo $x; declare -F f", _COMMAND_TIMEOUT_S)
    lines = result.output.split()
    is_clean = len(lines) == 1 and lines[0] != "/usr"
    return is_clean, "nothing was left" if is_clean else f"left {' '.join(lines)}"


async def _output_cap(sandbox: OwnedSandbox, host: Path) -> _Outcome:
    result = await sandbox.run(
        f"echo first; head -c {8 * _OUTPUT_BYTES} /dev/zero; echo last", _COMMAND_TIMEOUT_S
    )
    has_ends = result.output.startswith("first\n") and result.output.endswith("last\n")
    is_capped = has_ends and len(result.output) < 2 * _OUTPUT_BYTES
    return (
        is_capped,
        f"kept {len(result.output)} characters of {8 * _OUTPUT_BYTES} bytes, both ends",
    )


def _is_running(mark: str) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                return True
    return False


_Attempt = Callable[[OwnedSandbox, Path], Awaitable[_Outcome]]
_ATTEMPTS: tuple[tuple[str, bool, _Attempt], ...] = (
    ("command runs", True, _command_runs),
    ("network off", True, _network_off),
    ("read-only system", True, _read_only_system),
    ("private /tmp", False, _private_tmp),
    ("no /etc/shadow", True, _no_shadow),
    ("process limit", False, _process_limit),
    ("file size limit", True, _file_size_limit),
    ("whole-tree kill", True, _tree_kill),
    ("clean reset", True, _clean_reset),
    ("output cap", True, _output_cap),
)
