"""Tasks from tensorflow-datasets, without TensorFlow.

`load_tasks` prepares a builder once into `data_dir` in array_record form and reads it from there
ever after; a builder with other options has a directory of its own. The only module that imports
tensorflow_datasets: runs without a data set do not wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import tensorflow_datasets as tfds

from thundersync_jax.envs.file_probe import file_probe
from thundersync_jax.envs.task_cursor import DataError
from thundersync_jax.trajectory import Task


class AgentTasks(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Base of builders whose examples are `Task` records.

    A subclass sets VERSION, implements `tasks(**options)` and is named in `data.builder` as
    "package.module:Class".
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Builders are found by module and name: tfds' registry would refuse a second import."""
        super().__init_subclass__(skip_registration=True, **kwargs)

    def __init__(self, *, data_dir: str | Path, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        digest = hashlib.sha256(json.dumps(self._options, sort_keys=True).encode()).hexdigest()[:12]
        super().__init__(data_dir=Path(data_dir) / digest, file_format="array_record")

    def tasks(self, **options: Any) -> Mapping[str, Sequence[Task]]:
        """The tasks of every split."""
        raise NotImplementedError(f"{type(self).__name__} must implement tasks(**options)")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {
            "task_id": text,
            "instruction": text,
            "files": tfds.features.Sequence({"path": text, "content": text}),
            "metadata": text,
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(
        self, dl_manager: Any
    ) -> Mapping[str, Iterator[tuple[str, dict[str, Any]]]]:
        splits = self.tasks(**self._options)
        empty = [name for name, tasks in splits.items() if not tasks]
        if empty:
            raise DataError(
                f"{type(self).__name__} has no task for split {empty[0]!r}: leave it out"
            )
        return {name: self._generate_examples(tasks) for name, tasks in splits.items()}

    def _generate_examples(self, tasks: Sequence[Task]) -> Iterator[tuple[str, dict[str, Any]]]:
        for task in tasks:
            files = [{"path": path, "content": content} for path, content in task.files.items()]
            yield (
                task.task_id,
                {
                    "task_id": task.task_id,
                    "instruction": task.instruction,
                    "files": files,
                    "metadata": json.dumps(dict(task.metadata)),
                },
            )


class FileProbeTasks(AgentTasks):
    """The tasks of `file_probe` as a data set: an example builder."""

    def tasks(self, **options: Any) -> Mapping[str, Sequence[Task]]:
        suite = file_probe(**options)
        return {split: suite.tasks(split) for split in ("train", "test")}


class StoredTasks(Sequence[Task]):
    """The tasks of a prepared split, read when indexed."""

    def __init__(self, source: Sequence[Mapping[str, Any]]) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        example = self._source[index % len(self)]
        files = example["files"]
        return Task(
            task_id=example["task_id"].decode(),
            instruction=example["instruction"].decode(),
            files={
                p.decode(): c.decode() for p, c in zip(files["path"], files["content"], strict=True)
            },
            metadata=json.loads(example["metadata"]),
        )


def load_tasks(
    builder: str, *, options: Mapping[str, Any], split: str, data_dir: str | Path
) -> Sequence[Task]:
    """The tasks of one split.

    Args:
      builder: "package.module:Builder", a subclass of `AgentTasks`.
      split: a tfds split expression such as "train" or "train[:10%]".
      data_dir: prepared data lives here, below a digest of the options and the builder's name.
    """
    dataset = _builder_class(builder)(data_dir=data_dir, options=options)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the mains
            dataset.download_and_prepare()
    except TypeError as error:
        raise DataError(
            f"data.options = {dict(options)!r} do not suit {builder}: {error}"
        ) from error
    splits = {name: info.num_examples for name, info in dataset.info.splits.items()}
    try:
        tasks = StoredTasks(dataset.as_data_source(split=split))
    except ValueError as error:
        raise DataError(
            f"split {split!r} of {builder}: {error}. Its splits are {splits}"
        ) from error
    if not len(tasks):
        raise DataError(f"split {split!r} of {builder} holds no task. Its splits are {splits}")
    return tasks


def _builder_class(builder: str) -> type[AgentTasks]:
    module, _, name = builder.partition(":")
    found: Any = None
    with contextlib.suppress(ModuleNotFoundError):
        found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, AgentTasks)):
        raise DataError(
            f"data.builder = {builder!r}: expected 'package.module:Builder' naming a subclass of "
            f"AgentTasks, got {found!r}"
        )
    return found
