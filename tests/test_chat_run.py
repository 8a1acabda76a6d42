"""Whole runs through a model's own chat template, from a directory with its tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_tokenizer

from thundersync_jax.metrics import read_jsonl
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files

TESTS = Path(__file__).parent


def command(main: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"thundersync_jax.{main}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=250, cwd=TESTS)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled ones, shared by the runs."""
    return tmp_path_factory.mktemp("programs")


def train(workdir: Path, programs: Path, *arguments: str) -> list[dict[str, Any]]:
    workdir.mkdir()
    (workdir / "compile_cache").symlink_to(programs)
    config = f"--config={TESTS / 'chat_run.py'}"
    done = command("train", config, f"--workdir={workdir}", *arguments)
    assert done.returncode == 0, done.stderr
    return read_jsonl(workdir / "metrics.jsonl")


def lines_of(workdir: Path, step: int) -> list[dict[str, Any]]:
    return read_jsonl(workdir / "trajectories" / f"step_{step:06d}.jsonl")


def test_segments_are_trained_as_they_were_sampled_and_the_policy_is_exported(
    programs: Path, tmp_path: Path
):
    """Qwen3's template without thinking drops its empty block from every earlier turn: a segment a
    turn. The learner's log-probabilities of all of them are the sampler's.
    """
    directory, workdir = write_tokenizer(tmp_path / "qwen3", "qwen3"), tmp_path / "run"
    arguments = (
        f"--config.chat.tokenizer={directory}",
        "--config.chat.template_options.enable_thinking=False",
    )
    for line in train(workdir, programs, *arguments):
        trajectories = lines_of(workdir, line["step"])
        num_later_turns = [len(trajectory["turns"]) - 1 for trajectory in trajectories]
        assert [len(t["segment_starts"]) for t in trajectories] == num_later_turns
        assert line["num_failed"] == 0 and line["num_rewrites"] == sum(num_later_turns) > 0
        assert line["logprob_gap_max"] <= 1e-5
        assert line["grad_norm"] > 0 and line["compiles"] == 0
        assert line["serving"]["tokens_sampled"] == line["action_tokens"]
    done = command("export", f"--workdir={workdir}", f"--to={tmp_path / 'exported'}")
    assert done.returncode == 0, done.stderr
    exported = read_tokenizer_files(tmp_path / "exported")
    original = read_tokenizer_files(directory)
    assert exported.tokenizer.fingerprint == original.tokenizer.fingerprint
    assert exported.template == original.template
    sizes = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert sizes["vocab_size"] == original.tokenizer.vocab_size


def test_history_that_is_kept_is_one_segment(programs: Path, tmp_path: Path):
    directory, workdir = write_tokenizer(tmp_path / "llama3", "llama3"), tmp_path / "run"
    for line in train(workdir, programs, f"--config.chat.tokenizer={directory}"):
        assert line["num_failed"] == line["num_rewrites"] == line["malformed_calls"] == 0
        assert line["logprob_gap_max"] <= 1e-5
    claimed = json.loads((workdir / "config.json").read_text())
    assert claimed["template"] == read_tokenizer_files(directory).template_fingerprint
    for trajectory in lines_of(workdir, 1):
        turns = trajectory["turns"]
        assert len(turns) == 3
        assert sum(trajectory["action_mask"]) == sum(turn["num_action_tokens"] for turn in turns)


def refusal(directory: Path, *arguments: str) -> str:
    config = f"--config={TESTS / 'chat_run.py'}"
    workdir = f"--workdir={directory.parent / 'run'}"
    done = command("train", config, workdir, f"--config.chat.tokenizer={directory}", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused(tmp_path: Path):
    said = refusal(write_tokenizer(tmp_path / "qwen3", "qwen3"), "--config.model.vocab_size=64")
    assert "config.model.vocab_size = 64: expected at least" in said
    assert "take the tokenizer that belongs to the model" in said


def test_a_template_that_cannot_render_a_task_is_refused_before_anything_starts(tmp_path: Path):
    template = "{{ messages[1].content + '<|im_end|>' }}"
    said = refusal(write_tokenizer(tmp_path / "qwen3", "qwen3", template=template))
    assert "the prompt of task 'train 0':" in said and "chat_template.jinja, line 1:" in said
