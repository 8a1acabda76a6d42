"""python -m thundersync_jax.imitate --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]

Trains a policy on its environment's demonstrations, `run.num_steps` supervised steps of
`run.groups_per_step` x `run.group_size` of them, and saves it in DIR as a run that can teach
(`opd.teacher`), be trained further, or be served. No rollouts, no sandboxes. The configuration is
that of the run that goes on from there: what `train` refuses is refused here. A finished DIR is
left as it is. Exit status: 0 when it is done, 130 when interrupted, 2 for bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from thundersync_jax.command_line import define_config_flag, load_config, run_main
from thundersync_jax.config import resolve
from thundersync_jax.workdir import WorkDirectory

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the new run.")


def main(argv: Sequence[str]) -> int:
    """Trains and saves; returns the exit status."""
    if len(argv) > 1 or not _CONFIG.present or _WORKDIR.value is None:
        raise app.UsageError("give --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]")
    config = resolve(load_config(_CONFIG))

    # Imported late: a mistake in the configuration is reported without waiting for jax.
    from thundersync_jax.imitation import imitate
    from thundersync_jax.learner.compilation import configure

    workdir = WorkDirectory(Path(_WORKDIR.value))
    workdir.open(config)
    try:
        configure(workdir.compile_cache, is_float64=config.model.dtype == "float64")
        imitate(config, workdir)
    finally:
        workdir.close()
    return 0


if __name__ == "__main__":
    run_main(
        main, "interrupted: nothing is saved before the last step; the same command begins again"
    )
