"""Whole runs in processes of their own: files, resume after kills, interruption, bad input."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import learner_cases as lc
import pytest
import small_run

from thundersync_jax.config import RunConfig, resolve
from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.memory import MemoryPlanError
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.replay import replay_step
from thundersync_jax.trainer import Trainer
from thundersync_jax.trajectory import Task
from thundersync_jax.trajectory_log import read_step
from thundersync_jax.viewing.progress import Progress
from thundersync_jax.workdir import WorkDirectory

TESTS = Path(__file__).parent
TIMEOUT_S = 200


def train_command(workdir: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "thundersync_jax.train",
        f"--config={TESTS / 'small_run.py'}",
        f"--workdir={workdir}",
        *arguments,
    ]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=TESTS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    result = run(
        train_command(
            workdir,
            "--config.evaluation.every_steps=3",
            "--config.evaluation.num_tasks=4",
            "--config.run.profile_steps=1:2",
        )
    )
    assert result.returncode == 0, result.stderr
    return workdir


def beside(finished: Path, tmp_path: Path) -> Path:
    """A new work directory that loads the programs of the finished run."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "compile_cache").symlink_to(finished / "compile_cache")
    return workdir


def copy_of(workdir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workdir, tmp_path / "run"))


def trained_ids(workdir: Path) -> list[tuple[int, str]]:
    """(step, task) of every trajectory in the committed files."""
    steps = sorted((workdir / "trajectories").glob("step_*.jsonl"))
    return [(line["step"], line["task_id"]) for path in steps for line in read_jsonl(path)]


def learner_of_run() -> Learner:
    config = resolve(small_run.get_config())
    model = preset("tiny", vocab_size=2 + 4 + 3)
    return Learner(config.learner, config.optimizer, model, init_params(model, 0))


def restored(workdir: Path) -> Learner:
    learner = learner_of_run()
    checkpoints = Checkpointer(workdir / "checkpoints", keep_last=2)
    state, _ = checkpoints.restore(learner.state, 6)
    learner.load(state)
    checkpoints.close()
    return learner


def test_a_run_writes_everything_that_it_promises(finished: Path):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    required = {
        "step", "policy_version", "reward_mean", "solved", "num_groups", "num_trajectories",
        "num_failed", "zero_variance_groups", "action_tokens", "grad_norm", "logprob_gap_mean",
        "logprob_gap_max", "step_s", "rollout_s", "learner_busy_s", "overlap", "tail_s", "paths",
        "num_held", "compiles", "peak_rss_mb", "decode_stall_s", "serving",
    }  # fmt: skip
    for line in lines:
        assert required <= set(line)
        assert line["num_trajectories"] == 8
        assert sum(line["paths"].values()) == 8 - line["num_failed"]
        assert line["logprob_gap_max"] is None or line["logprob_gap_max"] <= 1e-5
        assert line["compiles"] == 0
        assert 0 < line["rollout_s"] <= line["step_s"]
        assert 0 < line["serving"]["slot_utilization"] <= 1
        assert line["serving"]["tokens_sampled"] == line["action_tokens"]
    config = json.loads((finished / "config.json").read_text())
    assert config["config"]["run"]["groups_per_step"] == 2
    assert config["versions"]["jax"] == jax.__version__
    trajectories = read_jsonl(finished / "trajectories" / "step_000005.jsonl")
    assert len(trajectories) == 8
    for line in trajectories:
        n = len(line["token_ids"])
        assert len(line["action_mask"]) == len(line["behavior_logprobs"]) == n
        assert sum(t["num_action_tokens"] for t in line["turns"]) == sum(line["action_mask"])
        versions = {
            v for v, m in zip(line["policy_versions"], line["action_mask"], strict=True) if m
        }
        assert versions == {lines[4]["policy_version"]}
    evaluations = read_jsonl(finished / "evaluation.jsonl")
    assert [(e["step"], e["num_tasks"], e["num_failed"]) for e in evaluations] == [
        (3, 4, 0),
        (6, 4, 0),
    ]
    assert list((finished / "profile").rglob("*.xplane.pb"))


def test_a_users_own_environment_runs_from_outside_the_package(tmp_path: Path):
    """The example, copied into a directory of its own under another name."""
    text = (TESTS.parent / "configs" / "custom_env.py").read_text()
    (tmp_path / "my_env.py").write_text(text.replace("configs.custom_env", "my_env"))
    command = [
        *(sys.executable, "-m", "thundersync_jax.train", "--config=my_env.py", "--workdir=run"),
        *(
            "--config.run.num_steps=2",
            "--config.run.groups_per_step=2",
            "--config.run.group_size=4",
            "--config.model.preset=micro",
            "--config.learner.tokens_per_step=64",
            "--config.serving.num_slots=8",
        ),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(line["num_trajectories"], line["num_failed"]) for line in lines] == [(8, 0)] * 2


