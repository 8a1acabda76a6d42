"""A backend is taken for what it was seen to enforce; what it does not enforce is said."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_cases import forbids_namespaces, one_sandbox, require

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.errors import UserError
from thundersync_jax.sandbox import selection
from thundersync_jax.sandbox.bubblewrap import SUPERVISOR, BubblewrapBackend
from thundersync_jax.sandbox.restricted import RestrictedBackend
from thundersync_jax.sandbox.self_test import self_test

ROOT = Path(__file__).parents[1]
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="uids of their own need root")


@AS_ROOT
@pytest.mark.parametrize("backend", ("bubblewrap", "restricted"))
def test_as_root_every_backend_enforces_everything(backend):
    require(backend)
    report = asyncio.run(self_test(selection.BACKENDS[backend], SandboxSection()))
    assert report.is_passed and report.unenforced == (), report


class _Loose(BubblewrapBackend):
    """Bubblewrap with one property taken away. Never mount a host directory where it wipes."""

    name = "loose"
    change = staticmethod(lambda arguments: arguments)

    def _arguments(self, slot, info_fd):
        return self.change(super()._arguments(slot, info_fd))


def _without(*words: str):
    def change(arguments: list[str]) -> list[str]:
        return [a for a in arguments if a not in words and a.split("=")[0] not in words]

    return change


def _with_mount(*mount: str):
    def change(arguments: list[str]) -> list[str]:
        at = arguments.index("--remount-ro", arguments.index("--bind"))
        return [*arguments[:at], *mount, *arguments[at:]]

    return change


@AS_ROOT
@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (
            lambda a: [*a[: a.index("--info-fd")], "--share-net", *a[a.index("--info-fd") :]],
            "network off",
        ),
        (_without("--fsize"), "file size limit"),
        (_without("--nproc"), "process limit"),
        (_with_mount("--tmpfs", "/srv"), None),
    ],
)
def test_the_self_test_sees_each_property_that_is_missing(change, lost):
    require("bubblewrap")

    class Backend(_Loose):
        pass

    Backend.change = staticmethod(change)
    report = asyncio.run(self_test(Backend, SandboxSection()))
    assert not report.error, report.error
    assert (lost in report.unenforced) if lost else report.unenforced == ()


def test_a_restricted_shell_without_its_own_uid_reports_the_process_limit(monkeypatch):
    """What an ordinary user gets, as far as root can act it: no uid, so no RLIMIT_NPROC."""
    monkeypatch.setattr("thundersync_jax.sandbox.slots.os.getuid", lambda: 1000)
    report = asyncio.run(self_test(RestrictedBackend, SandboxSection()))
    assert "process limit" in report.unenforced


class _Broken:
    """Stands for a backend that this host cannot run."""

    name = "bubblewrap"

    def __init__(self, limits):
        self._backend = BubblewrapBackend(limits)

    def create(self, index):
        self._backend._arguments = lambda slot, info_fd: [
            "/bin/sh",
            "-c",
            "echo bwrap: no >&2; exit 1",
        ]
        return self._backend.create(index)


def test_auto_takes_the_first_that_passes_and_refuses_with_reasons_when_none_does(monkeypatch):
    monkeypatch.setitem(selection.BACKENDS, "bubblewrap", _Broken)
    if os.getuid() == 0:
        backend, report = asyncio.run(selection.select(SandboxSection()))
        assert (backend.name, report.backend) == ("restricted", "restricted")
    with pytest.raises(UserError) as refusal:
        asyncio.run(selection.select(SandboxSection(backend="bubblewrap")))
    for part in ("bubblewrap", "bwrap: no", "apt-get install bubblewrap"):
        assert part in str(refusal.value)


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    report = asyncio.run(self_test(BubblewrapBackend, SandboxSection()))
    assert not report.is_passed
    assert "prlimit is not installed: apt-get install bubblewrap util-linux" in report.error


def test_open_pool_lends_working_sandboxes():
    async def body():
        pool, report = await selection.open_pool(SandboxSection(num_slots=1))
        assert report.is_passed and pool.backend_name == report.backend
        lease = await pool.acquire("owner")
        assert (await lease.run("echo hi", 5.0)).output == "hi\n"
        await lease.release()
        await pool.close()

    asyncio.run(body())


def test_the_command_prints_a_table_and_json_and_exits_by_the_verdict():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "thundersync_jax.sandbox", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    table = run("--backend=restricted")
    assert table.returncode == 0, table.stderr
    assert "restricted: usable" in table.stdout and "whole-tree kill" in table.stdout
    answer = json.loads(run("--json").stdout)
    assert answer["chosen"] == ("restricted" if forbids_namespaces() else "bubblewrap")
    assert {check["name"] for check in answer["reports"][0]["checks"]} >= {
        "network off",
        "clean reset",
    }


@pytest.mark.parametrize("backend", ("bubblewrap", "restricted"))
def test_sandboxes_inherit_no_descriptor_and_no_environment_variable(backend, monkeypatch):
    monkeypatch.setenv("THUNDERSYNC_SECRET", "hidden")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)

    async def body():
        async with one_sandbox(backend) as sandbox:
            listing = await sandbox.run("env; ls -l /proc/$BASHPID/fd", 5.0)
            assert "THUNDERSYNC_SECRET" not in listing.output
            descriptors = {line.split()[-3] for line in listing.output.splitlines() if "->" in line}
            assert {"0", "1", "2"} <= descriptors and not {str(reading), str(writing)} & descriptors

    try:
        asyncio.run(body())
    finally:
        os.close(reading)
        os.close(writing)


def test_the_supervisor_touches_nothing_outside_a_fresh_namespace():
    """Run by hand on the host it refuses, before any request."""
    command = ["bash", "--noprofile", "--norc", "-c", SUPERVISOR]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    assert b"not a fresh namespace" in ended.stderr
