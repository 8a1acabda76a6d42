"""A plan has every figure, in the units of its chip, and refuses what does not exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from thundersync_jax import planner, topology
from thundersync_jax.config import RunConfig, default_config, resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.mesh_search import StepShape, link_bytes
from thundersync_jax.model.presets import preset
from thundersync_jax.sharding import MeshShape
from thundersync_jax.topology import CHIPS, TopologyError

ROOT = Path(__file__).parents[1]
KEYS = {
    "chip", "num_chips", "mesh", "programs", "resident_bytes", "open_groups", "prompt_tokens",
    "num_programs", "step", "recommended_mesh", "flops_over_6nt", "flops_over_model", "fits",
}  # fmt: skip
PROGRAM_KEYS = {
    "argument_bytes", "temp_bytes", "output_bytes", "alias_bytes", "peak_bytes", "fits", "flops",
    "collectives", "compile_s", "arithmetic_s", "memory_s", "links_s",
}  # fmt: skip
PROGRAMS = {"streaming_step", "group_close", "update", "prefill", "decode"}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def small_config(**learner: Any) -> RunConfig:
    config = default_config()
    config.model.preset = "micro"
    config.model.vocab_size = 16
    config.run.groups_per_step = 3
    config.run.group_size = 4
    config.learner.buckets = (16, 64)
    config.learner.tokens_per_step = 128
    config.learner.prompt_buckets = (8,)
    config.learner.min_shared_tokens = 4
    config.learner.pool_size = -1
    config.learner.prompt_slots = -1
    config.learner.update(learner)
    config.serving.num_slots = 4
    config.serving.extend_rows = 2
    config.serving.extend_buckets = (8,)
    config.serving.parked_bytes = 0
    return resolve(config)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of one device, which is a CPU here with the peaks of a v5e."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "topology_devices", lambda name: jax.devices()[:1])
        return json.loads(json.dumps(planner.plan(small_config(), "v5e:1x1")))


def test_a_report_has_every_key(report: dict[str, Any]):
    assert set(report) >= KEYS
    assert set(report["programs"]) >= PROGRAMS
    for name, program in report["programs"].items():
        assert set(program) >= PROGRAM_KEYS, name
        assert program["collectives"]["fsdp"] == {"count": 0, "bytes": 0}
        assert program["fits"], name
    assert report["num_chips"] == 1
    assert report["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    assert report["recommended_mesh"].items() >= report["mesh"].items()
    assert report["num_programs"] == 13 + 5  # the learner's and the engine's


def test_a_steps_calls_cover_its_trajectories(report: dict[str, Any]):
    """12 trajectories of 64 tokens, two a call; 3 groups; an engine of 4 rows, 4 tokens a call."""
    learner, rollout = report["step"]["learner"], report["step"]["rollout"]
    assert learner["calls"] == {
        "streaming_step": 6,
        "prompt_forward": 3,
        "prompt_backward": 3,
        "group_close": 3,
        "update": 1,
    }
    assert rollout["calls"] == {"prefill": 2, "decode": 3 * 14}
    step = report["programs"]["streaming_step"]
    assert step["arithmetic_s"] == step["flops"] / 197e12
    assert step["memory_s"] == step["hbm_bytes"] / 819e9
    for found in (learner, rollout):
        assert found["overlapped_s"] <= found["serial_s"]
        assert found["serial_s"] == pytest.approx(
            found["arithmetic_s"] + found["memory_s"] + found["links_s"]
        )


def test_open_groups_fill_the_chip_and_no_more(report: dict[str, Any]):
    """One more pair and slot than what is open would not fit beside the largest program."""
    programs = report["programs"].values()
    extra = max(p["peak_bytes"] - p["argument_bytes"] for p in programs)
    pair = report["resident"]["pairs"] / report["open_groups"]
    assert pair == 2 * report["resident"]["batch sum"]
    assert report["resident_bytes"] + extra <= 16e9
    assert report["resident_bytes"] == sum(report["resident"].values())


def test_published_peaks_have_the_units_of_the_published_pods():
    """256 chips of v5e are 50.63 PFLOP/s (v6e: 234.9), and 51.2 TB/s of sums (v6e: 102.4)."""
    assert 256 * CHIPS["v5e"].flops_per_s == pytest.approx(50.63e15, rel=5e-3)
    assert 256 * CHIPS["v6e"].flops_per_s == pytest.approx(234.9e15, rel=5e-3)
    assert 256 * CHIPS["v5e"].link_bytes_per_s / 2 == pytest.approx(51.2e12)
    assert 256 * CHIPS["v6e"].link_bytes_per_s / 2 == pytest.approx(102.4e12)
    for chip in CHIPS.values():
        assert 10e-3 < chip.hbm_bytes / chip.hbm_bytes_per_s < 50e-3  # reads its memory in
        assert 100 < chip.flops_per_s / chip.hbm_bytes_per_s < 1000
        assert chip.ring_bytes_per_s * chip.num_links == chip.link_bytes_per_s


def test_exchanges_of_a_mesh_are_those_of_its_axes():
    model = preset("qwen3_8b")
    shape = StepShape(
        model=model, num_trajectories=64, tokens=8192, prompt_tokens=0, num_open_groups=8
    )
    assert link_bytes(shape, MeshShape(data=8)) == 0
    # 3 gathers of 2 bytes and a scatter of the gradients; keys and values are 0.15 MB a token.
    gathered = link_bytes(shape, MeshShape(fsdp=2)) * 2
    assert gathered == pytest.approx(8.0e9 * 8 + 3 * 8192 * 147456, rel=0.05)
    summed = link_bytes(shape, MeshShape(tensor=2)) * 2
    assert summed == 12 * 2 * 36 * 4096 * 8192
    adapters = dataclasses.replace(shape, model=with_rank(model))
    assert link_bytes(adapters, MeshShape(fsdp=2)) < link_bytes(shape, MeshShape(fsdp=2))


def with_rank(model: Any) -> Any:
    from thundersync_jax.config_lora import LoraSection
    from thundersync_jax.model.lora import with_adapters

    return with_adapters(model, LoraSection(rank=8))


def test_a_chip_without_peaks_is_named_with_those_that_have_some():
    with pytest.raises(TopologyError, match=r"'v9z:2x4'.*v5e, v5p, v6e"):
        topology.chip_of("v9z:2x4")


@pytest.mark.parametrize("name", ["qwen3_0p6b", "qwen3_8b", "qwen3_32b"])
def test_the_configurations_resolve(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert resolve(module.get_config()).model.preset == name


def run_plan(config: str, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "thundersync_jax.plan", f"--config=configs/{config}.py"),
            *(f"--topology={name}", "--json=-", *arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
    )


@needs_libtpu
@pytest.mark.parametrize("mesh", [(1, 1, 5), (1, 1, 1), (4, 4, 1)])
def test_a_mesh_of_other_chips_than_the_topologys_is_refused_with_both(mesh: tuple[int, ...]):
    config = default_config()
    config.learner.mesh = mesh
    message = r"learner.mesh = .*: expected a mesh of all 8 chips of --topology=v5e:2x4, not of \d+"
    with pytest.raises(ConfigError, match=message + r"\. One .*\(8, 1, 1\)"):
        planner._learner_mesh(resolve(config), preset("micro", vocab_size=9), "v5e:2x4", [None] * 8)


def test_a_topology_that_does_not_exist_is_a_mistake_of_the_user():
    done = run_plan("qwen3_0p6b", "v5e:3x5")
    assert done.returncode == 2
    assert "error: topology 'v5e:3x5' is unknown" in done.stderr
    assert "Traceback" not in done.stderr


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_small_model_fits_a_host():
    done = run_plan("qwen3_0p6b", "v5e:2x4")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["num_chips"] == 8
    # 8 / 6 for what is repeated in blocks and head, 11 / 6 for the attention kernels' products.
    assert 8 / 6 < found["flops_over_model"] < 11 / 6
    assert found["flops_over_model"] < found["flops_over_6nt"] < 3  # without attention's
    assert found["programs"]["streaming_step"]["collectives"]["data"] == {"count": 0, "bytes": 0}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize(("rank", "num_groups"), [(0, 32), (32, 512)])
def test_an_8b_model_fits_a_pod_with_many_open_groups(rank: int, num_groups: int):
    done = run_plan("qwen3_8b", "v5e:16x16", f"--config.model.lora.rank={rank}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["num_chips"] == 256
    assert found["fits"] and found["open_groups"] >= num_groups
    assert (found["prompt_tokens"], found["trajectory_tokens"]) == (2048, 8192)
    if not rank:  # the model that ranks meshes, of two trajectories on the one that was compiled
        shape = StepShape(
            model=preset("qwen3_8b"),
            num_trajectories=1,
            tokens=8192,
            prompt_tokens=2048,
            num_open_groups=1,
        )
        modelled = 2 * link_bytes(shape, MeshShape(**found["mesh"]))
        compiled = found["programs"]["streaming_step"]["link_bytes"]
        assert compiled == pytest.approx(modelled, rel=0.1)
        assert 8 / 6 < found["flops_over_model"] < 11 / 6
