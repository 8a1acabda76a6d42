"""docs/objectives.md names every objective, option, default and normalizer that there is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from thundersync_jax.losses.normalizers import Kind
from thundersync_jax.losses.objectives import BUILT_IN, Common

PAGE = (Path(__file__).parents[1] / "docs" / "objectives.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the section's table, by the name in the first one."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found}


def own_defaults(name: str) -> dict[str, object]:
    """Of the options that not all objectives take."""
    parameters = inspect.signature(BUILT_IN[name]).parameters.values()
    common = {field.name for field in dataclasses.fields(Common)}
    return {p.name: p.default for p in parameters if p.name not in {*common, "common"}}


def test_every_objective_has_its_row():
    found = rows("The built-in ones")
    assert found.keys() == BUILT_IN.keys()
    for name, (_, _, normalizer, options) in found.items():
        parameter = inspect.signature(BUILT_IN[name]).parameters.get("normalizer")
        want = Common().normalizer if parameter is None else parameter.default
        assert normalizer == f"`{want}`"
        given = re.findall(r"`(\w+)` ([\w.\-\"]+)", options)
        assert {key: ast.literal_eval(value) for key, value in given} == own_defaults(name)


def test_every_common_option_has_its_default():
    found = {
        name: ast.literal_eval(default.strip("`"))
        for name, (default, *_) in rows("Options that all take").items()
    }
    assert found == dataclasses.asdict(Common())


def test_every_normalizer_is_there():
    assert rows("Normalizers").keys() == {kind.value for kind in Kind}
