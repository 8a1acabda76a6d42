"""`python -m thundersync_jax.sandbox [--backend=auto] [--json]`: what each backend enforces on this
host.

Exits with 0 when a backend can be used, else with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from thundersync_jax.config_sections import SandboxSection
from thundersync_jax.sandbox.base import SelfTestReport
from thundersync_jax.sandbox.selection import BACKENDS, candidates
from thundersync_jax.sandbox.self_test import self_test


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m thundersync_jax.sandbox", description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    arguments = parser.parse_args()
    reports = asyncio.run(_reports(arguments.backend))
    chosen = next((r.backend for r in reports if r.is_passed), None)
    if arguments.json:
        values = [dataclasses.asdict(r) | {"is_passed": r.is_passed} for r in reports]
        print(json.dumps({"chosen": chosen, "reports": values}, indent=2))
    else:
        _print(reports, chosen)
    return 0 if chosen else 1


async def _reports(backend: str) -> list[SelfTestReport]:
    section = SandboxSection()
    return [await self_test(BACKENDS[name], section) for name in candidates(backend)]


def _print(reports: list[SelfTestReport], chosen: str | None) -> None:
    console = Console()
    for report in reports:
        verdict = "[green]usable[/]" if report.is_passed else "[red]refused[/]"
        table = Table(
            title=f"{report.backend}: {verdict}", title_justify="left", title_style="bold"
        )
        for column in ("property", "enforced", "seen"):
            table.add_column(column)
        for check in report.checks:
            missing = "[red]NO[/]" if check.is_required else "[yellow]no (optional)[/]"
            table.add_row(
                check.name, "[green]yes[/]" if check.is_enforced else missing, check.detail
            )
        console.print(table)
        if report.error:
            console.print(f"[red]{report.error}[/]", markup=True)
    console.print(f"sandbox.backend = 'auto' takes: {chosen or 'none, and refuses to run'}")


if __name__ == "__main__":
    sys.exit(main())
