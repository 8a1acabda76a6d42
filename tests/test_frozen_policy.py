"""Which frozen policy scores a run's turns: what cannot score, and what nothing would read, is
refused before anything compiles.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run
from ml_collections import ConfigDict

from thundersync_jax import frozen_policy, runtime
from thundersync_jax.config import resolve
from thundersync_jax.errors import ConfigError
from thundersync_jax.frozen_policy import (
    FrozenPolicy,
    check_weights,
    find_frozen_policy,
    load_weights,
)
from thundersync_jax.initial_policy import make_model
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.model.presets import preset
from thundersync_jax.model.trainable import fingerprint
from thundersync_jax.model.transformer import init_params
from thundersync_jax.rollout import renderer
from thundersync_jax.rollout.chat import word_tokenizer
from thundersync_jax.runtime import build
from thundersync_jax.saved_policy import Start
from thundersync_jax.serving.memory import device_bytes
from thundersync_jax.trajectory_log import step_path
from thundersync_jax.workdir import WorkDirectory

pytestmark = pytest.mark.optimized

WORDS = ("<bos>", "<eos>", "a")
MODEL = preset("tiny", vocab_size=9)
KL = {"kl_coefficient": 0.1}


def configured(**keys: object) -> ConfigDict:
    config = small_run.get_config()
    for key, value in keys.items():
        if key == "options":
            config.learner.objective_options = ConfigDict(value)
        else:
            section, _, name = key.partition("_")
            config[section][name] = value
    return config


def find(config: ConfigDict, workdir: Path, words: tuple[str, ...] = WORDS) -> FrozenPolicy | None:
    frozen = resolve(config)
    return find_frozen_policy(
        frozen,
        objective=make_objective(frozen.learner.objective, frozen.learner.objective_options),
        model=MODEL,
        tokenizer=word_tokenizer(words),
        workdir=WorkDirectory(workdir),
    )


@pytest.fixture
def other(tmp_path: Path) -> Path:
    config = configured()
    config.model.preset = "micro"
    return work_directory_of(config, tmp_path / "other")


def work_directory_of(config: ConfigDict, root: Path) -> Path:
    """The work directory of another run, as far as a search for a policy looks."""
    workdir = WorkDirectory(root)
    workdir.root.mkdir()
    tokenizer, claimed = word_tokenizer(WORDS), resolve(config)
    model = make_model(claimed.model, tokenizer)
    workdir.claim(claimed, model=model, tokenizer=tokenizer.fingerprint)
    (workdir.checkpoints / "3").mkdir(parents=True)
    return workdir.root


def test_a_run_needs_none_by_default(tmp_path: Path):
    assert find(configured(), tmp_path) is None


def test_the_initial_policy_is_that_of_the_seed(tmp_path: Path):
    found = find(configured(reference_policy="initial", run_seed=3, options=KL), tmp_path)
    assert found == FrozenPolicy(
        key="reference.policy", model=MODEL, source=None, start=Start(seed=3)
    )
    for got, want in zip(
        *map(jax.tree.leaves, (load_weights(found), init_params(MODEL, 3))), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("key", ["opd_teacher", "reference_policy"])
def test_a_work_directory_is_a_policy_of_its_own_shapes(key: str, other: Path, tmp_path: Path):
    options = KL if key == "reference_policy" else {}
    found = find(configured(**{key: str(other)}, options=options), tmp_path / "run")
    vocab_size = word_tokenizer(WORDS).vocab_size
    assert found is not None and found.model == preset("micro", vocab_size=vocab_size)
    unreadable = rf"config.{key.replace('_', '.')} names a run whose newest checkpoint cannot be"
    only = "There is no other: restore it from a copy, or use an empty work directory"
    with pytest.raises(ConfigError, match=rf"{unreadable}.*{only}"):  # an empty directory
        load_weights(found)
    (other / "checkpoints" / "2").mkdir()
    with pytest.raises(ConfigError, match=r"Other checkpoints: \[2\]\. Move that directory away"):
        load_weights(found)


def test_a_resumed_run_learns_from_the_policy_that_it_learned_from(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, workdir = configured(opd_teacher=str(other)), WorkDirectory(tmp_path / "run")
    params = {"a": np.arange(3.0, dtype=np.float32)}
    monkeypatch.setattr(frozen_policy, "load_weights", lambda policy: params)
    found = check_weights(find(config, workdir.root), workdir)
    assert found.step == 3 and found.identity == f"{fingerprint(params)} of step 3"
    workdir.root.mkdir()
    workdir.claim(resolve(config), model=MODEL, tokenizer="0", frozen_policy=found.identity)
    assert check_weights(find(config, workdir.root), workdir).identity == found.identity
    params["a"][1] = 7.0
    with pytest.raises(ConfigError, match=rf"fingerprint {found.identity}, and config\.opd\.teach"):
        check_weights(find(config, workdir.root), workdir)


def test_which_checkpoint_teaches_is_decided_once(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The teacher's run may go on while this one compiles."""
    found = find(configured(opd_teacher=str(other)), tmp_path / "run")
    (other / "checkpoints" / "9").mkdir()
    monkeypatch.setattr(frozen_policy, "read_policy", lambda *arguments: arguments[::-1])
    assert load_weights(found) == found.step == 3


