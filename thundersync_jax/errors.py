"""What a user can cause and mend."""

from __future__ import annotations

from typing import Any


class UserError(Exception):
    """Base of errors whose message is the whole story: the value, what was expected, what to do.

    The mains print it as one paragraph. Any other exception is a fault of the program and keeps its
    traceback.
    """


class ConfigError(UserError, ValueError):
    """A configuration that cannot run: the key, its value, what was expected, what to do."""


def check(condition: bool, key: str, value: Any, expected: str, remedy: str = "") -> None:
    """Raises ConfigError in the common wording unless `condition` holds."""
    if not condition:
        raise ConfigError(
            f"config.{key} = {value!r}: expected {expected}." + (f" {remedy}" if remedy else "")
        )


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError unless `value` is one of `choices`."""
    check(value in choices, key, value, f"one of {choices}")
