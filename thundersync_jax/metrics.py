"""JSON-lines files that survive a kill: the truth about a run is local and append-only.

A line is written whole and flushed; a torn last line (the process died while writing) is cut off
when the file is opened again, and skipped when it is read. Values are plain JSON; NaN and infinity
become null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from thundersync_jax.errors import UserError


def jsonable(value: Any) -> Any:
    """`value` with numpy scalars as Python numbers and non-finite floats as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    return value


class JsonlWriter:
    """Appends records to one file; the owner closes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            _cut_torn_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(jsonable(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class DamagedFileError(UserError, ValueError):
    """A line that was not written by this program."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file; [] when it does not exist. DamagedFileError names a line that
    is no JSON.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DamagedFileError(
                f"{path}, line {number} is not JSON ({error}): restore the file, or move it away"
            ) from None
    return records


def write_atomically(path: Path, text: str) -> None:
    """Writes the file whole or not at all, and durably: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_jsonl_atomically(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """A JSON-lines file that exists only when it is complete."""
    lines = [json.dumps(jsonable(record), allow_nan=False) + "\n" for record in records]
    write_atomically(path, "".join(lines))


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
