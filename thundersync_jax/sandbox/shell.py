"""`ShellSandbox`: one persistent bash under a supervisor process, for every backend.

A backend's supervisor holds three descriptors: 0 commands, which its shell reads; 1 output; 2 a
control socket, on which it answers two requests, "reset TOKEN" (kill all, wipe, start a shell) and
"shell TOKEN" (start a shell), with "ready", and on which it dies by name. When a shell ends, the
supervisor writes the "exit" marker of `framing` to the output; when the control socket closes it
kills everything and exits. Its exit proves that nothing of the sandbox is alive.

A timeout, a cancelled call, an ended shell or a broken protocol kills the whole tree; the sandbox
starts again when next used, with the files of its working directory. Nothing here blocks the event
loop for longer than a process start.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import re
import secrets
import socket
import subprocess
from typing import Protocol

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox import framing
from thundersync_jax.sandbox.base import CommandResult, SandboxError
from thundersync_jax.sandbox.slots import Slot

# A command that prints this many times what is kept is killed: reading it would starve the loop.
FLOOD_FACTOR = 4096
_RESET_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0
_READ_BYTES = 65536
# Files above this size are read and written in a thread.
_INLINE_FILE_BYTES = 1 << 20
_EXIT_LIMITS = {128 + 24: "cpu_s", 128 + 25: "max_file_bytes"}  # SIGXCPU, SIGXFSZ
# What bash and dash say when RLIMIT_NPROC stops them.
_FORK_FAILED = re.compile(r"fork: .*Resource temporarily unavailable|Cannot fork")


class Supervisor(Protocol):
    """A started supervisor process of a backend."""

    process: subprocess.Popen[bytes]

    def started(self, answer: bytes) -> None:
        """Told once what the supervisor wrote to the control socket before it was first ready."""
        ...

    def kill(self) -> None:
        """Starts to kill the whole tree, without waiting; the control socket is closed already."""
        ...

    def kill_hard(self) -> None:
        """The last resort when `kill` did not end the process in time."""
        ...


class Backend(Protocol):
    """What a `ShellSandbox` needs of its backend."""

    name: str
    limits: SandboxSection

    def launch(self, slot: Slot, control_fd: int) -> Supervisor:
        """Starts the supervisor with pipes for 0 and 1, and `control_fd` as 2."""
        ...


class _State(enum.Enum):
    STOPPED = "stopped"  # no process
    PROMPT = "prompt"  # the shell waits for a command
    BUSY = "busy"
    CLOSED = "closed"


class ShellSandbox:
    """Implements `OwnedSandbox` over a backend's supervisor."""

    def __init__(self, backend: Backend, index: int) -> None:
        self._backend = backend
        self._limits = backend.limits
        self._name = f"{backend.name} sandbox {index}"
        self._slot = Slot()
        self._state = _State.STOPPED
        self._is_clean = False
        self._supervisor: Supervisor | None = None
        self._dying: list[Supervisor] = []
        self._control: socket.socket | None = None
        self._commands = self._output = -1
        self._token = ""
        self._number = 0
        self._rest = b""
        self._waiter: asyncio.Future[bool] | None = None
        self._waiting_fd = -1
        self._lifecycle = asyncio.Lock()

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        """See `Sandbox.run`. Raises SandboxError when the sandbox breaks; a timeout is a result."""
        self._check_free("run a command")
        if self._state is not _State.PROMPT:
            await self._start_again()
        self._number += 1
        try:
            text = framing.frame(command, self._token, self._number)
        except framing.UnfitCommandError as error:  # the policy's, so no failure of the sandbox
            return CommandResult(output=f"{error}\n", exit_code=framing.CANNOT_RUN)
        self._state, self._is_clean = _State.BUSY, False
        try:
            os.write(self._commands, text)
            return await self._collect(timeout_s)
        except OSError as error:
            raise SandboxError(
                f"{self._name} died at the command {command[:80]!r}: {error}"
            ) from error
        finally:
            if self._state is _State.BUSY:
                self.kill()

    async def write_file(self, path: str, content: str | bytes) -> None:
        self._check_free("write a file")
        self._slot.open()
        self._is_clean = False
        data = content.encode() if isinstance(content, str) else content
        if len(data) > _INLINE_FILE_BYTES:
            await asyncio.to_thread(self._slot.write_file, path, data)
        else:
            self._slot.write_file(path, data)

    async def read_file(self, path: str) -> bytes:
        self._check_free("read a file")
        if self._slot.file_bytes(path) > _INLINE_FILE_BYTES:
            return await asyncio.to_thread(self._slot.read_file, path, self._limits.max_file_bytes)
        return self._slot.read_file(path, self._limits.max_file_bytes)

    async def reset(self) -> None:
        """See `Sandbox.reset`: by the supervisor, and from scratch where it does not answer."""
        self._check_free("reset")
        async with self._lifecycle:
            if self._supervisor is not None and self._supervisor.process.poll() is None:
                if self._is_clean:
                    return
                with contextlib.suppress(SandboxError):
                    await self._request("reset", _RESET_TIMEOUT_S)
                    self._is_clean = True
                    return
            self.kill()
            await self._reap()
            await asyncio.to_thread(self._slot.wipe)
            await self._start("reset")
            self._is_clean = True

    def kill(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            asyncio.get_running_loop().remove_reader(self._waiting_fd)
            if not waiter.done():
                waiter.set_exception(
                    SandboxError(f"{self._name} was killed while a call waited for it")
                )
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            if self._control is not None:
                self._control.close()
            os.close(self._commands)
            os.close(self._output)
            self._commands = self._output = -1
            supervisor.kill()
            self._dying.append(supervisor)
        if self._state is not _State.CLOSED:
            self._state = _State.STOPPED

    async def close(self) -> None:
        self._state = _State.CLOSED
        self.kill()
        async with self._lifecycle:
            await self._reap()
            await asyncio.to_thread(self._slot.close)

    def _check_free(self, what: str) -> None:
        if self._state in (_State.BUSY, _State.CLOSED):
            raise SandboxError(
                f"{self._name} is {self._state.value}, cannot {what}: it has one owner and one call"
            )

    async def _start_again(self) -> None:
        async with self._lifecycle:
            await self._reap()
            await self._start("shell")

    async def _start(self, request: str) -> None:
        self._check_free("start")
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        is_started = False
        try:
            self._slot.open()
            with theirs:
                self._supervisor = self._backend.launch(self._slot, theirs.fileno())
            process = self._supervisor.process
            assert process.stdin is not None and process.stdout is not None
            with process.stdin, process.stdout:
                self._commands = os.dup(process.stdin.fileno())
                self._output = os.dup(process.stdout.fileno())
            for fd in (self._commands, self._output):
                os.set_blocking(fd, False)
            self._supervisor.started(await self._request(request, self._limits.start_timeout_s))
            is_started = True
        except OSError as error:
            raise SandboxError(f"{self._name} did not start: {error}") from error
        finally:
            if not is_started:
                self._control.close()
                self.kill()

    async def _request(self, request: str, timeout_s: float) -> bytes:
        """Asks the supervisor for a new shell and returns what it wrote before "ready"."""
        control = self._control
        assert control is not None
        self._state = _State.BUSY
        self._token, self._rest = secrets.token_hex(8), b""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        answer = b""
        try:
            control.send(f"{request} {self._token}\n".encode())
            while not answer.endswith(b"ready\n"):
                if not await self._readable(control.fileno(), deadline_s):
                    raise SandboxError(
                        f"{self._name} did not answer {request!r} within {timeout_s:g} s"
                    )
                chunk = control.recv(4096)
                answer += chunk
                if not chunk:
                    raise ConnectionResetError("it ended")
            if request == "reset":  # every writer is dead: what is left belongs to nobody
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._output, _READ_BYTES):
                        pass
            self._state = _State.PROMPT
            return answer
        except OSError as error:
            with contextlib.suppress(OSError):  # its last words may have come before it ended
                answer += control.recv(4096)
            words = answer.decode(errors="replace").rpartition("}\n")[2].strip()
            raise SandboxError(f"{self._name} died at {request!r}: {words or error}") from error
        finally:
            if self._state is _State.BUSY:
                self.kill()

    async def _collect(self, timeout_s: float) -> CommandResult:
        window = framing.OutputWindow(self._token, self._limits.output_bytes)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        marker = window.feed(self._rest) if self._rest else None
        limits: list[str] = []
        while marker is None and not limits:
            if not await self._readable(self._output, deadline_s):
                limits.append("timeout_s")
                break
            chunk = os.read(self._output, _READ_BYTES)
            if not chunk:
                raise SandboxError(
                    f"{self._name} ended while a command ran: {window.text()[0][-200:]!r}"
                )
            marker = window.feed(chunk)
            if window.num_bytes > FLOOD_FACTOR * self._limits.output_bytes:
                limits.append("output_flood")
        output, num_dropped = window.text()
        exit_code = None
        if marker is not None:
            exit_code, self._rest = marker.exit_code, marker.rest
            if marker.kind not in ("exit", str(self._number)):
                raise SandboxError(
                    f"{self._name}: end of command {marker.kind}, expected {self._number}"
                )
            if marker.kind != "exit":  # an ended shell may have left its command unread
                self._state = _State.PROMPT
            limits += [_EXIT_LIMITS[exit_code]] if exit_code in _EXIT_LIMITS else []
        if num_dropped:
            limits.append("output_bytes")
        if exit_code != 0 and _FORK_FAILED.search(output):
            limits.append("max_processes")
        return CommandResult(
            output=output,
            exit_code=exit_code,
            is_timeout="timeout_s" in limits,
            dropped_bytes=num_dropped,
            limits_hit=tuple(limits),
        )

    async def _reap(self) -> None:
        """Waits until every process of every killed supervisor is gone."""
        loop = asyncio.get_running_loop()
        for kill_hard in (False, True):
            deadline_s = loop.time() + _KILL_TIMEOUT_S
            while self._dying and loop.time() < deadline_s:
                self._dying = [s for s in self._dying if s.process.poll() is None]
                if self._dying:
                    await asyncio.sleep(0.002)
            for supervisor in self._dying:
                if kill_hard:
                    raise SandboxError(
                        f"{self._name}: process {supervisor.process.pid} outlived SIGKILL"
                    )
                supervisor.kill_hard()

    async def _readable(self, fd: int, deadline_s: float) -> bool:
        """Waits until `fd` has bytes or its end; False at the deadline of the loop's clock."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake(is_readable: bool) -> None:
            if not waiter.done():
                waiter.set_result(is_readable)

        self._waiter, self._waiting_fd = waiter, fd
        loop.add_reader(fd, wake, True)
        timer = loop.call_at(deadline_s, wake, False)
        try:
            return await waiter
        finally:
            timer.cancel()
            if self._waiter is waiter:
                self._waiter = None
                loop.remove_reader(fd)
