"""Runs the trainer and kills it with SIGKILL just before or after its n-th pass of a point.

    python tests/kill_at.py POINT WHEN N -- TRAINER ARGUMENTS

POINT is "commit", "update", "publish", "metrics" or "save"; WHEN is "before" or "after".
"""

import functools
import os
import signal
import sys

from thundersync_jax import train
from thundersync_jax.command_line import run_main
from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.learner.learner import Learner
from thundersync_jax.trainer import Trainer
from thundersync_jax.viewing.progress import Progress

POINTS = {
    "commit": (Trainer, "_commit"),
    "update": (Learner, "update"),
    "publish": (Trainer, "_publish_now"),
    "metrics": (Progress, "step"),  # the first thing after the metrics line
    "save": (Checkpointer, "save"),
}


def arm(point: str, when: str, count: int) -> None:
    owner, name = POINTS[point]
    original = getattr(owner, name)
    passes = 0

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        nonlocal passes
        passes += 1
        if passes == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if passes == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, wrapper)


if __name__ == "__main__":
    point, when, count, separator, *arguments = sys.argv[1:]
    assert separator == "--"
    arm(point, when, int(count))
    sys.argv = ["train", *arguments]
    run_main(train.main)
