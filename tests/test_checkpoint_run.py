"""A run from a Hugging Face directory: it begins with those weights, and everything that knows runs
knows it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run
from chat_models import write_tokenizer
from ml_collections import ConfigDict
from model_reference import random_params
from test_hugging_face import everywhere

from thundersync_jax.config import resolve
from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_sections import ModelSection
from thundersync_jax.envs.file_probe import file_probe
from thundersync_jax.errors import ConfigError
from thundersync_jax.frozen_policy import (
    FrozenPolicy,
    check_weights,
    find_frozen_policy,
    load_weights,
)
from thundersync_jax.initial_policy import initial_params, make_model
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.export_hf import export_hugging_face
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.presets import preset
from thundersync_jax.model.sharded import init_on_mesh
from thundersync_jax.model.trainable import partition
from thundersync_jax.rollout.chat import TokenizerError, word_tokenizer
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files, write_words
from thundersync_jax.runtime import load_renderer
from thundersync_jax.saved_policy import FRESH, Start, load_policy, newest_step
from thundersync_jax.sharding import MeshShape, make_mesh
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent
OPTIONS = small_run.get_config().env.options.to_dict()
WORDS = file_probe(**OPTIONS).vocabulary
TOKENIZER = word_tokenizer(WORDS)
MODEL = dataclasses.replace(preset("micro", vocab_size=TOKENIZER.vocab_size), use_qk_norm=True)
PARAMS = random_params(MODEL, 7)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint"
    export_hugging_face(MODEL, PARAMS, root, dtype="float32")
    write_words(TOKENIZER, root, 64)
    return root


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run(main: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"thundersync_jax.{main}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=TESTS)


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_chat_model_is_trained_resumed_and_exported(tmp_path: Path):
    """With the tokenizer and template of its own directory, and rows for more ids than these."""
    directory, workdir = write_tokenizer(tmp_path / "qwen3", "qwen3"), tmp_path / "run"
    tokenizer = read_tokenizer_files(directory).tokenizer
    model = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size + 3)
    export_hugging_face(model, random_params(model, 1), directory, dtype="float32")
    edit(directory / "config.json", max_position_embeddings=1024, eos_token_id=tokenizer.eos_id)
    arguments = (
        f"--config={TESTS / 'chat_run.py'}",
        f"--workdir={workdir}",
        f"--config.model.checkpoint={directory}",
        "--config.model.preset=",
    )
    workdir.mkdir()
    (workdir / "compile_cache").symlink_to(jax.config.jax_compilation_cache_dir)
    for num_steps in (1, 2):
        done = run("train", *arguments, f"--config.run.num_steps={num_steps}")
        assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step 1" in done.stdout + done.stderr
    for line in read_jsonl(workdir / "metrics.jsonl"):
        assert line["num_failed"] == 0 and line["logprob_gap_max"] <= 1e-4
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["tokenizer"] == tokenizer.fingerprint

    to = tmp_path / "exported"
    done = run("export", f"--workdir={workdir}", f"--to={to}", "--dtype=float32")
    assert done.returncode == 0, done.stderr
    entries = json.loads((to / "config.json").read_text())
    assert (
        entries["max_position_embeddings"] == 1024 and entries["eos_token_id"] == tokenizer.eos_id
    )
    assert read_tokenizer_files(to).tokenizer.fingerprint == tokenizer.fingerprint
    with HuggingFaceDirectory(to) as exported:
        params = exported.load(exported.config, everywhere(exported.config))
    config, paths = resolve(small_run.get_config()), WorkDirectory(workdir)
    assert_equal(load_policy(config, model, paths, newest_step(paths.checkpoints))[0], params)


def test_an_exported_vocabulary_of_words_is_the_words_again(checkpoint: Path):
    config = small_run.get_config()
    config.model.checkpoint = str(checkpoint)
    renderer = load_renderer(resolve(config), file_probe(**OPTIONS))
    assert renderer.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert make_model(ModelSection(checkpoint=str(checkpoint)), renderer.tokenizer) == MODEL


def test_the_first_parameters_are_the_checkpoints(checkpoint: Path, tmp_path: Path):
    """As a run trains them, and as `serve` serves them before there is a checkpoint of the run."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    assert_equal(initial_params(MODEL, Start(checkpoint=str(checkpoint)), mesh), PARAMS)
    config = small_run.get_config()
    config.model.checkpoint = str(checkpoint)
    served, version = load_policy(resolve(config), MODEL, WorkDirectory(tmp_path / "run"), FRESH)
    assert version == 0
    assert_equal(served, PARAMS)


