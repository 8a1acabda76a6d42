"""The journal survives kill -9 and reads back exactly what was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.journal import (
    Journal,
    JournalError,
    from_json,
    read_journal,
    replay,
    to_json,
)
from thundersync_jax.trajectory import MAX_REWARD, TrajectoryKey

STARTED = ev.RunStarted(mode=ev.Mode.BARRIER, max_open_groups=4, max_empty_steps=5)
KEYS = st.builds(TrajectoryKey, step=st.integers(), group=st.integers(), index=st.integers())
ENTRIES = st.one_of(
    st.builds(ev.RunStarted),
    st.builds(
        ev.StepOpened,
        step=st.integers(),
        policy_version=st.integers(),
        groups=st.integers(1),
        group_size=st.integers(1),
    ),
    st.builds(ev.ContentFinal, key=KEYS),
    st.builds(ev.RewardKnown, key=KEYS, reward=st.floats(-MAX_REWARD, MAX_REWARD)),
    st.builds(ev.AttemptFailed, key=KEYS, reason=st.text()),
    st.builds(ev.DeadlinePassed, timeout_s=st.floats(0, 1e9)),
    st.just(ev.LearnerIdle()),
    st.builds(ev.Updated),
    st.builds(ev.Published),
    st.builds(ev.Abandoned),
)


def journal_of(path: Path, *entries: ev.RunStarted | ev.Event) -> Path:
    journal = Journal(path / "events.jsonl", lambda: 0.25)
    journal.start()
    for entry in entries:
        journal.append(entry)
    journal.close()
    return path / "events.jsonl"


@settings(deadline=None)
@given(entry=ENTRIES)
def test_every_entry_survives_json(entry: ev.RunStarted | ev.Event) -> None:
    assert from_json(json.loads(json.dumps(to_json(entry)))) == entry


def test_every_event_has_an_example_above() -> None:
    examples = {type(entry) for entry in (_example(cls) for cls in typing.get_args(ev.Event))}
    assert examples == set(typing.get_args(ev.Event))


def _example(cls: type) -> ev.Event:
    """Decodes the smallest JSON object of every event type."""
    values = {
        "key": [0, 0, 0],
        "reward": 0.0,
        "reason": "",
        "timeout_s": 1.0,
        "step": 0,
        "policy_version": 0,
        "groups": 1,
        "refills": 0,
        "turn": 0,
        "group_size": 1,
        "is_empty": False,
    }
    fields = {name: values[name] for name in cls.__dataclass_fields__}
    return from_json({"event": cls.__name__, **fields})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"event": "Rewarded"}, "event 'Rewarded' is not one of"),
        ({}, "event None is not one of"),
        ({"event": "ContentFinal"}, r"has the fields \['key'\], got \[\]"),
        ({"event": "ContentFinal", "key": [0, 0, 0], "x": 1}, r"got \['key', 'x'\]"),
        ({"event": "ContentFinal", "key": [0, 0]}, r"must be \[step, group, index\]"),
        ({"event": "ContentFinal", "key": [0, 0, True]}, r"must be \[step, group, index\]"),
        ({"event": "DeadlinePassed", "timeout_s": "9"}, "must be a finite float, got '9'"),
        ({"event": "DeadlinePassed", "timeout_s": float("inf")}, "must be a finite float"),
        ({"event": "Updated", "policy_version": True, "is_empty": True}, "must be a finite int"),
    ],
)
def test_the_codec_is_strict(values: dict[str, object], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        from_json(values)


def test_lines_carry_seq_and_time_and_count_on_after_a_restart(tmp_path: Path) -> None:
    journal_of(tmp_path, STARTED, ev.LearnerIdle())
    path = journal_of(tmp_path, STARTED)
    lines = list(read_journal(path))
    assert [(line.seq, line.time_s) for line in lines] == [(0, 0.25), (1, 0.25), (2, 0.25)]


@pytest.mark.parametrize("cut", [1, 10])
def test_a_torn_last_line_is_ignored_and_then_repaired(tmp_path: Path, cut: int) -> None:
    path = journal_of(tmp_path, STARTED, ev.LearnerIdle())
    path.write_bytes(path.read_bytes()[:-cut])
    assert [line.entry for line in read_journal(path)] == [STARTED]
    journal_of(tmp_path, ev.Published(policy_version=1))
    entries = [line.entry for line in read_journal(path)]
    assert entries == [STARTED, ev.Published(policy_version=1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:20] + b"\n", "line 2: Expecting|line 2: Unterminated"),
        (lambda line: line.replace(b'"seq": 1', b'"seq": 5'), "line 2: expected seq 1, got 5"),
        (lambda line: line.replace(b"LearnerIdle", b"LearnerIdlf"), "line 2: event 'LearnerIdlf'"),
        (lambda line: b"[]\n", r"line 2: expected an object, got \[\]"),
    ],
)
def test_a_broken_line_elsewhere_raises_with_its_number(
    tmp_path: Path, change: typing.Callable[[bytes], bytes], message: str
) -> None:
    path = journal_of(tmp_path, STARTED, ev.LearnerIdle(), ev.LearnerIdle())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + change(lines[1]) + lines[2])
    with pytest.raises(JournalError, match=message):
        list(read_journal(path))


def test_replay_starts_a_fresh_machine_with_every_run(tmp_path: Path) -> None:
    opened = ev.StepOpened(step=0, policy_version=0, groups=1, group_size=1)
    failed = ev.AttemptFailed(key=fakes.key(), reason="broke")
    path = journal_of(tmp_path, STARTED, opened, STARTED, opened, failed)
    commands = list(replay(read_journal(path)))
    assert commands[1] == commands[3]
    assert commands[4] == [ev.SetFailed(key=fakes.key(), reason="broke"), ev.ReleaseLearner()]
    with pytest.raises(JournalError, match="begins with RunStarted"):
        list(replay(list(read_journal(path))[1:]))


def test_a_journal_is_started_before_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="call start"):
        Journal(tmp_path / "events.jsonl", lambda: 0.0).append(STARTED)


WRITER = """
import pathlib, sys, time
from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]), time.monotonic)
journal.start()
for version in range(10**9):
    journal.append(ev.Published(policy_version=version))
    if version == 100:
        print("100", flush=True)
"""


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"100\n"
        os.kill(writer.pid, signal.SIGKILL)
    versions = [line.entry.policy_version for line in read_journal(path)]
    assert len(versions) > 100
    assert versions == list(range(len(versions)))