def test_the_timeline_is_a_chrome_trace_with_a_row_a_slot_and_one_for_the_learner(finished: Path):
    events = json.loads((finished / "timeline.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"steps", "serving", "learner", "slot 0"} <= names
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans if e["pid"] == 2} & {"direct", "stream", "update"}
    assert all(e["dur"] >= 0 for e in spans)


def test_the_logged_trajectories_alone_give_the_final_weights(finished: Path):
    """Every trajectory of the files was trained on exactly once, in the order of the steps."""
    learner = learner_of_run()
    for step in range(6):
        replay_step(learner, read_step(finished / "trajectories", step, num_groups=2, group_size=4))
    end = restored(finished)
    assert end.state.policy_version == learner.state.policy_version
    assert lc.rel_l2(end.state.params, learner.state.params) <= 1e-5


EVERY_POINT = (
    ("commit", "before", 1),  # step 0 rolls out again
    ("commit", "after", 2),  # step 1 is replayed
    ("update", "after", 2),  # the first update of this process is the replay's
    ("publish", "after", 2),
    ("metrics", "before", 1),
    ("save", "before", 1),
    ("save", "after", 1),
    ("metrics", "before", 1),
)


@pytest.mark.parametrize(
    "kills",
    [EVERY_POINT[1:3], pytest.param(EVERY_POINT, marks=pytest.mark.slow)],
    ids=["a committed step", "every point"],
)
def test_killed_the_run_loses_and_doubles_nothing(finished: Path, tmp_path: Path, kills):
    """LESSONS 25. One work directory, killed several times in a row, then left to finish."""
    workdir = beside(finished, tmp_path)
    for point, when, count in kills:
        arguments = train_command(workdir)[3:]
        result = run(
            [sys.executable, str(TESTS / "kill_at.py"), point, when, str(count), "--", *arguments]
        )
        assert result.returncode == -signal.SIGKILL, (point, when, result.stdout, result.stderr)
    result = run(train_command(workdir))
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in read_jsonl(workdir / "metrics.jsonl")] == list(range(6))
    assert trained_ids(workdir) == trained_ids(finished)
    learner = learner_of_run()
    for step in range(6):
        replay_step(learner, read_step(workdir / "trajectories", step, num_groups=2, group_size=4))
    assert lc.rel_l2(restored(workdir).state.params, learner.state.params) <= 1e-5


def test_interruption_finishes_the_step_and_the_same_command_resumes(
    finished: Path, tmp_path: Path
):
    workdir = beside(finished, tmp_path)
    command = train_command(workdir, "--config.run.num_steps=1000")
    process = subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + TIMEOUT_S
    while len(read_jsonl(workdir / "metrics.jsonl")) < 2:
        assert time.monotonic() < deadline, "no second step within the deadline"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: interrupted" in err
    done = len(read_jsonl(workdir / "metrics.jsonl"))
    result = run(train_command(workdir, f"--config.run.num_steps={done + 1}"))
    assert result.returncode == 0, result.stderr
    assert f"resumed from the checkpoint of step {done}" in result.stdout
    assert [line["step"] for line in read_jsonl(workdir / "metrics.jsonl")] == list(range(done + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_while_compiling_leaves_no_process(tmp_path: Path, number: signal.Signals):
    # A background job ignores SIGINT, and so would its children.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        train_command(tmp_path / "run"),
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, inherited)
    assert process.stdout is not None
    while "compiling" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    deadline = time.monotonic() + TIMEOUT_S
    while len(processes_of(process.pid)) < 2:  # the one that compiles
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT_S)  # the other process has these pipes too
    is_interrupted = number is signal.SIGINT
    assert process.returncode == (130 if is_interrupted else -number)
    assert err == ("interrupted while starting\n" if is_interrupted else "")
    deadline = time.monotonic() + 5
    while processes_of(process.pid):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def processes_of(session: int) -> list[int]:
    """Living processes of a session; multiprocessing's resource tracker is not counted."""
    return [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_in(pid, session)
    ]


