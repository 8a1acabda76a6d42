"""`events.jsonl`: every event of a run, written before it is acted on.

One JSON object a line: {"seq", "time_s", "event", ...the event's fields}. The same file is the
write-ahead log, the simulator's trace and the bug report.

Invariants:
  * `seq` counts up by one across restarts; `time_s` is the writing process's clock.
  * A line counts once its newline is written: a torn last line, left by a killed process, is
    ignored by the reader and removed by the next writer. Any other broken line raises with its
    number.
  * A machine's events follow the `RunStarted` it was made from, so a journal replays without
    anything else.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.group_tracker import StepMachine
from thundersync_jax.errors import UserError
from thundersync_jax.trajectory import TrajectoryKey

Entry = ev.RunStarted | ev.Event

_ENTRY_TYPES = {cls.__name__: cls for cls in (ev.RunStarted, *typing.get_args(ev.Event))}
_FIELD_TYPES = {name: typing.get_type_hints(cls) for name, cls in _ENTRY_TYPES.items()}


class JournalError(UserError, ValueError):
    """A line that is no event of this format: names the line, what was expected and what came."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalLine:
    seq: int
    time_s: float
    entry: Entry


def to_json(entry: Entry) -> dict[str, Any]:
    """The JSON object of an event."""
    name = type(entry).__name__
    values = {key: _plain(getattr(entry, key), hint) for key, hint in _FIELD_TYPES[name].items()}
    return {"event": name, **values}


def from_json(values: dict[str, Any]) -> Entry:
    """The event of a JSON object; raises JournalError unless names and types are exactly right."""
    name = values.get("event")
    if not isinstance(name, str) or name not in _ENTRY_TYPES:
        raise JournalError(f"event {name!r} is not one of {sorted(_ENTRY_TYPES)}")
    hints = _FIELD_TYPES[name]
    given = values.keys() - {"event"}
    if given != hints.keys():
        raise JournalError(f"{name} has the fields {sorted(hints)}, got {sorted(given)}")
    fields = {key: _typed(values[key], hint, f"{name}.{key}") for key, hint in hints.items()}
    return _ENTRY_TYPES[name](**fields)


class Journal:
    """Appends to one file. `start` repairs and opens it; `append` flushes; `sync` reaches the disk.

    Called from the coordinator's loop; only `sync` blocks for long, so it runs in another thread.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._file: IO[bytes] | None = None
        self._next_seq = 0

    def start(self) -> None:
        """Continues an existing file after its last whole line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab+")
        self._file.seek(0)
        size, last = 0, b""
        for line in self._file:
            if line.endswith(b"\n"):
                size, last = size + len(line), line
        self._file.truncate(size)
        try:
            self._next_seq = json.loads(last)["seq"] + 1 if last else 0
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                f"{self._path}: the last line is no event ({error!r}): restore the file, or move "
                "it away"
            ) from error

    @property
    def num_entries(self) -> int:
        """How many there are in the file."""
        return self._next_seq

    def append(self, entry: Entry) -> None:
        """Writes one line, which survives the process; after `sync` it survives the machine too."""
        line = {"seq": self._next_seq, "time_s": round(self._clock(), 6), **to_json(entry)}
        file = self._open_file()
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        self._next_seq += 1

    def sync(self) -> None:
        os.fsync(self._open_file().fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            raise JournalError(
                f"the journal {self._path} is not open: call start() before it is used"
            )
        return self._file


def read_journal(path: Path) -> Iterator[JournalLine]:
    """The whole lines of a journal, in order; raises JournalError for a broken one."""
    with path.open("rb") as file:
        for seq, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            try:
                yield _parse(line, seq)
            except ValueError as error:
                raise JournalError(f"{path}, line {seq + 1}: {error}") from error


def replay(lines: Iterable[JournalLine]) -> Iterator[list[ev.Command]]:
    """The commands that each event of a journal led to, in order; RunStarted leads to none."""
    machine: StepMachine | None = None
    for line in lines:
        if isinstance(line.entry, ev.RunStarted):
            machine = StepMachine(line.entry)
            yield []
        elif machine is None:
            raise JournalError(f"a journal begins with RunStarted, got {line.entry}")
        else:
            yield machine.apply(line.entry)


def _parse(line: bytes, seq: int) -> JournalLine:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise JournalError(f"expected an object, got {values!r}")
    found_seq, time_s = values.pop("seq", None), values.pop("time_s", None)
    if found_seq != seq:
        raise JournalError(f"expected seq {seq}, got {found_seq!r}")
    return JournalLine(seq=seq, time_s=_typed(time_s, float, "time_s"), entry=from_json(values))


def _plain(value: Any, hint: Any) -> Any:
    if hint is TrajectoryKey:
        return [value.step, value.group, value.index]
    if issubclass(hint, enum.Enum):
        return value.value
    return hint(value)


def _typed(value: Any, hint: Any, name: str) -> Any:
    if hint is TrajectoryKey:
        is_key = isinstance(value, list) and [type(v) for v in value] == [int] * 3
        if not is_key:
            raise JournalError(f"{name} must be [step, group, index], got {value!r}")
        return TrajectoryKey(step=value[0], group=value[1], index=value[2])
    if issubclass(hint, enum.Enum):
        return hint(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise JournalError(f"{name} must be a finite {hint.__name__}, got {value!r}")
    return value
