"""Sandboxes: where an agent's commands run, who owns one, and what a backend proves that it
enforces.

Invariants:
  * A sandbox has one owner at a time, named in its `SandboxLease`; a released lease refuses every
    call.
  * A lease starts from a clean slate: no process, file or shell state of an earlier owner.
  * At most `num_slots` sandboxes are alive, started when first needed, in parallel.
  * Cancelling any call leaves no process behind: the sandbox is killed at once and started again
    when next needed.
  * After `SandboxPool.close` nothing is alive and every further call raises.

Environments use `SandboxPool.acquire` and the lease; only this folder makes sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection
from typing import Protocol


class SandboxError(RuntimeError):
    """A sandbox that could not do what it was asked: which, what was awaited, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What one command did.

    Attributes:
      output: standard output and error as they came, decoded with replacement; the middle of a long
        one is cut out.
      exit_code: of the command, or of the shell when it ended; None when it was killed.
      is_timeout: it was killed at its deadline. After that, as after the end of the shell, files of
        the working directory stay; shell state, /tmp and background processes are gone.
      dropped_bytes: bytes cut out of `output`.
      limits_hit: names of the limits that fired: "timeout_s", "output_bytes", "output_flood",
        "max_processes", "max_file_bytes", "cpu_s".
    """

    output: str
    exit_code: int | None
    is_timeout: bool = False
    dropped_bytes: int = 0
    limits_hit: tuple[str, ...] = ()


class Sandbox(Protocol):
    """One persistent shell in an isolated place. Used from one asyncio loop, one call at a time.

    Paths are relative to the working directory, which is where commands start and `$HOME`.
    """

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """Runs `command` in the shell; variables, functions and the directory carry over to the
        next command. One that no shell can take, for a NUL byte or more than 64 KiB, is not run:
        its exit code is 126 and its output says why.
        """
        ...

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Writes a file of the working directory, with the directories above it; replaces what was
        there.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """Reads a regular file of the working directory; symbolic links are refused."""
        ...

    async def reset(self) -> None:
        """A clean slate for another attempt."""
        ...


class OwnedSandbox(Sandbox, Protocol):
    """What a pool needs beyond `Sandbox`."""

    def kill(self) -> None:
        """Starts to kill every process, without waiting. The next `reset` starts the sandbox
        again.
        """
        ...

    async def close(self) -> None:
        """Kills every process, waits until none is left and frees everything. Final."""
        ...


class SandboxBackend(Protocol):
    """One way to isolate."""

    name: str

    def create(self, index: int) -> OwnedSandbox:
        """A sandbox that is not started yet; `index` names it in errors."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One property of a backend, tried for real.

    Attributes:
      is_required: a backend without it is refused; otherwise its absence is reported only.
      detail: what was seen.
    """

    name: str
    is_enforced: bool
    is_required: bool
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTestReport:
    """What a backend enforces on this host.

    Attributes:
      error: why the backend did not start; "" when it did.
    """

    backend: str
    checks: tuple[Check, ...] = ()
    error: str = ""

    @property
    def is_passed(self) -> bool:
        return not self.error and all(c.is_enforced for c in self.checks if c.is_required)

    @property
    def unenforced(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.checks if not c.is_enforced)


class SandboxLease:
    """The right of one owner to one sandbox, until `release`. Satisfies `Sandbox`."""

    def __init__(self, pool: SandboxPool, owner: str, sandbox: OwnedSandbox) -> None:
        self.owner = owner
        self._pool = pool
        self._sandbox: OwnedSandbox | None = sandbox

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        return await self._held().run(command, timeout_s)

    async def write_file(self, path: str, content: str | bytes) -> None:
        await self._held().write_file(path, content)

    async def read_file(self, path: str) -> bytes:
        return await self._held().read_file(path)

    async def reset(self) -> None:
        await self._held().reset()

    async def release(self) -> None:
        """Gives the sandbox back, cleaned. Releasing twice does nothing."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._pool._take_back(self, sandbox)

    def _held(self) -> OwnedSandbox:
        if self._sandbox is None:
            raise SandboxError(
                f"the sandbox lease of {self.owner} was released: acquire another one"
            )
        return self._sandbox


class SandboxPool:
    """Owns at most `num_slots` sandboxes and lends them, most recently used first.

    Args:
      acquire_timeout_s: how long an owner waits for a free sandbox before SandboxError.
    """

    def __init__(
        self, backend: SandboxBackend, *, num_slots: int, acquire_timeout_s: float
    ) -> None:
        self.backend_name = backend.name
        self._acquire_timeout_s = acquire_timeout_s
        self._sandboxes = [backend.create(index) for index in range(num_slots)]
        self._free: asyncio.LifoQueue[OwnedSandbox | None] = asyncio.LifoQueue()
        for sandbox in reversed(self._sandboxes):
            self._free.put_nowait(sandbox)
        self._leases: set[SandboxLease] = set()
        self._is_closed = False

    @property
    def owners(self) -> tuple[str, ...]:
        """Who holds a sandbox now."""
        return tuple(sorted(lease.owner for lease in self._leases))

    async def acquire(self, owner: str) -> SandboxLease:
        """Waits for a free sandbox and lends it, clean, to `owner`. Raises SandboxError."""
        try:
            async with asyncio.timeout(self._acquire_timeout_s):
                sandbox = await self._free.get()
        except TimeoutError:
            raise SandboxError(
                f"{owner} waited {self._acquire_timeout_s:g} s for one of {len(self._sandboxes)} "
                f"sandboxes, held by {', '.join(self.owners[:4])}...: raise sandbox.num_slots or "
                "sandbox.start_timeout_s"
            ) from None
        if sandbox is None:
            self._free.put_nowait(None)
            raise SandboxError(f"{owner} asked for a sandbox of a closed pool")
        is_ready = False
        try:
            await sandbox.reset()
            is_ready = True
        finally:
            if not is_ready:
                sandbox.kill()
                self._put_back(sandbox)
        lease = SandboxLease(self, owner, sandbox)
        self._leases.add(lease)
        return lease

    async def sweep(self, live_owners: Collection[str]) -> tuple[str, ...]:
        """Releases every lease whose owner is not in `live_owners`; returns the owners it swept."""
        lost = [lease for lease in self._leases if lease.owner not in live_owners]
        await asyncio.gather(*(lease.release() for lease in lost))
        return tuple(sorted(lease.owner for lease in lost))

    async def close(self) -> None:
        """Kills every sandbox, waits until no process is left and removes their files."""
        self._is_closed = True
        for sandbox in self._sandboxes:
            sandbox.kill()
        for lease in tuple(self._leases):
            lease._sandbox = None
        self._leases.clear()
        self._free.put_nowait(None)
        closings = (sandbox.close() for sandbox in self._sandboxes)
        errors = [
            e for e in await asyncio.gather(*closings, return_exceptions=True) if e is not None
        ]
        if errors:
            raise SandboxError("; ".join(map(str, errors))) from errors[0]

    async def _take_back(self, lease: SandboxLease, sandbox: OwnedSandbox) -> None:
        is_clean = False
        try:
            with contextlib.suppress(
                SandboxError
            ):  # what cannot be cleaned is killed and built again
                await sandbox.reset()
                is_clean = True
        finally:
            if not is_clean:
                sandbox.kill()
            self._leases.discard(lease)
            self._put_back(sandbox)

    def _put_back(self, sandbox: OwnedSandbox) -> None:
        if not self._is_closed:
            self._free.put_nowait(sandbox)