def _is_in(pid: int, session: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
        return os.getsid(pid) == session and "resource_tracker" not in command and command != ""
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_damaged_files_and_a_second_process_are_refused_in_one_paragraph(
    finished: Path, tmp_path: Path
):
    workdir = copy_of(finished, tmp_path)
    shutil.rmtree(workdir / "checkpoints" / "6")
    with (workdir / "events.jsonl").open("a") as file:
        file.write("garbage\n")
    damaged = workdir / "trajectories" / "step_000004.jsonl"
    damaged.write_text("".join(damaged.read_text().splitlines(keepends=True)[:3]))
    more = train_command(workdir, "--config.run.num_steps=7")
    for message in ("step_000004.jsonl holds 3 trajectories", "events.jsonl: the last line"):
        result = run(more)
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr
        assert "Traceback" not in result.stderr
        damaged.unlink(missing_ok=True)
    (workdir / "events.jsonl").unlink()
    with (workdir / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run(more)
        assert result.returncode == 2
        assert "is in use by another process" in result.stderr
    assert run(more).returncode == 0
    kept = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert len(kept) <= 3 and kept[-1] == 7  # the newest two and the best, also after a resume


def test_a_corrupt_checkpoint_is_named_and_nothing_is_lost(finished: Path, tmp_path: Path):
    workdir = copy_of(finished, tmp_path)
    for path in (workdir / "checkpoints" / "6").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:500])
    before = sorted((p, p.stat().st_size) for p in (workdir / "checkpoints").rglob("*"))
    result = run(train_command(workdir, "--config.run.num_steps=7"))
    assert result.returncode == 2
    assert "error: the checkpoint of step 6" in result.stderr
    assert "Other checkpoints: [3]" in result.stderr
    assert sorted((p, p.stat().st_size) for p in (workdir / "checkpoints").rglob("*")) == before
    shutil.move(workdir / "checkpoints" / "6", tmp_path / "damaged")
    result = run(train_command(workdir, "--config.run.num_steps=7"))
    assert result.returncode == 0, result.stderr
    assert "replayed steps 3 to 5" in result.stdout
    assert [line["step"] for line in read_jsonl(workdir / "metrics.jsonl")] == list(range(7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.lerner.x=2"], "config has no key 'lerner'. Did you mean 'learner'?"),
        (["--config.run.seed=x"], "flag --config.run.seed=x: expected an integer"),
        (["--config.optimizer.learning_rate=x"], "learning_rate=x: expected a number"),
        (["--config.env.options.secret=2"], "unexpected keyword argument 'secret'"),
        (["--config.learner.objective_options.kl_coeficient=2"], "Did you mean 'kl_coefficient'?"),
        (["--config.run.group_size=1"], "config.run.group_size = 1: expected at least 2"),
        (["--config.run.seed=5"], "another configuration: run.seed: 0 -> 5"),
        (["--config.model.preset=tinny"], "tiny"),
        (
            ["--config.env.factory=no.such:thing"],
            "config.env.factory = 'no.such:thing': importing no.such raised",
        ),
        (["--config.env.options.num_values=1"], "num_values = 1: expected at least 2"),
        (
            ["--config.learner.reduction=exact", "--config.run.group_size=5000"],
            "2 groups a step: with group_size 5000 a pair of this step has 5000 addends",
        ),
        (["--config.sandbox.backend=docker"], "config.sandbox.backend = 'docker': expected one of"),
    ],
)
def test_bad_input_is_one_paragraph_and_touches_nothing(
    finished: Path, tmp_path: Path, arguments, message
):
    is_resume = "seed" in arguments[0]
    workdir = finished if is_resume else tmp_path / "run"
    before = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*"))
    result = run(train_command(workdir, *arguments))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted((p, p.stat().st_mtime_ns) for p in finished.rglob("*")) == before
    left = {p.name for p in (tmp_path / "run").glob("*")}
    assert left <= {"lock", "compile_cache"}  # config.json would claim the directory


class Compiling:
    """A learner or a serving worker that compiles, or is refused."""

    def __init__(self, is_refused: bool) -> None:
        self._is_refused = is_refused

    def warm_up(self) -> int:
        if self._is_refused:
            raise MemoryPlanError("too large")
        return 1


@pytest.mark.parametrize("refused", ["learner", "worker"])
def test_a_run_that_does_not_compile_leaves_its_directory_to_another(tmp_path: Path, refused: str):
    """config.json would refuse the corrected configuration."""
    workdir = WorkDirectory(tmp_path / "run")
    runtime: Any = types.SimpleNamespace(
        config=RunConfig(),
        workdir=workdir,
        train_tasks=[Task(task_id="t", instruction="")],
        learner=Compiling(refused == "learner"),
        worker=Compiling(refused == "worker"),
    )
    with Progress("none", num_steps=1) as progress, pytest.raises(MemoryPlanError):
        asyncio.run(Trainer(runtime, progress).run())
    assert not [path for path in workdir.root.rglob("*") if path.is_file()]
