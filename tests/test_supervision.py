"""Supervision of any process: restarts, bounds, deadlines, signals; no child survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thundersync_jax.serving.supervision import (
    RefusedInputError,
    SupervisionError,
    SupervisionLimits,
    Supervisor,
)

# A child: writes its pid to a line of its own, is healthy once that is there, then does its part.
CHILD = """
import os, signal, sys, time
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
"""
WAITS = "sys.stdin.read()"
REFUSAL = 2
LIMITS = SupervisionLimits(
    max_restarts=2,
    restart_window_s=60.0,
    start_timeout_s=20.0,
    health_interval_s=0.05,
    unhealthy_timeout_s=0.3,
    stop_timeout_s=0.5,
)


class Case:
    """A supervisor of `CHILD` and what follows; `pids` of all its children."""

    def __init__(self, tmp_path: Path, then: str, limits: SupervisionLimits = LIMITS) -> None:
        self.file = tmp_path / "pids"
        self.file.touch()
        self.is_hung = False
        self.reports: list[str] = []
        self.supervisor = Supervisor(
            [sys.executable, "-c", CHILD + then, str(self.file)],
            is_healthy=self.is_healthy,
            report=self.reports.append,
            limits=limits,
            refusal_status=REFUSAL,
        )

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self.file.read_text().split()]

    def is_healthy(self) -> bool:
        return not self.is_hung and any(is_running(pid) for pid in self.pids)

    def meanwhile(self, act: Callable[[], None], num_children: int = 1) -> None:
        """Calls `act` in another thread once that many children were started and one served."""

        def wait() -> None:
            while len(self.pids) < num_children or not any("serves" in r for r in self.reports):
                time.sleep(0.01)
            act()

        threading.Thread(target=wait, daemon=True).start()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_and_ends_the_child(tmp_path: Path, number: signal.Signals) -> None:
    then = f"signal.signal({number}, lambda *_: sys.exit(0)); {WAITS}"
    case = Case(tmp_path, then)
    before = signal.getsignal(number)
    case.meanwhile(lambda: os.kill(os.getpid(), number))
    assert case.supervisor.run() is number
    assert len(case.pids) == 1 and not is_running(case.pids[0])
    assert not any("killed" in report for report in case.reports)
    assert signal.getsignal(number) is before


def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    then = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(60)"
    case = Case(tmp_path, then)
    case.meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM))
    case.supervisor.run()
    assert not is_running(case.pids[0])
    assert "did not end within 0.5 s of the signal: killed" in case.reports[-1]


def test_a_killed_child_is_restarted(tmp_path: Path) -> None:
    case = Case(tmp_path, WAITS)

    def kill_then_end() -> None:
        first = case.pids[0]
        os.kill(first, signal.SIGKILL)
        while sum("serves" in report for report in case.reports) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    case.meanwhile(kill_then_end)
    case.supervisor.run()
    assert len(case.pids) == 2 and not any(is_running(pid) for pid in case.pids)
    assert any("was killed by SIGKILL; it is restarted" in report for report in case.reports)


def test_restarts_are_bounded_within_the_window(tmp_path: Path) -> None:
    case = Case(tmp_path, "sys.exit(7)")
    match = "ended with status 7 while it started, after 2 restarts within 60 s"
    with pytest.raises(SupervisionError, match=match):
        case.supervisor.run()
    assert len(case.pids) == 3


def test_restarts_before_the_window_do_not_count(tmp_path: Path) -> None:
    then = f"time.sleep(0.3); {WAITS} if len(open(sys.argv[1]).readlines()) == 5 else sys.exit(1)"
    limits = SupervisionLimits(max_restarts=1, restart_window_s=0.0)
    case = Case(tmp_path, then, limits)
    case.meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM), num_children=5)
    case.supervisor.run()
    assert len(case.pids) == 5


def test_refused_input_is_not_tried_again(tmp_path: Path) -> None:
    case = Case(tmp_path, f"sys.exit({REFUSAL})")
    with pytest.raises(RefusedInputError, match="refused its input"):
        case.supervisor.run()
    assert len(case.pids) == 1


def test_a_child_that_never_serves_is_over_time(tmp_path: Path) -> None:
    limits = SupervisionLimits(max_restarts=0, start_timeout_s=1.0, stop_timeout_s=0.5)
    case = Case(tmp_path, WAITS, limits)
    case.is_hung = True
    with pytest.raises(SupervisionError, match="did not serve within 1 s of its start"):
        case.supervisor.run()
    assert not any(is_running(pid) for pid in case.pids)


def test_a_child_that_stops_answering_is_restarted(tmp_path: Path) -> None:
    case = Case(tmp_path, WAITS)

    def hang_then_end() -> None:
        case.is_hung = True
        while len(case.pids) < 2:
            time.sleep(0.01)
        case.is_hung = False
        os.kill(os.getpid(), signal.SIGTERM)

    case.meanwhile(hang_then_end)
    case.supervisor.run()
    assert any("answered no health check for 0.3 s; it is" in report for report in case.reports)
    assert not any(is_running(pid) for pid in case.pids)


def test_an_exception_in_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("no terminal")

    case = Case(tmp_path, WAITS)
    supervisor = Supervisor(
        [sys.executable, "-c", CHILD + WAITS, str(case.file)],
        is_healthy=case.is_healthy,
        report=broken,
        limits=LIMITS,
        refusal_status=REFUSAL,
    )
    with pytest.raises(RuntimeError, match="no terminal"):
        supervisor.run()
    assert case.pids and not is_running(case.pids[0])


def test_supervision_starts_without_jax() -> None:
    check = "import sys, thundersync_jax.serving.supervision; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_a_child_ends_with_its_supervisor() -> None:
    then = "supervision.end_with_supervisor()"
    command = [sys.executable, "-c", f"from thundersync_jax.serving import supervision; {then}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == -signal.SIGTERM
