"""What the mains share: flags in, exit status out, and mistakes of the user as one paragraph.

A mistake (a mistyped key, a value out of range, an unusable sandbox, a corrupt checkpoint) prints
its message and exits with status 2. Anything else is a fault of the program and keeps its
traceback.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import functools
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from thundersync_jax.config import RunConfig, to_dict
from thundersync_jax.errors import ConfigError, UserError
from thundersync_jax.host_memory import keep_freed_memory

USER_ERROR = 2
INTERRUPTED = 130  # the shell's exit status for Ctrl-C
LEFT_BEHIND_GRACE_S = 5.0

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}

T = TypeVar("T")

# The `--config` flag of a main. Keys may be added where the ConfigDict is not locked: to options of
# environments, objectives and data sets.
define_config_flag = functools.partial(
    config_flags.DEFINE_config_file,
    "config",
    None,
    "An experiment: a file of configs/.",
    lock_config=False,
    accept_new_attributes=True,
)


def run_main(main: Callable[[Sequence[str]], int], interrupted: str = "interrupted") -> None:
    """Parses flags and exits with what `main` returns.

    Args:
      interrupted: what a KeyboardInterrupt that `main` does not handle leaves behind.
    """
    keep_freed_memory()
    sys.path.insert(0, os.getcwd())  # env.factory and data.builder may be the user's own modules

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # absl makes libraries chatty
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR
        except KeyboardInterrupt:
            print(interrupted, file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)  # threads may be compiling
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            print(f"error: {error}: free space or give another --workdir", file=sys.stderr)
            return USER_ERROR

    app.run(guarded, flags_parser=_parse_flags)


def run_to_exit(main: Coroutine[Any, Any, T]) -> T:
    """Runs a program's one coroutine, as asyncio.run does, but not for ever.

    Tasks that ignore their cancellation, such as a user's environment, are named and left behind.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(loop.create_task(main))
    finally:
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            waiting = asyncio.wait(rest, timeout=LEFT_BEHIND_GRACE_S)
            for task in loop.run_until_complete(waiting)[1]:
                print(f"left behind, it ignores cancellation: {task.get_name()}", file=sys.stderr)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def load_config(flag: flags.FlagHolder) -> ConfigDict:
    """The ConfigDict of a `--config` flag; raises ConfigError when its file cannot be loaded."""
    try:
        return flag.value
    except OSError as error:  # ml_collections reports a file that failed to load when it is read
        raise ConfigError(f"--config: {' '.join(str(error).split())}") from None


def check_new_directory(flag: str, path: Path) -> None:
    """Raises ConfigError unless a directory can be written there, new or empty; leaves nothing."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"--{flag}={path} is not empty: give a directory that is, or a new one"
            )
        there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"--{flag}={path} cannot be written ({error.strerror}): give a directory on a disk "
            "where you may write"
        ) from error


def check_new_file(flag: str, path: Path) -> None:
    """Raises ConfigError unless a file can be written there."""
    parent = path.absolute().parent
    if not parent.is_dir() or path.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(
            f"--{flag}={path} cannot be written: expected a file in a directory that exists and "
            "where you may write"
        )


def _parse_flags(argv: list[str]) -> list[str]:
    """absl's parsing, with ml_collections' complaints about unknown keys cut to the point."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError, flags.Error) as error:
        print(f"error: {_explain(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)


def _explain(error: Exception) -> str:
    """One paragraph about a flag that ml_collections or absl refused."""
    text = str(error.args[0] if error.args else error)
    text = re.sub(r"invalid literal for int\(\).*", "expected an integer", text)
    text = re.sub(r"could not convert string to float.*", "expected a number", text)
    if hint := re.search(r'Did you mean "(.+?)" instead of "(.+?)"', text):
        return f"config has no key {hint[2]!r}. Did you mean {hint[1]!r}?"
    key = re.search(r'Key "(.+?)" does not exist', text) or re.fullmatch(r"\W*(\w+)\W*", text)
    if key is None:
        return textwrap.shorten(text, 400)
    near = difflib.get_close_matches(key[1], _keys(to_dict(RunConfig())), n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else "thundersync_jax/config_*.py name all keys."
    return f"config has no key {key[1]!r}. {remedy}"


def _keys(values: Mapping[str, Any]) -> set[str]:
    """All names in a nested configuration."""
    nested = [_keys(value) for value in values.values() if isinstance(value, Mapping)]
    return set(values).union(*nested)
