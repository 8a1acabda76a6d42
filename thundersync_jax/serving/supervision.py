"""Keeps one serving process alive: health, bounded restarts, signals. Never imports jax.

JetStream kills its process when one of its threads fails, so a server is a process of its own.

Invariants:
  * At most one child; it has ended when `Supervisor.run` returns, however that ends. The child's
    standard input is a pipe that only the supervisor holds: its end tells the child that the
    supervisor is gone (`end_with_supervisor`).
  * The port is held from the first start to the last end, so every child listens on the same one.
  * Every wait has a deadline; a child over it is killed and counts as one that died.
Called by the `serve` main, in its main thread.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

from thundersync_jax.errors import ConfigError, UserError

LOOPBACK = "127.0.0.1"

_HEALTH_METHOD = "/jetstream_proto.Orchestrator/HealthCheck"
_IS_LIVE = b"\x08\x01"  # HealthCheckResponse(is_live=True) as protobuf writes it
_POLL_S = 0.1


class SupervisionError(RuntimeError):
    """A server that does not stay up: how it ended, and how often it was restarted."""


class RefusedInputError(UserError):
    """The child refused its input, as another would; it said itself what was wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisionLimits:
    """Deadlines and bounds.

    Attributes:
      max_restarts, restart_window_s: at most so many restarts within any such time.
      start_timeout_s: from the start of a child to its first healthy answer; it compiles.
      health_interval_s, unhealthy_timeout_s: how often a child is asked, and how long it may not
        answer.
      stop_timeout_s: from the signal to the child's end.
    """

    max_restarts: int = 5
    restart_window_s: float = 600.0
    start_timeout_s: float = 600.0
    health_interval_s: float = 2.0
    unhealthy_timeout_s: float = 30.0
    stop_timeout_s: float = 10.0


@contextlib.contextmanager
def reserved_port(port: int) -> Iterator[int]:
    """Holds a loopback port, 0 for any free one, that only servers with SO_REUSEPORT can share.

    The socket does not listen: while no server does, connections are refused. gRPC sets
    SO_REUSEPORT.
    """
    with socket.socket() as free, socket.socket() as held:
        try:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((LOOPBACK, port))  # fails where another server has it
            port = free.getsockname()[1]
            free.close()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port={port} of {LOOPBACK} cannot be taken ({error}): give a free one, or 0"
            ) from error
        yield port


def is_serving(address: str, timeout_s: float) -> bool:
    """Whether a JetStream server answers at `address` that it is live."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return channel.unary_unary(_HEALTH_METHOD)(b"", timeout=timeout_s) == _IS_LIVE
        except grpc.RpcError:
            return False


def end_with_supervisor() -> None:
    """In a thread of the child: SIGTERM for this process once the supervisor is gone."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Runs `command` and restarts it until a signal comes or the limits are reached.

    Args:
      is_healthy: whether the child serves; it may take a second or so.
      report: told of every start and end.
      refusal_status: the exit status by which a child says that its input is bad.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        is_healthy: Callable[[], bool],
        report: Callable[[str], None],
        limits: SupervisionLimits,
        refusal_status: int,
    ) -> None:
        self._command = list(command)
        self._is_healthy = is_healthy
        self._report = report
        self._limits = limits
        self._refusal_status = refusal_status
        self._child: subprocess.Popen[bytes] | None = None
        self._signal: signal.Signals | None = None
        self._restarts: collections.deque[float] = collections.deque()

    def run(self) -> signal.Signals:
        """Serves until SIGINT or SIGTERM, which it returns.

        Raises:
          SupervisionError: the child ended too often.
          RefusedInputError: the child refused its input.
        """
        with self._signals_noted():
            try:
                while True:
                    end = self._serve_once()
                    self._end_child()
                    if self._signal is not None:
                        return self._signal
                    self._count_restart(end)
                    self._report(f"{end}; it is restarted")
            finally:
                self._end_child()

    def _serve_once(self) -> str:
        """One child from start to end; says how it ended."""
        limits = self._limits
        # Its own session: a Ctrl-C of the terminal reaches it through us alone, once.
        self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        name = f"the serving process {self._child.pid}"
        began_s = last_healthy_s = time.monotonic()
        is_up = False
        while self._signal is None:
            if (status := self._child.poll()) is not None:
                return f"{name} {describe_status(status)}" + ("" if is_up else " while it started")
            is_healthy, now_s = self._is_healthy(), time.monotonic()
            if is_healthy:
                last_healthy_s = now_s
                if not is_up:
                    self._report(f"{name} serves, {now_s - began_s:.1f} s after its start")
                    is_up = True
            elif not is_up and now_s - began_s > limits.start_timeout_s:
                return f"{name} did not serve within {limits.start_timeout_s:g} s of its start"
            elif is_up and now_s - last_healthy_s > limits.unhealthy_timeout_s:
                return f"{name} answered no health check for {limits.unhealthy_timeout_s:g} s"
            self._wait(limits.health_interval_s if is_up else _POLL_S)
        return f"{name} was stopped"

    def _wait(self, timeout_s: float) -> None:
        """Sleeps until the child ends, a signal comes or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while self._signal is None and time.monotonic() < deadline_s:
            assert self._child is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_POLL_S)
                return

    def _count_restart(self, end: str) -> None:
        limits, child = self._limits, self._child
        if child is not None and child.returncode == self._refusal_status:
            raise RefusedInputError(f"{end}: it refused its input, for the reason above")
        now_s = time.monotonic()
        while self._restarts and now_s - self._restarts[0] > limits.restart_window_s:
            self._restarts.popleft()
        if len(self._restarts) == limits.max_restarts:
            raise SupervisionError(
                f"{end}, after {len(self._restarts)} restarts within {limits.restart_window_s:g} "
                "s: its own messages, above, say why"
            )
        self._restarts.append(now_s)

    def _end_child(self) -> None:
        """Forwards the signal, or sends SIGTERM; kills what has not ended by the deadline."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        if child.poll() is None:
            child.send_signal(self._signal or signal.SIGTERM)
            try:
                child.wait(self._limits.stop_timeout_s)
            except subprocess.TimeoutExpired:
                self._report(
                    f"the serving process {child.pid} did not end within "
                    f"{self._limits.stop_timeout_s:g} s of the signal: killed"
                )
                child.kill()
                child.wait()  # SIGKILL needs no deadline
        child.stdin.close()

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        def note(number: int, frame: object) -> None:
            self._signal = signal.Signals(number)

        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def describe_status(status: int) -> str:
    """In words: "was killed by SIGKILL", "ended with status 1"."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
