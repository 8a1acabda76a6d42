"""python -m thundersync_jax.benchmark NAME [--json=FILE]

Runs one benchmark. The table goes to standard output; with --json=- it goes to standard error and
standard output holds the JSON alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.table import Table

from thundersync_jax.benchmarks.report import Report
from thundersync_jax.command_line import run_main
from thundersync_jax.metrics import jsonable, write_atomically

BENCHMARKS = (
    "agentic",
    "distillation",
    "endtoend",
    "exactness",
    "import",
    "learner",
    "schedule",
    "serving",
    "turns",
)

_JSON = flags.DEFINE_string("json", None, "File for the result; '-' is standard output.")


def main(argv: Sequence[str]) -> int:
    """Runs the named benchmark; returns the exit status."""
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        raise app.UsageError(f"name one benchmark of {', '.join(BENCHMARKS)}; got {argv[1:]}")
    name = {"import": "importing"}.get(argv[1], argv[1])  # a keyword names no module
    module = importlib.import_module(f"thundersync_jax.benchmarks.{name}")
    report: Report = module.run()
    text = json.dumps(jsonable(report.to_json()), indent=2)
    _print_table(report, Console(stderr=_JSON.value == "-"))
    if _JSON.value == "-":
        sys.stdout.write(text + "\n")
    elif _JSON.value is not None:
        write_atomically(Path(_JSON.value), text + "\n")
    return 0


def _print_table(report: Report, console: Console) -> None:
    table = Table("figure", "value", title=f"benchmark {report.benchmark}")
    for name, value in report.results.items():
        table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(table)


if __name__ == "__main__":
    run_main(main)
