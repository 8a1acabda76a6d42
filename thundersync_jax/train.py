"""python -m thundersync_jax.train --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]

Trains, or resumes, the run in DIR. Ctrl-C finishes the step and saves; a second Ctrl-C abandons it.
Exit status: 0 when all steps are done, 130 when interrupted, 1 when the run stopped itself, 2 for
bad input.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags

from thundersync_jax.command_line import (
    INTERRUPTED,
    define_config_flag,
    load_config,
    run_main,
    run_to_exit,
)
from thundersync_jax.config import resolve

if TYPE_CHECKING:
    from thundersync_jax.trainer import Trainer

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run: new, or one to resume.")


def main(argv: Sequence[str]) -> int:
    """Runs the trainer; returns the exit status."""
    if len(argv) > 1 or not _CONFIG.present or _WORKDIR.value is None:
        raise app.UsageError("give --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]")
    config = resolve(load_config(_CONFIG))

    # Imported late: a mistake in the configuration is reported without waiting for jax.
    from thundersync_jax.learner.compilation import configure
    from thundersync_jax.runtime import build
    from thundersync_jax.trainer import Trainer
    from thundersync_jax.viewing.progress import Progress
    from thundersync_jax.workdir import WorkDirectory

    workdir = WorkDirectory(Path(_WORKDIR.value))
    workdir.open(config)
    configure(workdir.compile_cache, is_float64=config.model.dtype == "float64")

    async def train() -> tuple[str | None, bool]:
        with Progress(config.run.progress, num_steps=config.run.num_steps) as progress:
            runtime = await build(config, workdir, progress.message)
            trainer = Trainer(runtime, progress)
            return await run_interruptibly(trainer), trainer.is_interrupted

    try:
        stop_reason, is_interrupted = run_to_exit(train())
    finally:
        workdir.close()
    if stop_reason is None:
        return 0
    print(f"stopped: {stop_reason}", file=sys.stderr)
    return INTERRUPTED if is_interrupted else 1


async def run_interruptibly(trainer: Trainer) -> str | None:
    """Runs with Ctrl-C and SIGTERM as interruptions; returns why it stopped early, or None."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, trainer.interrupt)
    try:
        return await trainer.run()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


if __name__ == "__main__":
    run_main(main, "interrupted while starting")
