"""Walls: imports point downward, heavy packages live in named files, files and functions stay
small.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "thundersync_jax"
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    0: {
        "errors", "factory", "host_memory", "trajectory", "config", "config_chat", "config_learner",
        "config_lora", "config_opd", "config_reference", "config_sections", "config_serving",
        "config_sampling", "metrics", "trajectory_log", "workdir", "command_line",
    },
    1: {"sharding", "hlo", "hlo_cost", "topology", "model", "losses", "transport"},
    2: {
        "learner", "serving", "coordinator", "rollout", "envs", "sandbox", "cluster", "viewing",
    },
}  # fmt: skip
LAYER = {part: layer for layer, parts in LAYERS.items() for part in parts}
MAINS = 3  # also the benchmarks: each puts parts together

# Between folders of one layer: protocols, and environments that run tools.
ALLOWED = {
    ("rollout", "envs"),
    ("envs", "sandbox"),
    ("benchmarks", "learner"),
    ("benchmarks", "serving"),
}

ONLY_IN = {
    "jetstream": {"serving/jetstream_compat.py"},
    "orbax": {"learner/checkpoint.py"},
    "tensorflow_datasets": {"envs/data.py"},
    "ray": set(),
    "torch": set(),
}
WITHOUT_JAX = (
    "coordinator",
    "envs",
    "sandbox",
    "rollout",
    "trajectory",
    "config",
    "config_serving",
    "metrics",
)


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path):
    part = part_of(path)
    layer = LAYER.get(part, MAINS)
    for name in imports_of(path):
        pieces = name.split(".")
        if pieces[0] != "thundersync_jax" or len(pieces) < 2 or pieces[1].startswith("__"):
            continue
        other = pieces[1]
        other_layer = LAYER.get(other, MAINS)
        if other == part or (part, other) in ALLOWED or layer == MAINS:
            continue
        assert other_layer < layer or (layer == other_layer < 2), f"{path} imports {name}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_heavy_packages_are_imported_in_named_files_only(package: str):
    importers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(name.split(".")[0] == package for name in imports_of(path))
    }
    assert importers <= ONLY_IN[package]


@pytest.mark.parametrize(
    "path", [p for p in FILES if part_of(p) in WITHOUT_JAX], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_host_side_never_imports_jax(path: Path):
    assert not {"jax", "flax", "optax"} & {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path):
    text = path.read_text()
    assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{path}: {node.name} has {length} lines"


def test_a_run_does_not_wait_for_what_it_does_not_use():
    """Pallas is for TPUs, tensorflow_datasets for runs with a data set: seconds of importing."""
    script = (
        "import sys, thundersync_jax.runtime, thundersync_jax.trainer\n"
        "print({'jax.experimental.pallas', 'tensorflow_datasets', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_no_test_imports_a_main():
    """Mains define flags, and two of them in one process define the same ones twice."""
    mains = {
        f"thundersync_jax.{path.stem}"
        for path in ROOT.glob("*.py")
        if "\n    run_main(" in path.read_text()
    }
    assert len(mains) >= 7
    importers = {
        path.name for path in Path(__file__).parent.glob("test_*.py") if mains & imports_of(path)
    }
    assert not importers
