"""Which backend runs, decided by its self-test and never by what is installed. The mains call
`open_pool`.
"""

from __future__ import annotations

from collections.abc import Callable

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.errors import UserError
from thundersync_jax.sandbox.base import (
    SandboxBackend,
    SandboxError,
    SandboxPool,
    SelfTestReport,
)
from thundersync_jax.sandbox.bubblewrap import BubblewrapBackend
from thundersync_jax.sandbox.restricted import RestrictedBackend
from thundersync_jax.sandbox.self_test import self_test


class NoSandboxError(SandboxError, UserError):
    """No backend passes its self-test."""


# In order of preference.
BACKENDS: dict[str, Callable[[SandboxSection], SandboxBackend]] = {
    "bubblewrap": BubblewrapBackend,
    "restricted": RestrictedBackend,
}
_REMEDIES = {
    "bubblewrap": "apt-get install bubblewrap util-linux, and run as root or allow unprivileged "
    "user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)",
    "restricted": "run as root, on a kernel with Landlock (5.13) if other users' files matter",
}


def candidates(backend: str) -> tuple[str, ...]:
    """The backends that `sandbox.backend` allows, in order of preference."""
    return tuple(BACKENDS) if backend == "auto" else (backend,)


async def select(section: SandboxSection) -> tuple[SandboxBackend, SelfTestReport]:
    """The first allowed backend whose self-test passes; NoSandboxError names what each one lacked,
    and the remedy.
    """
    refusals = []
    for name in candidates(section.backend):
        report = await self_test(BACKENDS[name], section)
        if report.is_passed:
            return BACKENDS[name](section), report
        failed = [
            f"{c.name} ({c.detail})" for c in report.checks if c.is_required and not c.is_enforced
        ]
        refusals.append(f"{name}: {report.error or ', '.join(failed)}. Remedy: {_REMEDIES[name]}.")
    raise NoSandboxError(
        "no sandbox backend passes its self-test, so no command will be run.\n"
        + "\n".join(refusals)
    )


async def open_pool(section: SandboxSection) -> tuple[SandboxPool, SelfTestReport]:
    """A pool of the selected backend, and what that backend enforces. Sandboxes start when first
    acquired.
    """
    backend, report = await select(section)
    pool = SandboxPool(
        backend, num_slots=section.num_slots, acquire_timeout_s=section.start_timeout_s
    )
    return pool, report
