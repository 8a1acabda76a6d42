"""Reads a Hugging Face directory straight into sharded arrays.

Every host reads the pieces of the files that its devices hold, strip by strip: a strip is read,
turned and converted while it is in the processor's cache, several at a time. A host's memory is
that of its shards. What is missing or has another shape is found before anything is read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from thundersync_jax.model.families import Tensor, read_config, tensors
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.safetensors_file import SafetensorsFile, StoredTensor
from thundersync_jax.model.transformer import Params, abstract_params, logical_axes
from thundersync_jax.model.typed_values import TypedValues

INDEX = "model.safetensors.index.json"
_STRIP_BYTES = 512 * 2**10
_ALIGNMENT = 64  # of host memory that JAX's CPU back-end takes over without a copy


def is_hugging_face(root: Path) -> bool:
    """Whether a directory is meant as one, and not as a run's."""
    try:
        text = json.loads((root / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(text, dict) and "model_type" in text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One of ours, and how files hold it.

    Attributes:
      like: shape and dtype.
      axes: logical ones.
    """

    tensor: Tensor
    like: jax.ShapeDtypeStruct
    axes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.like.shape, strict=True))

    @property
    def num_layers(self) -> int:
        return self.sizes.get("layers", 1)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Of its tensor in a file, of one layer."""
        return tuple(math.prod(self.sizes[a] for a in group) for group in self.tensor.dims)


@functools.lru_cache(maxsize=8)  # tracing a model takes longer than reading a small one
def parameters(config: TransformerConfig) -> tuple[Parameter, ...]:
    """All of a model, the largest first."""
    shapes, axes = abstract_params(config), logical_axes(config)
    found = [
        Parameter(tensor=t, like=at_path(shapes, t.path), axes=at_path(axes, t.path))
        for t in tensors(config)
    ]
    return tuple(sorted(found, key=lambda parameter: -parameter.like.size))


class HuggingFaceDirectory:
    """The model in a directory: config.json and one or more safetensors files.

    Attributes:
      config: the shapes, in float32.
      max_context: tokens that its positions are made for, where config.json says.

    Raises:
      ModelError: the directory, its configuration or its tensors are not what a model has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not root.is_dir():
            raise ModelError(f"{root}: there is no such directory")
        text, where = self._json("config.json"), str(root / "config.json")
        self.config = read_config(text, where)
        self.max_context: int | None = TypedValues(text, where).integer(
            "max_position_embeddings", None
        )
        self._files = contextlib.ExitStack()
        self._stored = self._open()

    def __enter__(self) -> HuggingFaceDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def load(self, config: TransformerConfig, shardings: Any) -> Params:
        """The parameters, in `config.param_dtype`, where `shardings` place them.

        Args:
          config: of this model, in any precision.
          shardings: a pytree like the parameters.
        """
        self.check(config)
        params: Params = {}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            # The largest first: a device that copies a host's array holds it twice for a moment.
            for parameter in parameters(config):
                path = parameter.tensor.path
                read = functools.partial(self.read, parameter, threads=threads)
                array = jax.make_array_from_callback(
                    parameter.like.shape, at_path(shardings, path), read
                )
                _put(params, path, array)
        return params

    def read(
        self,
        parameter: Parameter,
        index: tuple[slice, ...],
        *,
        threads: concurrent.futures.Executor,
    ) -> np.ndarray:
        """A piece of a parameter, by its index in the whole."""
        shape = parameter.like.shape
        whole = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        piece = _aligned_empty([_length(part) for part in whole], parameter.like.dtype)
        parts = dict(zip(parameter.axes, whole, strict=True))
        layers = parts.pop("layers", slice(0, 1))
        order = [list(parts).index(axis) for axis in parameter.tensor.axes]
        slowest = parameter.tensor.axes[0]
        jobs: list[concurrent.futures.Future[None]] = []
        for number, layer in enumerate(range(layers.start, layers.stop)):
            stored = self._stored[parameter.tensor.name.format(layer)]
            out = (piece[number] if "layers" in parameter.axes else piece).transpose(order)
            for strip in _strips(parameter, parts[slowest], stored.row_bytes):
                rows = slice(strip.start - parts[slowest].start, strip.stop - parts[slowest].start)
                job = threads.submit(_copy, stored, parameter, {**parts, slowest: strip}, out[rows])
                jobs.append(job)
        for job in jobs:
            job.result()
        return piece

    def check(self, config: TransformerConfig) -> None:
        """Raises ModelError naming everything that is missing or misshapen at once."""
        wrong = []
        for parameter in parameters(config):
            for layer in range(parameter.num_layers):
                name, want = parameter.tensor.name.format(layer), parameter.file_shape
                if name not in self._stored:
                    wrong.append(f"{name} is missing")
                elif self._stored[name].shape != want:
                    found = list(self._stored[name].shape)
                    wrong.append(f"{name} has shape {found}, config.json asks for {list(want)}")
        if wrong:
            raise ModelError(
                f"{self.root}: {len(wrong)} tensors do not fit config.json:\n  "
                + "\n  ".join(wrong)
            )

    def _open(self) -> dict[str, StoredTensor]:
        if (self.root / INDEX).exists():
            names = sorted(set(self._json(INDEX).get("weight_map", {}).values()))
        else:
            names = sorted(path.name for path in self.root.glob("*.safetensors"))
        missing = [name for name in names if not (self.root / name).exists()]
        if missing or not names:
            raise ModelError(
                f"{self.root} lacks {missing or ['*.safetensors']}: expected a directory as "
                "`save_pretrained` writes it, with all its files"
            )
        stored: dict[str, StoredTensor] = {}
        for name in names:
            file = SafetensorsFile(self.root / name)
            self._files.callback(file.close)
            stored |= file.tensors
        return stored

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.root / name}: expected a JSON file of a Hugging Face model "
                f"({type(error).__name__}: {error})"
            ) from error


def _strips(parameter: Parameter, part: slice, row_bytes: int) -> Iterator[slice]:
    """Of a part of the slowest axis of a tensor."""
    others = parameter.tensor.dims[0][1:]
    step_bytes = row_bytes * math.prod(parameter.sizes[axis] for axis in others)
    step = max(1, _STRIP_BYTES // step_bytes)
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def _copy(
    stored: StoredTensor, parameter: Parameter, parts: Mapping[str, slice], out: np.ndarray
) -> None:
    """Reads the parts of a tensor's axes into `out`, whose axes are in the file's order."""
    tensor, sizes = parameter.tensor, parameter.sizes
    rows, columns = ([_block(group, parts, sizes) for group in tensor.dims] + [slice(0, 1)])[:2]
    # A block is whole over the axes that share a dimension with a slower one; cut out of it now.
    slowest = {group[0] for group in tensor.dims}
    lengths = [_length(parts[axis]) if axis in slowest else sizes[axis] for axis in tensor.axes]
    cut = tuple(slice(None) if axis in slowest else parts[axis] for axis in tensor.axes)
    found = stored.read(rows, columns).reshape(lengths)[cut]
    out[...] = found.astype(out.dtype, copy=False)  # then turned: twice as fast as both in one


def _block(group: Sequence[str], parts: Mapping[str, slice], sizes: Mapping[str, int]) -> slice:
    """The range of a file's dimension that holds a piece of its axes."""
    slowest, *others = group
    width = math.prod(sizes[axis] for axis in others)
    return slice(parts[slowest].start * width, parts[slowest].stop * width)


def _length(part: slice) -> int:
    return part.stop - part.start


def _aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Memory that JAX's CPU back-end makes an array of as it is."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def at_path(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Params, path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