def test_the_policy_of_a_seed_has_no_identity_but_the_configurations(tmp_path: Path):
    found = find(configured(reference_policy="initial", options=KL), tmp_path)
    assert check_weights(found, WorkDirectory(tmp_path)) is found and found.identity is None


def test_a_policy_in_float64_needs_a_run_in_float64(tmp_path: Path):
    config = configured()
    config.model.dtype = "float64"
    other = work_directory_of(config, tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"model\.dtype = 'float32': expected 'float64', in which"
    ):
        find(configured(opd_teacher=str(other)), tmp_path / "run")


@pytest.mark.parametrize("key", ["opd.teacher", "reference.policy"])
def test_a_policy_that_cannot_score_is_refused(key: str, other: Path, tmp_path: Path):
    workdir = tmp_path / "run"

    def found(path: Path, words: tuple[str, ...] = WORDS) -> FrozenPolicy | None:
        options = KL if key == "reference.policy" else {}
        named = {key.replace(".", "_"): str(path)}
        return find(configured(**named, options=options), workdir, words)

    with pytest.raises(
        ConfigError, match=rf"{key} = .*nowhere'.*expected the work directory .*Name one, or"
    ):
        found(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"{key} = .* is this run's own directory"):
        found(workdir)
    with pytest.raises(ConfigError, match=rf"{key} = .*fingerprint .* ids mean different tokens"):
        found(other, (*WORDS, "c"))
    saved = json.loads((other / "config.json").read_text())
    changed = saved | {"model": saved["model"] | {"rope_theta": 77.0}}
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=rf"{key} = .*numbers .*rope_theta: 77.0 -> 10000.0\. "):
        found(other)
    (other / "config.json").write_text(json.dumps(saved))
    (other / "checkpoints" / "3").rmdir()
    with pytest.raises(ConfigError, match=rf"{key} = .* has no checkpoints: train it first"):
        found(other)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"options": KL}, r"reference.policy = '': .*'grpo' has a term .* \(kl_k3\)"),
        ({"reference_policy": "initial"}, r"= 'initial': expected '', .*'grpo' has no term that"),
        (
            {"reference_policy": "initial", "options": {"entropy_coefficient": 0.1}},
            r"= 'initial': expected ''",
        ),
        ({"opd_teacher": "t", "options": KL}, r"opd.teacher = 't' .*reads no objective"),
        ({"opd_teacher": "t", "reference_policy": "t"}, r"default of reference\.policy\. To learn"),
        (
            {"opd_teacher": "t", "options": {"entropy_coefficient": 0.1}},
            r"reads no objective: expected the default of learner\.objective_options\. To learn",
        ),
        (
            {"reference_policy": "initial", "options": KL, "opd_ratio_cap": 2.0},
            r"opd\.teacher = '': expected the default of opd\.ratio_cap, which is read with a",
        ),
        (
            {"opd_stream_turns": "always", "opd_num_caches": 3},
            r"opd\.teacher = '': expected the default of opd\.stream_turns, opd\.num_caches, which",
        ),
    ],
)
def test_a_policy_and_what_reads_it_come_together(keys: dict, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        find(configured(**keys), tmp_path)


def test_the_memory_plan_has_room_for_the_second_model(monkeypatch: pytest.MonkeyPatch):
    reserved: list[int] = []

    def note(*_: object, reserved_bytes: int, **__: object) -> None:
        reserved.append(reserved_bytes)

    monkeypatch.setattr(runtime, "Learner", note)
    config = resolve(configured(reference_policy="initial", options=KL))
    mesh = runtime.make_learner_mesh(config, MODEL)
    for scored_by in (None, MODEL):
        runtime._make_programs(config, MODEL, scored_by, mesh, init_params(MODEL, 0))
    parts = device_bytes(MODEL, config.serving, config.model.max_context)
    assert reserved[1] - reserved[0] == parts["weights"] + parts["slots"] > 0


def test_a_run_is_refused_before_anything_of_it_is_made(tmp_path: Path):
    workdir = WorkDirectory(tmp_path / "run")
    config = resolve(configured(options=KL))
    with pytest.raises(ConfigError, match=r"reference.policy = ''"):
        asyncio.run(build(config, workdir, print))
    assert not workdir.root.exists()


def test_a_policy_that_cannot_be_read_is_refused_before_anything_compiles(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As when the copy of a work directory has not ended."""
    monkeypatch.setattr(renderer, "word_tokenizer", lambda _: word_tokenizer(WORDS))
    workdir = WorkDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"opd\.teacher names a run whose newest .* cannot be"):
        asyncio.run(build(resolve(configured(opd_teacher=str(other))), workdir, print))
    assert not workdir.root.exists()


def test_the_initial_policy_of_a_run_that_starts_from_a_checkpoint_is_not_the_seeds(
    tmp_path: Path,
):
    """Imitation's, for instance: the reference would be a policy that the run never was."""
    workdir, config = WorkDirectory(tmp_path), configured(reference_policy="initial", options=KL)
    (workdir.checkpoints / "20").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"starts from a checkpoint .* Name a copy of the dir"):
        find(config, tmp_path)
    first = step_path(workdir.trajectories, 0)
    first.parent.mkdir()
    first.touch()
    assert find(config, tmp_path) is not None
