"""The `export` main writes the policy of a run as other programs read it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run
from test_hugging_face import everywhere
from test_serve import save
from tokenizers import Tokenizer

from thundersync_jax.config import resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.presets import preset
from thundersync_jax.rollout.chat import word_tokenizer
from thundersync_jax.runtime import load_suite
from thundersync_jax.saved_policy import FRESH
from thundersync_jax.served_policy import load_engine
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent
CONFIG = resolve(small_run.get_config())
WORDS = word_tokenizer(load_suite(CONFIG.env).vocabulary)
MODEL = preset("tiny", vocab_size=WORDS.vocab_size)


def export(workdir: Path, to: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "thundersync_jax.export"),
        *(f"--workdir={workdir}", f"--to={to}", *arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=TESTS)


def test_the_newest_policy_and_its_tokenizer_are_written(tmp_path: Path):
    workdir = WorkDirectory(tmp_path)
    workdir.claim(CONFIG, model=MODEL, tokenizer=WORDS.fingerprint)
    wants = {step: save(workdir, step=step, version=step, model=MODEL) for step in (3, 6)}
    for step, arguments in ((6, ()), (3, ("--checkpoint_step=3",))):
        to = tmp_path / f"exported{step}"
        done = export(workdir.root, to, "--dtype=float32", *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"wrote the policy after {step} steps to {to}\n"
        with HuggingFaceDirectory(to) as directory:
            params = directory.load(directory.config, everywhere(directory.config))
        jax.tree.map(np.testing.assert_array_equal, params, wants[step])
    tokenizer = Tokenizer.from_file(str(tmp_path / "exported6" / "tokenizer.json"))
    assert tokenizer.token_to_id("<eos>") == 1
    again = export(workdir.root, tmp_path / "exported6")
    assert again.returncode == 2 and "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("has_config", "message"),
    [(False, "expected the directory of a run"), (True, "holds no checkpoint: train the run")],
)
def test_what_is_no_run_is_refused(has_config: bool, message: str, tmp_path: Path):
    workdir = WorkDirectory(tmp_path)
    if has_config:
        workdir.claim(CONFIG, model=MODEL, tokenizer=WORDS.fingerprint)
    done = export(workdir.root, tmp_path / "to")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": dataclasses.replace(MODEL, rope_theta=77.0)}, r"rope_theta: 77.0 -> 10000.0"),
        ({"tokenizer": "0"}, "holds a run with a tokenizer of fingerprint 0"),
        ({"template": "1"}, "holds a run with a chat template of fingerprint 1"),
    ],
)
def test_weights_are_not_read_as_another_policys(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    """Nor served; `export` checks as `serve` does."""
    workdir = WorkDirectory(tmp_path)
    saved: dict[str, Any] = {"model": MODEL, "tokenizer": WORDS.fingerprint, "template": ""}
    workdir.claim(CONFIG, **saved | changes)
    with pytest.raises(ConfigError, match=message):
        load_engine(CONFIG, workdir, FRESH)
    if "template" in changes:
        done = export(workdir.root, tmp_path / "to", "--checkpoint_step=0")
        assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
        assert not (tmp_path / "to").exists()
