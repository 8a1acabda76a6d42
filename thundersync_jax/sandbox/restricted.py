"""The restricted backend, for hosts without namespaces: a uid a slot, resource limits, Landlock,
seccomp, a subreaper.

It needs no capability beyond switching the uid, and works as an ordinary user too, where the
process limit is not enforced and Landlock alone keeps the caller's files apart. What a host lacks,
the self-test reports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox.framing import MARKER_FD, SHELL, environment
from thundersync_jax.sandbox.shell import ShellSandbox
from thundersync_jax.sandbox.slots import Slot

_SUPERVISOR = Path(__file__).with_name("restricted_supervisor.py")


class RestrictedSupervisor:
    """A Python process beside the sandbox, with the uid of the caller."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def started(self, answer: bytes) -> None:
        pass

    def kill(self) -> None:
        pass  # the closed control socket tells it

    def kill_hard(self) -> None:
        self.process.kill()


class RestrictedBackend:
    """Makes sandboxes that are restricted processes of this host."""

    name = "restricted"

    def __init__(self, limits: SandboxSection) -> None:
        self.limits = limits

    def create(self, index: int) -> ShellSandbox:
        return ShellSandbox(self, index)

    def launch(self, slot: Slot, control_fd: int) -> RestrictedSupervisor:
        settings = {
            "uid": slot.uid,
            "work": str(slot.work),
            "tmp": str(slot.tmp),
            "limits": dataclasses.asdict(self.limits),
            "environment": environment(str(slot.work), str(slot.tmp)),
            "shell": SHELL,
            "marker_fd": MARKER_FD,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=control_fd,
            env={"PATH": os.defpath},
            bufsize=0,
        )
        return RestrictedSupervisor(process)
