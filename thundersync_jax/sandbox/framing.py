r"""How commands and their output share one pipe each with a persistent bash.

A command goes in as one `eval` of a quoted string, so that a syntax error cannot swallow what
follows. Its output ends with a marker, `\x1e TOKEN KIND CODE \x1e`, written to descriptor 9, which
is the output pipe under a number that the
command does not see: it works after `exec >file`, and a background child that keeps the pipe open
delays nothing. TOKEN is random for every shell; KIND is the command's number, or "exit" when the
shell itself ended.

The marker cannot be met by accident. A command runs *in* the shell, so one that sets out to
redefine the shell can lie about its own exit code; verdicts belong in the grader, which starts
after the agent has stopped.
"""

from __future__ import annotations

import dataclasses
import shlex

from thundersync_jax.sandbox.base import SandboxError

SHELL = ("/bin/bash", "--noprofile", "--norc")
MARKER_FD = 9
CANNOT_RUN = 126  # a shell's exit code for what it found and cannot execute
# One pipe buffer: the pipe is empty between commands, so one write never blocks.
MAX_FRAME_BYTES = 65536
_MAX_MARKER_BYTES = 80


class UnfitCommandError(ValueError):
    """A command that cannot be given to a shell: a sentence for who wrote it."""


def frame(command: str, token: str, number: int) -> bytes:
    """The bytes that make the shell run `command` and mark its end; UnfitCommandError."""
    if "\0" in command:
        raise UnfitCommandError(f"a command cannot hold a NUL byte, got {command[:80]!r}")
    text = (
        f"eval {shlex.quote(command)} </dev/null {MARKER_FD}>&-\n"
        f"builtin printf '\\036{token} {number} %d\\036' $? >&{MARKER_FD}\n"
    ).encode(errors="replace")
    if len(text) > MAX_FRAME_BYTES:
        raise UnfitCommandError(
            f"a command of {len(text)} bytes, expected at most {MAX_FRAME_BYTES}: "
            "write it to a file first, then run the file"
        )
    return text


def environment(work: str, tmp: str) -> dict[str, str]:
    """The environment variables of a sandbox's shell."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": tmp,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marker:
    """The end of a command: its number, or "exit"; the exit code; and the bytes that came after
    it.
    """

    kind: str
    exit_code: int
    rest: bytes


class OutputWindow:
    """Keeps the head and the tail of a byte stream, and finds the marker that ends it.

    Args:
      max_bytes: what is kept, half of it from each end. Memory stays below three times this plus
        one read.
    """

    def __init__(self, token: str, max_bytes: int) -> None:
        self._start = b"\x1e" + token.encode() + b" "
        self._max_head = (max_bytes + 1) // 2
        self._max_tail = max_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._pending = b""  # the end of the stream while it may be the beginning of a marker
        self.num_bytes = 0

    def feed(self, chunk: bytes) -> Marker | None:
        """Takes what was read; returns the marker once it is complete."""
        data = self._pending + chunk
        start = data.find(self._start)
        if start < 0:
            keep = len(self._start) - 1
            self._keep(data[:-keep])
            self._pending = data[-keep:]
            return None
        end = data.find(b"\x1e", start + 1)
        if end < 0 and len(data) - start <= _MAX_MARKER_BYTES:
            self._keep(data[:start])
            self._pending = data[start:]
            return None
        self._keep(data[:start])
        self._pending = b""
        fields = data[start + len(self._start) : end].split()
        if len(fields) != 2:
            raise SandboxError(
                f"a malformed end marker, got {data[start : start + _MAX_MARKER_BYTES]!r}"
            )
        return Marker(kind=fields[0].decode(), exit_code=int(fields[1]), rest=data[end + 1 :])

    def text(self) -> tuple[str, int]:
        """The output, decoded with replacement, and the number of bytes cut out of its middle."""
        self._keep(self._pending)
        self._pending = b""
        tail = self._tail[-self._max_tail :] if self._max_tail else b""
        num_dropped = self.num_bytes - len(self._head) - len(tail)
        head_text = self._head.decode(errors="replace")
        if not num_dropped:
            return (self._head + tail).decode(errors="replace"), 0
        cut = f"\n[... {num_dropped} bytes dropped ...]\n"
        return head_text + cut + tail.decode(errors="replace"), num_dropped

    def _keep(self, data: bytes) -> None:
        self.num_bytes += len(data)
        num_head = self._max_head - len(self._head)
        if num_head > 0:
            self._head += data[:num_head]
            data = data[num_head:]
        self._tail += data
        if len(self._tail) > 2 * self._max_tail:
            del self._tail[: len(self._tail) - self._max_tail]
