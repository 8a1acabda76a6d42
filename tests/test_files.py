"""Files of a run survive a kill: a torn line is no line, a partial file is no file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.command_line import check_new_directory, check_new_file
from thundersync_jax.config import RunConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import (
    DamagedFileError,
    JsonlWriter,
    read_jsonl,
    write_jsonl_atomically,
)
from thundersync_jax.model.presets import LinearRopeScaling, preset
from thundersync_jax.trajectory import (
    Rollout,
    TrajectoryBuilder,
    TrajectoryKey,
    TrajectoryRecord,
    Turn,
    Verdict,
)
from thundersync_jax.trajectory_log import (
    TrajectoryLogError,
    read_step,
    step_path,
    write_step,
)
from thundersync_jax.workdir import WorkDirectory, versions


@given(cut=st.integers(0, 200))
@settings(max_examples=40, deadline=None)
def test_a_torn_last_line_is_skipped_and_cut_off(
    tmp_path_factory: pytest.TempPathFactory, cut: int
):
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        for step in range(5):
            writer.write({"step": step, "reward": 0.25 * step})
    data = path.read_bytes()
    path.write_bytes(data[: max(0, len(data) - cut)])
    whole = [record["step"] for record in read_jsonl(path)]
    assert whole == list(range(len(whole)))
    with JsonlWriter(path) as writer:
        writer.write({"step": 99})
    assert [record["step"] for record in read_jsonl(path)] == [*whole, 99]


def test_non_finite_values_become_null_and_numpy_becomes_plain(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"a": float("nan"), "b": np.float32(0.5), "c": np.arange(2), "d": [np.inf]})
    assert read_jsonl(path) == [{"a": None, "b": 0.5, "c": [0, 1], "d": [None]}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    for damage in (b"nonsense", b"\xff\xfe", b"{"):
        path.write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
        with pytest.raises(DamagedFileError, match=r"x.jsonl, line 2 is not JSON.*move it away"):
            read_jsonl(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "step.jsonl"
    write_jsonl_atomically(path, [{"step": 1}])
    with pytest.raises(TypeError):
        write_jsonl_atomically(path, [{"step": object()}])
    assert read_jsonl(path) == [{"step": 1}]


def logged(index: int, *, failed: bool = False) -> TrajectoryRecord:
    key = TrajectoryKey(step=3, group=0, index=index)
    builder = TrajectoryBuilder()
    builder.append_action([5, 1], [-0.1, -1 / 3], [2, 2])
    builder.append_observation([7])
    builder.begin_segment()
    builder.append_action([6], [-2.0], [2])
    turn = Turn(
        num_action_tokens=2,
        action_text="probe 3\n",
        observation_text="lower\n",
        started_s=1.0,
        sampled_s=1.5,
        ended_s=2.0,
        slot=4,
        error="no such tool",
    )
    rollout = Rollout(
        key=key,
        task_id="t",
        prompt_ids=(0,),
        tokens=builder.build(),
        turns=(turn, turn),
        stop_reason="done",
    )
    return TrajectoryRecord(
        key=key,
        task_id="t",
        prompt_ids=(0,),
        rollout=None if failed else rollout,
        verdict=Verdict(failure="sandbox died") if failed else Verdict(reward=0.7),
        dispatched_s=0.5,
        content_s=None if failed else 2.0,
        terminal_s=2.5,
    )


def test_a_step_is_read_back_as_it_was_written(tmp_path: Path):
    written = [logged(1), logged(0, failed=True)]
    write_step(tmp_path, 3, written)
    read = read_step(tmp_path, 3, num_groups=1, group_size=2)
    assert [t.key.index for t in read] == [0, 1]
    assert read[0] == written[1]
    assert dataclasses.replace(read[1], rollout=None) == dataclasses.replace(
        written[0], rollout=None
    )
    for field in dataclasses.fields(read[1].rollout.tokens):
        np.testing.assert_array_equal(
            getattr(read[1].rollout.tokens, field.name),
            getattr(written[0].rollout.tokens, field.name),
        )
    assert read[1].rollout.turns == written[0].rollout.turns


def test_a_damaged_step_is_named_with_what_to_do(tmp_path: Path):
    step_path(tmp_path, 3).write_text('{"step": 3}\n')
    with pytest.raises(TrajectoryLogError, match=r"step_000003.jsonl is not.*move it away"):
        read_step(tmp_path, 3, num_groups=1, group_size=2)
    with pytest.raises(TrajectoryLogError, match="step 4 was not committed"):
        read_step(tmp_path, 4, num_groups=1, group_size=2)
    write_step(tmp_path, 3, [logged(0)])
    with pytest.raises(TrajectoryLogError, match="holds 1 trajectories, expected those of 1 group"):
        read_step(tmp_path, 3, num_groups=1, group_size=2)


def test_a_work_directory_resumes_its_own_configuration_only(tmp_path: Path):
    workdir, model = WorkDirectory(tmp_path / "run"), preset("micro", vocab_size=9)
    workdir.open(RunConfig())
    assert not workdir.config.exists()  # a refused configuration does not claim the directory
    workdir.claim(RunConfig(), model=model, tokenizer="0")
    with pytest.raises(ConfigError, match="in use by another process"):
        WorkDirectory(tmp_path / "run").open(RunConfig())
    workdir.close()
    before = workdir.config.read_bytes()
    other = dataclasses.replace(RunConfig(), run=dataclasses.replace(RunConfig().run, seed=7))
    with pytest.raises(ConfigError, match=r"another configuration: run.seed: 0 -> 7. Use a new"):
        workdir.open(other)
    assert workdir.config.read_bytes() == before
    assert json.loads(before)["versions"] == versions()
    workdir.check_tokenizer("0")
    with pytest.raises(ConfigError, match=r"a tokenizer of fingerprint 0, and .* now has 1"):
        workdir.check_tokenizer("1")
    workdir.check_template("")
    with pytest.raises(ConfigError, match=r"a chat template of fingerprint none, and .* now has 1"):
        workdir.check_template("1")
    for changes, difference in (
        ({"rope_theta": 77.0}, r"rope_theta: 10000.0 -> 77.0"),
        ({"rope_scaling": LinearRopeScaling(factor=2)}, r"rope_scaling: None -> {'factor': 2}"),
        ({"windows": (0, 4)}, r"windows: \[\] -> \[0, 4\]"),
    ):
        with pytest.raises(ConfigError, match=rf"{difference}\. With them its weights are another"):
            workdir.check_model(dataclasses.replace(model, **changes))
    workdir.check_model(model)
    workdir.config.write_text(json.dumps({"config": {}}))  # of a run that wrote less
    workdir.check_model(dataclasses.replace(model, rope_theta=77.0))
    workdir.check_frozen_policy("opd.teacher", "a of step 3")  # of a run that has not written it
    workdir.claim(RunConfig(), model=model, tokenizer="0", frozen_policy="a of step 3")
    workdir.check_frozen_policy("opd.teacher", "a of step 3")
    learned = (
        r"learned from a policy of fingerprint a of step 3, and config\.opd\.teacher now names"
    )
    with pytest.raises(ConfigError, match=rf"{learned} one of b of step 3: .* Restore that policy"):
        workdir.check_frozen_policy("opd.teacher", "b of step 3")
    workdir.config.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        workdir.open(RunConfig())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        WorkDirectory(tmp_path / "file").open(RunConfig())
    (tmp_path / "run" / "compile_cache").write_text("")
    with pytest.raises(ConfigError, match="compile_cache is a file: remove it"):
        workdir.open(RunConfig())


@pytest.mark.parametrize("name", ["file", "file/x", "full", "/proc/none", "x" * 300])
def test_a_directory_that_cannot_be_written_is_refused_before_any_work(name: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "content").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"--to=.* (is not empty|cannot be written .*): give a"):
        check_new_directory("to", tmp_path / name)
    for good in ("new/below", "full/content"):
        check_new_directory("to", tmp_path / good)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "none/p.json", "file/p.json"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(name: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--json=.* cannot be written: expected a file in a"):
        check_new_file("json", tmp_path / name)
    check_new_file("json", tmp_path / "p.json")
    check_new_file("json", tmp_path / "file")
