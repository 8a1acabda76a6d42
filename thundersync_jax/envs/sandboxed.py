"""What environments with one sandbox share."""

from __future__ import annotations

from thundersync_jax.envs.base import Attempt
from thundersync_jax.sandbox.base import SandboxError, SandboxLease


class SandboxedEnvironment:
    """`reset` and `close` of an environment whose attempt has one sandbox: `step` and `grade` are
    its subclass's.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._lease: SandboxLease | None = None

    @property
    def sandbox(self) -> SandboxLease:
        """Raises SandboxError before `reset` and after `close`."""
        if self._lease is None:
            raise SandboxError(f"{self.attempt.key}: the environment was not reset, or is closed")
        return self._lease

    async def reset(self) -> None:
        """Starts a sandbox with the task's files."""
        self._lease = await self.attempt.sandboxes.acquire(str(self.attempt.key))
        for path, content in self.attempt.task.files.items():
            await self._lease.write_file(path, content)

    async def close(self) -> None:
        """Ends it; also after a reset that failed."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()
