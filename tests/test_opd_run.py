"""Distillation as a whole: a teacher's work directory, a student's run and replay."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import learner_cases as lc
import numpy as np
import pytest
import small_run

from thundersync_jax.config import resolve
from thundersync_jax.errors import ConfigError, UserError
from thundersync_jax.imitation import imitate
from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TEACHER = (
    "--config.model.preset=micro",
    "--config.learner.reduction=exact",  # of a run that it could go on as
)


def command_of(main: str, workdir: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", f"thundersync_jax.{main}", f"--config={TESTS / 'small_run.py'}",
        f"--workdir={workdir}", *arguments,
    ]  # fmt: skip


def start(main: str, workdir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = command_of(main, workdir, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=TESTS)


def run(main: str, workdir: Path, *arguments: str) -> None:
    done = start(main, workdir, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some supervised steps of binary search."""
    workdir = tmp_path_factory.mktemp("teacher") / "run"
    run("imitate", workdir, *TEACHER, "--config.run.num_steps=20")
    return workdir


@pytest.fixture(scope="module")
def student(teacher: Path) -> Path:
    """Three steps, no checkpoint but the last."""
    workdir = teacher.parent / "student"
    run("train", workdir, *student_of(teacher))
    return workdir


def student_of(teacher: Path) -> list[str]:
    return [
        f"--config.opd.teacher={teacher}", "--config.model.preset=micro",
        "--config.run.num_steps=3", "--config.checkpoint.every_steps=100",
    ]  # fmt: skip


def test_a_student_is_taught_by_turns_and_says_so(student: Path):
    lines = read_jsonl(student / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["num_failed"] == 0 and line["compiles"] == 0
        assert line["teacher_kl_mean"] > 0 and line["grad_norm"] > 0
        assert sum(line["paths"].values()) == line["num_trajectories"] == 8
        assert line["logprob_gap_max"] < 1e-3  # sampler and learner have the same weights
    assert sum(line["paths"]["turns"] for line in lines) > 0
    journal = (student / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in journal]
    assert events.count("TurnScored") >= 24


def test_a_run_without_its_checkpoint_replays_to_the_same_weights(
    student: Path, teacher: Path, tmp_path: Path
):
    """Gradients from the committed scores: no rollout, no teacher asked."""
    again = Path(shutil.copytree(student, tmp_path / "run"))
    shutil.rmtree(again / "checkpoints")
    run("train", again, *student_of(teacher))
    assert len(read_jsonl(again / "metrics.jsonl")) == 3
    model = preset("micro", vocab_size=9)
    like = init_params(model, 0)
    weights = []
    for workdir in (student, again):
        checkpoints = Checkpointer(workdir / "checkpoints", keep_last=1)
        weights.append(checkpoints.restore_policy(like, 3)[0])
        checkpoints.close()
    moved = np.abs(np.asarray(weights[0]["embedding"]) - np.asarray(like["embedding"]))
    assert moved.max() > 1e-4
    assert lc.rel_l2(weights[1], weights[0]) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.env.options.num_values=512", "--config.env.options.max_turns=50"],
            "error: a demonstration cannot be learned: group 0",
        ),
        (["--config.data.train_split=nowhere"], "has no split 'nowhere'"),
    ],
)
def test_what_imitation_cannot_learn_from_is_refused(
    arguments: list[str], message: str, tmp_path: Path
):
    done = start("imitate", tmp_path / "run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def imitated(workdir: Path, **keys: object) -> None:
    """`imitate` in this process, with keys of sections."""
    config = small_run.get_config()
    config.run.num_steps = 20
    config.model.preset = "micro"
    for key, value in keys.items():
        section, name = key.split("__")
        config[section][name] = value
    imitate(resolve(config), WorkDirectory(workdir))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"opd__teacher": "nowhere"}, "opd.teacher = .*nowhere': expected .* make one first"),
        ({"opd__ratio_cap": 2.0}, "expected the default of opd.ratio_cap, which is read with"),
        ({"learner__objective": "dapoo"}, "'dapoo' is not built in"),
        ({"learner__objective": "dapo", "learner__stream_turns": "idle"}, "streams = 'group' need"),
        ({"reference__policy": "nowhere"}, "'grpo' has no term that reads it"),
    ],
)
def test_imitation_refuses_what_training_would(keys: dict, message: str, tmp_path: Path):
    """Before anything is compiled; the run that goes on has the same configuration."""
    with pytest.raises(UserError, match=message):
        imitated(tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_a_finished_imitation_is_left_as_it_is_and_goes_no_further(
    teacher: Path, capsys: pytest.CaptureFixture[str]
):
    imitated(teacher)
    assert "holds a checkpoint of step 20 already: nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"num_steps = 40: expected at most 20, .* new --workdir"):
        imitated(teacher, run__num_steps=40)


def test_an_interrupted_imitation_says_what_is_left(teacher: Path, tmp_path: Path):
    (tmp_path / "compile_cache").symlink_to(teacher / "compile_cache")
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command_of("imitate", tmp_path, *TEACHER, "--config.run.num_steps=1000000"),
        cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, inherited)
    assert process.stdout is not None and process.stdout.readline().startswith("step 50: ")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        error
        == "interrupted: nothing is saved before the last step; the same command begins again\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_opd_quickstart_closes_nine_tenths_of_the_gap(seed: int, tmp_path: Path):
    """The teacher's solved share is that of its first step of sampling, before any update of it."""

    def main(name: str, role: str, workdir: Path, *arguments: str) -> None:
        command = [
            sys.executable, "-m", f"thundersync_jax.{name}",
            f"--config=configs/opd_quickstart.py{role}", f"--workdir={workdir}",
            f"--config.run.seed={seed}", *arguments,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True)

    teacher, sampled = tmp_path / "teacher", tmp_path / "sampled"
    main("imitate", ":teacher", teacher)
    shutil.copytree(teacher, sampled)
    num_steps = json.loads((teacher / "config.json").read_text())["config"]["run"]["num_steps"]
    main("train", ":teacher", sampled, f"--config.run.num_steps={num_steps + 1}")
    (line,) = read_jsonl(sampled / "metrics.jsonl")
    main("train", "", tmp_path / "student", f"--config.opd.teacher={teacher}")
    lines = read_jsonl(tmp_path / "student" / "metrics.jsonl")
    start = float(np.mean([one["solved"] for one in lines[:2]]))
    end = float(np.mean([one["solved"] for one in lines[-10:]]))
    print(f"seed {seed}: teacher {line['solved']:.3f}, student {start:.3f} -> {end:.3f}")
    assert line["solved"] >= start + 0.2
    assert end >= start + 0.9 * (line["solved"] - start)
    assert sum(one["step_s"] for one in lines) < 300
