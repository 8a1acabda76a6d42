"""The bubblewrap backend: namespaces for network, processes, IPC and mounts, a read-only system,
one uid a slot.

Inside the namespaces, process 1 is a supervising bash: signals from inside cannot end it, orphans
become its children and it reaps them, and when it dies the kernel kills everything else. A signal
to -1 from there reaches every other process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.sandbox.framing import MARKER_FD, SHELL, environment
from thundersync_jax.sandbox.shell import ShellSandbox
from thundersync_jax.sandbox.slots import Slot

WORK = "/app"
MAX_OPEN_FILES = 512

# The first test makes sure that only a fresh namespace is ever killed and wiped.
# Job control gives the shell default signals; `disown` keeps its end unreported. Where IPC objects
# outlive the shell, or files cannot be wiped, the supervisor ends: the sandbox is then built again.
SUPERVISOR = f"""
shopt -s nullglob dotglob
others=(/tmp/*)
(( $$ == 1 && ${{#others[@]}} == 0 )) || {{ echo "not a fresh namespace" >&2; exit; }}
start() {{
  set -m
  {{ {" ".join(SHELL)} {MARKER_FD}>&1 2>&1; printf '\\036%s exit %d\\036' "$1" $?; }} <&0 &
  disown
  set +m
}}
wipe() {{
  local entries=({WORK}/* /tmp/* /dev/shm/*)
  (( ${{#entries[@]}} )) || return 0
  rm -rf -- "${{entries[@]}}" 2>/dev/null && return
  chmod -R u+rwX -- "${{entries[@]}}"
  rm -rf -- "${{entries[@]}}"
}}
while read -r request token <&2; do
  if [[ $request == reset ]]; then
    kill -9 -1
    while others=(/proc/[0-9]*); (( ${{#others[@]}} > 1 )); do read -rt 0.0005 <&2; done
    for kind in shm sem msg; do
      mapfile -t objects < /proc/sysvipc/$kind
      (( ${{#objects[@]}} > 1 )) && exit
    done
    wipe || exit
  fi
  start "$token"
  echo ready >&2
done
"""


class BubblewrapSupervisor:
    """The bubblewrap process and the first process of its namespace."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._init_fd = -1

    def started(self, answer: bytes) -> None:
        found = re.search(rb'"child-pid": (\d+)', answer)
        if found is None:
            raise SandboxError(f"bubblewrap did not tell its child's pid, got {answer!r}")
        self._init_fd = os.pidfd_open(int(found[1]))

    def kill(self) -> None:
        # bubblewrap exits after it has reaped process 1, whose end the kernel delays until its
        # namespace is empty.
        if self._init_fd < 0:
            self.process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
        os.close(self._init_fd)
        self._init_fd = -1

    def kill_hard(self) -> None:
        self.process.kill()


class BubblewrapBackend:
    """Makes sandboxes in bubblewrap namespaces."""

    name = "bubblewrap"

    def __init__(self, limits: SandboxSection) -> None:
        self.limits = limits

    def create(self, index: int) -> ShellSandbox:
        return ShellSandbox(self, index)

    def launch(self, slot: Slot, control_fd: int) -> BubblewrapSupervisor:
        info_fd = os.dup(control_fd)
        try:
            process = subprocess.Popen(
                self._arguments(slot, info_fd),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=control_fd,
                pass_fds=(info_fd,),
                bufsize=0,
            )
        except FileNotFoundError as error:
            raise SandboxError(
                f"{error.filename} is not installed: apt-get install bubblewrap util-linux"
            ) from error
        finally:
            os.close(info_fd)
        return BubblewrapSupervisor(process)

    def _arguments(self, slot: Slot, info_fd: int) -> list[str]:
        limits = self.limits
        arguments = [
            "prlimit",
            f"--fsize={limits.max_file_bytes}",
            f"--cpu={limits.cpu_s}:{limits.cpu_s + 5}",
            "--core=0",
        ]
        arguments += [f"--nofile={MAX_OPEN_FILES}", "--msgqueue=0"]
        if slot.uid is None:  # RLIMIT_NPROC would count every process of the caller
            arguments += ["--"]
        else:
            arguments += [f"--nproc={limits.max_processes}", "--", "setpriv", f"--reuid={slot.uid}"]
            arguments += [f"--regid={slot.uid}", "--clear-groups", "--"]
        arguments += [
            "bwrap",
            "--tmpfs",
            "/",
            "--dev",
            "/dev",
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        ]
        arguments += [
            "--proc",
            "/proc",
            *_system_mounts(),
            "--tmpfs",
            "/tmp",
            "--bind",
            str(slot.work),
            WORK,
        ]
        arguments += [
            "--remount-ro",
            "/",
            "--chdir",
            WORK,
            "--unshare-all",
            "--as-pid-1",
            "--die-with-parent",
        ]
        arguments += ["--new-session", "--info-fd", str(info_fd), "--clearenv"]
        for name, value in environment(WORK, "/tmp").items():
            arguments += ["--setenv", name, value]
        return [*arguments, *SHELL, "-c", SUPERVISOR]


def _system_mounts() -> list[str]:
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            mounts += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            mounts += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/alternatives"):
        mounts += ["--ro-bind-try", path, path]
    return mounts
