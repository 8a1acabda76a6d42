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

from absl import app, flags, logging
from ml_collections import ConfigDict

from thundersync_jax.errors import ConfigError, UserError

USER_ERROR = 2


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Parses flags and exits with what `main` returns."""
    sys.path.insert(0, os.getcwd())  # env.factory and data.builder may be the user's own modules

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # absl makes libraries chatty
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR

    app.run(guarded, flags_parser=_parse_flags)


def load_config(flag: flags.FlagHolder) -> ConfigDict:
    """The ConfigDict of a `--config` flag; raises ConfigError when its file cannot be loaded."""
    try:
        return flag.value
    except OSError as error:  # ml_collections reports a file that failed to load when it is read
        raise ConfigError(f"--config: {' '.join(str(error).split())}") from None


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
        elif key or isinstance(error, KeyError):
            name = key[1] if key else error.args[0]
            text = f"config has no key {name!r}: only keys that the config file has can be changed"
        print(f"error: {textwrap.shorten(text, 400)}", file=sys.stderr)
        sys.exit(USER_ERROR)
