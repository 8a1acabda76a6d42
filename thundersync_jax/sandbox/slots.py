"""A slot: the numeric uid and the directories of one sandbox on the host.

As root every slot has a uid of its own, because RLIMIT_NPROC counts per uid and because processes
are killed by uid. A uid is leased by a file lock, so two runs on one host never share one; a run
that died leaves no uid taken, and the next holder of the uid removes its directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from thundersync_jax.sandbox.base import SandboxError

UIDS = range(60000, 64000)
_LOCK_DIRECTORY = "/run/thundersync-sandbox-uids"


class Slot:
    """The host side of one sandbox. `open` acts, `close` frees.

    Attributes:
      uid: None when this process is not root; the sandbox then runs as the caller.
      work: the working directory of commands; tmp: their TMPDIR where the backend has no private
        /tmp.
    """

    def __init__(self) -> None:
        self.uid: int | None = None
        self.base: Path | None = None
        self._lock = -1

    @property
    def work(self) -> Path:
        return self._opened() / "work"

    @property
    def tmp(self) -> Path:
        return self._opened() / "tmp"

    def open(self) -> None:
        """Leases a uid and makes the directories; does nothing when that is done."""
        if self.base is not None:
            return
        prefix = "thundersync-sandbox-"
        if os.getuid() == 0:
            self.uid, self._lock = _lease_uid()
            prefix += f"{self.uid}-"
            for stale in Path(tempfile.gettempdir()).glob(f"{prefix}*"):  # left by a run that died
                if stale.lstat().st_uid == 0:
                    _remove_tree(stale)
        self.base = Path(tempfile.mkdtemp(prefix=prefix))
        self.base.chmod(0o711)  # the sandbox's uid passes through, and sees nothing
        self._make_directories()

    def wipe(self) -> None:
        """Empties the directories from outside; no process of the sandbox may be alive."""
        if self.base is not None:
            _remove_tree(self.work)
            _remove_tree(self.tmp)
            with _refused("."):
                self._make_directories()

    def close(self) -> None:
        """Removes the directories and frees the uid."""
        if self.base is not None:
            _remove_tree(self.base)
            self.base = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock, self.uid = -1, None

    def write_file(self, path: str, content: bytes) -> None:
        """Replaces a file of the working directory without following a link of the sandbox's
        making.
        """
        *parents, name = _parts(path)
        with self._directory(parents, create=True) as directory, _refused(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
            with open(fd, "wb") as file:
                file.write(content)
                if self.uid is not None:
                    os.fchown(fd, self.uid, self.uid)

    def read_file(self, path: str, max_bytes: int) -> bytes:
        """Reads a regular file of the working directory without following links."""
        *parents, name = _parts(path)
        with self._directory(parents, create=False) as directory, _refused(path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block
            with open(os.open(name, flags, dir_fd=directory), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                    raise SandboxError(
                        f"sandbox file {path!r}: expected a regular file of at most {max_bytes} "
                        f"bytes, got {stat.filemode(status.st_mode)} with {status.st_size} bytes"
                    )
                return file.read()

    def file_bytes(self, path: str) -> int:
        """The size of a file of the working directory."""
        *parents, name = _parts(path)
        with self._directory(parents, create=False) as directory, _refused(path):
            return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size

    @contextlib.contextmanager
    def _directory(self, parents: list[str], create: bool) -> Iterator[int]:
        """A descriptor of the directory `parents` below the working directory, reached without
        following links.
        """
        fd = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with _refused("/".join(parents) or "."):
                for name in parents:
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(name, 0o755, dir_fd=fd)
                            if self.uid is not None:
                                os.chown(name, self.uid, self.uid, dir_fd=fd, follow_symlinks=False)
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                    os.close(fd)
                    fd = below
            yield fd
        finally:
            os.close(fd)

    def _make_directories(self) -> None:
        for path in (self.work, self.tmp):
            path.mkdir(mode=0o700)
            if self.uid is not None:
                os.chown(path, self.uid, self.uid)

    def _opened(self) -> Path:
        if self.base is None:
            raise SandboxError("the sandbox has no files yet: reset or run it first")
        return self.base


def _lease_uid() -> tuple[int, int]:
    os.makedirs(_LOCK_DIRECTORY, mode=0o700, exist_ok=True)
    for uid in UIDS:
        fd = os.open(f"{_LOCK_DIRECTORY}/{uid}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return uid, fd
        except BlockingIOError:
            os.close(fd)
    raise SandboxError(f"every uid of {UIDS} is leased ({_LOCK_DIRECTORY}): stop another run")


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise SandboxError(
            f"sandbox path {path!r}: expected one relative to the working directory, without '..'"
        )
    return parts


@contextlib.contextmanager
def _refused(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SandboxError(f"sandbox file {path!r}: {error.strerror}") from error


def _remove_tree(path: Path) -> None:
    if os.getuid() != 0:  # a directory without permissions stops anyone but root
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False, capture_output=True)
    shutil.rmtree(path, ignore_errors=True)  # what stays makes the next mkdir fail by name