def test_adapters_are_those_of_the_seed_on_the_checkpoints_base(checkpoint: Path):
    section = ModelSection(
        checkpoint=str(checkpoint), lora=LoraSection(rank=2, alpha=4.0, targets=("query", "up"))
    )
    model = make_model(section, TOKENIZER)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    params = initial_params(model, Start(checkpoint=str(checkpoint), seed=5), mesh)
    trainable, frozen = partition(model, params)
    assert_equal(frozen, PARAMS)
    want = partition(model, init_on_mesh(model, 5, mesh))[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), trainable, want)


def test_a_directory_that_is_no_model_ends_the_mains_with_its_name(
    checkpoint: Path, tmp_path: Path
):
    (checkpoint / "config.json").unlink()
    for main in ("train", "imitate"):
        done = run(
            main,
            f"--config={TESTS / 'small_run.py'}",
            f"--workdir={tmp_path / 'run'}",
            f"--config.model.checkpoint={checkpoint}",
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert f"{checkpoint / 'config.json'}: expected a JSON file of a Hugging Face model" in (
            done.stderr
        )


def test_a_vocabulary_of_other_words_is_refused(checkpoint: Path):
    write_words(word_tokenizer((*WORDS[:-1], "other")), checkpoint, 64)
    config = small_run.get_config()
    config.model.checkpoint = str(checkpoint)
    with pytest.raises(TokenizerError, match="9 words which are not the 9 of the environment's"):
        load_renderer(resolve(config), file_probe(**OPTIONS))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preset": "micro"}, r"contradict: preset = 'micro' \(expected ''\)"),
        ({"vocab_size": 8}, r"contradict: vocab_size = 8 \(expected 0 or 9\)"),
        ({"max_context": 65}, r"contradict: max_context = 65 \(expected at most 64\)"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(
    section: dict[str, Any], message: str, checkpoint: Path
):
    edit(checkpoint / "config.json", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=message):
        make_model(ModelSection(checkpoint=str(checkpoint), **section), TOKENIZER)
    same = ModelSection(checkpoint=str(checkpoint), vocab_size=9, max_context=64, dtype="bfloat16")
    assert make_model(same, TOKENIZER) == dataclasses.replace(MODEL, dtype="bfloat16")


@pytest.mark.parametrize("unused", [-1, 1024])
def test_vocabularies_of_different_sizes_are_refused_with_both(unused: int, checkpoint: Path):
    num_words = MODEL.vocab_size
    model = dataclasses.replace(MODEL, vocab_size=num_words + unused)
    export_hugging_face(model, random_params(model), checkpoint)
    section = ModelSection(checkpoint=str(checkpoint))
    sizes = rf"of {num_words + unused} and the tokenizer one of {num_words}: expected"
    with pytest.raises(ConfigError, match=sizes):
        make_model(section, TOKENIZER)


def test_a_hugging_face_directory_is_a_frozen_policy(checkpoint: Path, tmp_path: Path):
    """As a teacher, as a reference, and as what a run starts from."""
    config = small_run.get_config()
    config.opd.teacher = str(checkpoint)
    found = find_frozen(config, tmp_path)
    assert found.start == Start(checkpoint=str(checkpoint)) and found.model == MODEL
    assert_equal(load_weights(found), PARAMS)
    run = WorkDirectory(tmp_path / "run")
    first = check_weights(found, run).identity
    export_hugging_face(MODEL, random_params(MODEL, 8), checkpoint, dtype="float32")
    assert check_weights(found, run).identity not in (None, first)
    export_hugging_face(MODEL, PARAMS, checkpoint, dtype="float32")
    assert check_weights(found, run).identity == first
    config = small_run.get_config()
    config.learner.objective_options = {"kl_coefficient": 0.1}
    config.model.checkpoint = str(checkpoint)
    for name in (str(checkpoint), "initial"):
        config.reference.policy = name
        assert_equal(load_weights(find_frozen(config, tmp_path)), PARAMS)
    write_words(word_tokenizer((*WORDS[:-1], "other")), checkpoint, 64)
    with pytest.raises(ConfigError, match=r"reference\.policy = .*ids mean different tokens"):
        config.reference.policy = str(checkpoint)
        find_frozen(config, tmp_path)


def find_frozen(config: ConfigDict, workdir: Path) -> FrozenPolicy:
    frozen = resolve(config)
    found = find_frozen_policy(
        frozen,
        objective=make_objective(frozen.learner.objective, frozen.learner.objective_options),
        model=MODEL,
        tokenizer=TOKENIZER,
        workdir=WorkDirectory(workdir),
    )
    assert found is not None
    return found
