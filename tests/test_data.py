"""Tasks survive storage unchanged, without TensorFlow; the cursor loses and doubles nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersync_jax.envs.data import AgentTasks, load_tasks
from thundersync_jax.envs.file_probe import file_probe
from thundersync_jax.envs.task_cursor import DataError, TaskCursor
from thundersync_jax.trajectory import Task

ROOT = Path(__file__).parents[1]
FILE_PROBE = "thundersync_jax.envs.data:FileProbeTasks"
ODD = Task(
    task_id="odd ü",
    instruction="two\nlines, \u20ac and an empty file",
    files={"a/b": "", "c": "x\ty\n"},
    metadata={"tests": ["one", "two"], "limit": 1.5, "nested": {"a": None}},
)
PLAIN = Task(task_id="plain", instruction="")


class OddTasks(AgentTasks):
    """Counts how often it is asked, by appending to the file that its options name."""

    def tasks(
        self, log: str, num_plain: int = 0, is_empty: bool = False
    ) -> Mapping[str, Sequence[Task]]:
        with open(log, "a") as file:
            file.write("asked\n")
        empty: dict[str, list[Task]] = {"test": []} if is_empty else {}
        return {"train": [ODD, *[PLAIN] * num_plain], **empty}


def test_tasks_come_back_as_they_went_in(tmp_path):
    options = {"log": str(tmp_path / "log"), "num_plain": 1}
    tasks = load_tasks(
        f"{__name__}:OddTasks", options=options, split="train", data_dir=tmp_path / "data"
    )
    assert sorted(tasks, key=lambda task: task.task_id) == [ODD, PLAIN]
    assert tasks[-1] == tasks[1] and tasks[:1] == [tasks[0]]
    with pytest.raises(IndexError):
        tasks[2]


def test_data_is_prepared_once_for_each_set_of_options(tmp_path):
    log = tmp_path / "log"

    def load(**options: object) -> Sequence[Task]:
        return load_tasks(
            f"{__name__}:OddTasks",
            options={"log": str(log), **options},
            split="train",
            data_dir=tmp_path / "data",
        )

    first = list(load())
    assert list(load()) == first and log.read_text().count("asked") == 1
    assert len(load(num_plain=1)) == 2 and log.read_text().count("asked") == 2


def test_splits_that_are_empty_or_unknown_and_wrong_builders_are_refused(tmp_path):
    odd = f"{__name__}:OddTasks"
    log = str(tmp_path / "log")
    for split in ("train[:0]", "absent"):
        with pytest.raises(DataError, match=rf"split {re.escape(repr(split))}.*'train': 1"):
            load_tasks(odd, options={"log": log}, split=split, data_dir=tmp_path)
    with pytest.raises(DataError, match="OddTasks has no task for split 'test'"):
        options = {"log": log, "is_empty": True}
        load_tasks(odd, options=options, split="train", data_dir=tmp_path)
    names = (f"{__name__}:Absent", f"{__name__}:ODD", __name__, "no.module:X")
    for builder in names:
        with pytest.raises(DataError, match="naming a subclass of AgentTasks"):
            load_tasks(builder, options={}, split="train", data_dir=tmp_path)
    with pytest.raises(DataError, match="options"):
        load_tasks(FILE_PROBE, options={"num_valeus": 8}, split="train", data_dir=tmp_path)
    with pytest.raises(DataError, match="at least one task"):
        TaskCursor([], seed=0)


def test_the_file_probe_builder_holds_the_tasks_of_the_suite_and_needs_no_tensorflow(tmp_path):
    program = f"""
import sys
from thundersync_jax.envs.data import load_tasks
data = {str(tmp_path)!r}
tasks = load_tasks({FILE_PROBE!r}, options={{"num_values": 3}}, split="test", data_dir=data)
assert not {{"tensorflow", "jax"}} & set(sys.modules)
print(len(tasks))
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.stdout == "64\n", ended.stderr  # and nothing else on standard output
    tasks = load_tasks(FILE_PROBE, options={"num_values": 3}, split="test", data_dir=tmp_path)
    by_id = {task.task_id: task for task in file_probe(num_values=3).tasks("test")}
    assert {task.task_id: task for task in tasks} == by_id


def tasks_of(num_tasks: int) -> list[Task]:
    return [Task(task_id=str(i), instruction="") for i in range(num_tasks)]


@given(
    st.integers(1, 30),
    st.integers(0, 2**63),
    st.lists(st.integers(0, 17), min_size=1, max_size=20),
    st.integers(0, 400),
)
def test_nothing_is_lost_or_doubled_however_the_stream_is_cut_and_resumed(
    num_tasks, seed, counts, start
):
    """Any cuts give one stream; every epoch is a permutation; a new cursor continues it."""
    tasks = tasks_of(num_tasks)
    whole = TaskCursor(tasks, seed).tasks_at(0, start + sum(counts))
    position, cut = start, []
    for count in counts:
        cut += TaskCursor(tasks, seed).tasks_at(position, count)
        position += count
    assert cut == whole[start:]
    for epoch in range(len(whole) // num_tasks):
        ids = Counter(task.task_id for task in whole[epoch * num_tasks : (epoch + 1) * num_tasks])
        assert ids == Counter(task.task_id for task in tasks)


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_ever():
    cursor = TaskCursor(tasks_of(8), seed=3)
    assert cursor.indices_at(0, 8) != cursor.indices_at(8, 8)
    assert cursor.indices_at(0, 8) != TaskCursor(tasks_of(8), seed=4).indices_at(0, 8)
    # Checkpoints rely on this order.
    assert cursor.indices_at(0, 16) == [6, 1, 5, 2, 7, 4, 3, 0, 7, 3, 5, 6, 4, 0, 2, 1]
