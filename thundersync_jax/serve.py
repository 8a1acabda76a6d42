"""python -m thundersync_jax.serve --config=configs/NAME.py --workdir=DIR [--port=N]
    [--checkpoint_step=N] [--config.KEY=VALUE ...]

Serves the policy of the run in DIR with JetStream's Driver over gRPC, on the loopback interface, in
a supervised process: killed, it restarts with the same weights. Ctrl-C or SIGTERM ends it.
Exit status: 0 when it was asked to end, 1 when the server does not stay up, 2 for bad input.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from thundersync_jax.command_line import USER_ERROR, define_config_flag, load_config, run_main
from thundersync_jax.config import RunConfig, resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.saved_policy import FRESH, newest_step
from thundersync_jax.serving.supervision import (
    LOOPBACK,
    SupervisionError,
    SupervisionLimits,
    Supervisor,
    end_with_supervisor,
    is_serving,
    reserved_port,
)
from thundersync_jax.workdir import WorkDirectory

_HEALTH_CHECK_S = 2.0
_CLOSE_S = 5.0
_POLL_S = 0.1
_FAULT = 1

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; its checkpoints are read.")
_PORT = flags.DEFINE_integer("port", 0, "Loopback port; 0 takes a free one.")
_CHECKPOINT_STEP = flags.DEFINE_integer(
    "checkpoint_step",
    None,
    "Serve the weights after so many steps, 0 for the initial ones. Default: the newest, if any.",
)
_CHILD_PORT = flags.DEFINE_integer("child_port", None, "Internal: serve in this process.")


def main(argv: Sequence[str]) -> int:
    """Runs the supervisor, or the process that it supervises; returns the exit status."""
    if len(argv) > 1 or not _CONFIG.present or _WORKDIR.value is None:
        raise app.UsageError("give --config=configs/NAME.py --workdir=DIR [--port=N]")
    config, workdir = resolve(load_config(_CONFIG)), WorkDirectory(Path(_WORKDIR.value))
    if _CHILD_PORT.value is not None:
        return serve(config, workdir, _CHILD_PORT.value, _CHECKPOINT_STEP.value or FRESH)
    workdir.check_same(config, "model", "env", "chat")  # what policy and tokens are
    step = _CHECKPOINT_STEP.value
    if step is None:
        if not workdir.root.is_dir():
            raise ConfigError(
                f"--workdir={workdir.root} is no directory: give that of a run, or "
                f"--checkpoint_step={FRESH} for the initial weights"
            )
        step = newest_step(workdir.checkpoints)
    with reserved_port(_PORT.value) as port:
        return supervise(port, step)


def supervise(port: int, step: int) -> int:
    """Keeps a child serving on `port`, every time with the same weights; returns the status."""
    address = f"{LOOPBACK}:{port}"
    name = f"the checkpoint of step {step}" if step != FRESH else "the initial weights"
    _say(f"serving {name} on {address}, once it is up")
    supervisor = Supervisor(
        [
            *(sys.executable, "-m", "thundersync_jax.serve", *sys.argv[1:]),
            *(f"--child_port={port}", f"--checkpoint_step={step}"),
        ],
        is_healthy=lambda: is_serving(address, _HEALTH_CHECK_S),
        report=_say,
        limits=SupervisionLimits(),
        refusal_status=USER_ERROR,
    )
    try:
        _say(f"ended by {supervisor.run().name}")
    except SupervisionError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return _FAULT
    return 0


def serve(config: RunConfig, workdir: WorkDirectory, port: int, step: int) -> int:
    """Serves in this process until a signal, the supervisor's end or a fault of the engine."""
    from thundersync_jax.learner.compilation import configure
    from thundersync_jax.served_policy import load_engine
    from thundersync_jax.serving.jetstream_server import PolicyServer

    threading.Thread(target=end_with_supervisor, name="supervisor", daemon=True).start()
    configure(workdir.compile_cache, is_float64=config.model.dtype == "float64")
    server = PolicyServer(load_engine(config, workdir, step), port)
    server.start()
    # Until here a signal ends the process by itself: nobody is served.
    is_asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_asked.set())
    while not is_asked.is_set() and not server.wait(timeout_s=_POLL_S):
        pass
    failure = server.failure
    if failure is not None:
        traceback.print_exception(failure)
    status = 0 if failure is None else _FAULT
    if not server.close(_CLOSE_S):
        _say(f"threads of the server still run after {_CLOSE_S:g} s: left behind")
        os._exit(status)
    return status


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    run_main(main)
