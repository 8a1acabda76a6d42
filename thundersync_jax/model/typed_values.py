"""Reads values of JSON objects as the types that they must have, and names those that have not.

Shared by the readers of `config.json`, of its index of files and of a GGUF file's metadata. Never
imports jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thundersync_jax.model.presets import ModelError


class TypedValues:
    """The entries of one object. A method without a default demands its entry; the default None
    lets it be null too.

    Attributes:
      where: names the object in errors, with its file.

    Raises:
      ModelError: it is no object, or an entry is missing or of another type.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} is {_shown(values)}: expected a JSON object, {{...}}")
        self._values: Mapping[str, Any] = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Any:
        return iter(self._values)

    def get(self, key: str) -> Any:
        """As it is; None where there is none."""
        return self._values.get(key)

    def integer(self, key: str, *default: int | None, least: int = 1) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        return self._typed(key, default, fits, f"an integer from {least} on")

    def number(self, key: str, *default: float) -> float:
        """A positive one."""

        def fits(value: Any) -> bool:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return is_number and math.isfinite(value) and value > 0

        return float(self._typed(key, default, fits, "a positive number"))

    def boolean(self, key: str, *default: bool) -> bool:
        return self._typed(key, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str, *default: str | None) -> Any:
        return self._typed(key, default, lambda value: isinstance(value, str), "a string")

    def texts(self, key: str, *default: None) -> Any:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)

        return self._typed(key, default, fits, "a list of strings")

    def inner(self, key: str) -> TypedValues:
        """An object in this one; an empty one where there is none."""
        value = self._values.get(key)
        return TypedValues({} if value is None else value, f"{self.where}: {key}")

    def error(self, key: str, expected: str) -> ModelError:
        """Of an entry with the wrong value."""
        found = _shown(self._values.get(key))
        return ModelError(f"{self.where}: {key} = {found}: expected {expected}")

    def _typed(self, key: str, default: tuple[Any, ...], fits: Any, expected: str) -> Any:
        value = self._values.get(key)
        if key not in self._values or (value is None and None in default):
            if default:
                return default[0]
            raise ModelError(f"{self.where} has no {key!r}: expected {expected}")
        if not fits(value):
            raise self.error(key, expected)
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
