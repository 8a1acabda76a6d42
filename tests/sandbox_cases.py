"""Real sandboxes for tests: which backends this host can run, and what is still alive."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox.base import OwnedSandbox, SandboxPool
from thundersync_jax.sandbox.selection import BACKENDS

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000


@functools.cache
def forbids_namespaces() -> bool:
    """Whether the kernel refuses this user new namespaces: only then can bubblewrap not work."""
    flags = CLONE_NEWNS | CLONE_NEWPID | (0 if os.getuid() == 0 else CLONE_NEWUSER)
    code = f"import ctypes; raise SystemExit(ctypes.CDLL(None).unshare({flags}) != 0)"
    return subprocess.run([sys.executable, "-c", code], timeout=60).returncode != 0


def require(backend: str) -> None:
    if backend == "bubblewrap" and forbids_namespaces():
        pytest.skip("this host forbids namespaces, which bubblewrap is made of")


@contextlib.asynccontextmanager
async def one_sandbox(backend: str, **limits: object) -> AsyncIterator[OwnedSandbox]:
    require(backend)
    sandbox = BACKENDS[backend](SandboxSection(**limits)).create(0)
    try:
        await sandbox.reset()
        yield sandbox
    finally:
        await sandbox.close()


@contextlib.asynccontextmanager
async def pool(
    backend: str, num_slots: int = 2, acquire_timeout_s: float = 10.0, **limits: object
) -> AsyncIterator[SandboxPool]:
    require(backend)
    made = BACKENDS[backend](SandboxSection(num_slots=num_slots, **limits))
    sandboxes = SandboxPool(made, num_slots=num_slots, acquire_timeout_s=acquire_timeout_s)
    try:
        yield sandboxes
    finally:
        await sandboxes.close()


def fresh_mark() -> str:
    """A number of seconds to sleep that names its process."""
    return f"86400.{secrets.randbelow(10**9):09d}"


def is_running(mark: str) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                return True
    return False


async def begins(mark: str) -> bool:
    """Whether a process of that mark appears within the deadline; a fork precedes its exec."""
    return await _becomes(mark, True)


async def ends(mark: str) -> bool:
    """Whether the process of that mark is gone within the deadline; kills are asynchronous."""
    return await _becomes(mark, False)


async def _becomes(mark: str, expected: bool, timeout_s: float = 5.0) -> bool:
    for _ in range(round(timeout_s / 0.005)):
        if is_running(mark) == expected:
            return True
        await asyncio.sleep(0.005)
    return False
