"""What the mains share: flags in, exit status out, and mistakes of the user as one paragraph.

A mistake (a mistyped key, a value out of range, an unusable sandbox, a corrupt checkpoint) prints
its message and exits with status 2. Anything else is a fault of the program and keeps its
traceback.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import app, flags

USER_ERROR = 2


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Parses flags and exits with what `main` returns."""
    sys.path.insert(0, os.getcwd())  # env.factory and data.builder may be the user's own modules

    def guarded(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except _user_errors() as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR

    app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing, with ml_collections' complaints about unknown keys cut to the point."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, flags.Error) as error:
        text = str(error.args[0] if error.args else error)
        near = re.search(r'Did you mean "(.+?)" instead of "(.+?)"', text)
        key = re.search(r'Key "(.+?)" does not exist', text)
        if near:
            text = f"config has no key {near[2]!r}. Did you mean {near[1]!r}?"
        elif key:
            text = f"config has no key {key[1]!r}"
        print(f"error: {textwrap.shorten(text, 400)}", file=sys.stderr)
        sys.exit(USER_ERROR)


def _user_errors() -> tuple[type[Exception], ...]:
    """The errors that a user can cause and mend. Called only when something was raised."""
    from thundersync_jax.config import ConfigError
    from thundersync_jax.envs.data import DataError
    from thundersync_jax.learner.checkpoint import CheckpointError
    from thundersync_jax.model.presets import ModelError
    from thundersync_jax.rollout.chat import TokenizerError
    from thundersync_jax.sandbox.base import SandboxError
    from thundersync_jax.serving.jetstream_compat import JetStreamMissingError
    from thundersync_jax.trajectory_log import TrajectoryLogError

    return (
        ConfigError,
        DataError,
        CheckpointError,
        ModelError,
        TokenizerError,
        SandboxError,
        JetStreamMissingError,
        TrajectoryLogError,
    )
