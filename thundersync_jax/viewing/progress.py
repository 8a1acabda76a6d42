"""Progress as a run goes: a live table with a terminal, one plain line a step without.

step 119 of 300  reward 0.712  solved 0.844  failed 0  s/step 0.61  overlap 0.78 ...
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

NUM_ROWS = 12

_COLUMNS = (
    "step",
    "reward",
    "solved",
    "failed",
    "s/step",
    "overlap",
    "tail",
    "grad norm",
    "gap max",
)


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of one metrics line."""

    def number(key: str, form: str, scale: float = 1.0) -> str:
        value = line.get(key)
        return "-" if value is None or value != value else format(value * scale, form)

    return (
        str(line["step"]),
        number("reward_mean", ".3f"),
        number("solved", ".3f"),
        number("num_failed", "d", 1),
        number("step_s", ".2f"),
        number("overlap", ".2f"),
        number("tail_s", ".0f", 1e3) + " ms",
        number("grad_norm", ".3f"),
        number("logprob_gap_max", ".1e"),
    )


class Progress:
    """Shows steps and messages. A context manager: the live table ends with it, also on errors.

    Args:
      style: "rich", "plain", "none", or "auto": rich on a terminal, plain otherwise.
      num_steps: where the run ends.
    """

    def __init__(self, style: str, *, num_steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        is_live = style == "rich" or (style == "auto" and self._console.is_terminal)
        self._is_silent = style == "none"
        self._num_steps = num_steps
        self._done = 0
        self._seconds: collections.deque[float] = collections.deque(maxlen=50)
        self._rows: collections.deque[tuple[str, ...]] = collections.deque(maxlen=NUM_ROWS)
        self._status = "starting"
        self._live = Live(console=self._console, refresh_per_second=4) if is_live else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        """One line that stays."""
        if not self._is_silent:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """What happens at the moment; shown by the live table only."""
        self._status = text
        self._refresh()

    def resume(self, num_done: int) -> None:
        """Steps that were done before."""
        self._done = num_done
        self._refresh()

    def step(self, line: Mapping[str, Any]) -> None:
        """One finished step."""
        self._done = int(line["step"]) + 1
        self._seconds.append(float(line["step_s"]))
        row = cells(line)
        self._rows.append(row)
        if self._live is None and not self._is_silent:
            words = "  ".join(
                f"{name} {cell}" for name, cell in zip(_COLUMNS[1:], row[1:], strict=True)
            )
            self.message(f"step {row[0]} of {self._num_steps}  {words}")
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        state = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._num_steps, completed=self._done, width=40)
        state.add_row(
            bar, Text(f"step {self._done}/{self._num_steps}"), Text(f"{self._eta()}{self._status}")
        )
        return Group(table, state)

    def _eta(self) -> str:
        if not self._seconds:
            return ""
        left_s = (self._num_steps - self._done) * sum(self._seconds) / len(self._seconds)
        return f"{int(left_s // 60)}:{int(left_s % 60):02d} left  "
