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
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FOLLOWS = "rotary_emb.inv_freq"  # tensors that follow from config.json
_STRIP_BYTES = 512 * 2**10
_MOST_LINES = 100  # of an error
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
        with contextlib.ExitStack() as files:  # closes them if they are refused
            self._stored = self._open(files)
            self._files = files.pop_all()

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
        self._check_tied(config)
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
        """Raises ModelError naming all that is missing, misshapen or not of the model at once."""
        wrong, unused = [], set(self._stored)
        for parameter in parameters(config):
            for layer in range(parameter.num_layers):
                name, want = parameter.tensor.name.format(layer), parameter.file_shape
                unused.discard(name)
                if name not in self._stored:
                    wrong.append(f"{name} is missing")
                elif self._stored[name].shape != want:
                    found = list(self._stored[name].shape)
                    wrong.append(f"{name} has shape {found}, config.json asks for {list(want)}")
        if config.tie_embeddings:
            unused.discard(_OUTPUT)  # held against the embedding when that is read
        wrong += [
            f"{name} is in the files, the model that config.json describes has none"
            for name in unused
            if not name.endswith(_FOLLOWS)
        ]
        self._refuse(wrong, "tensors do not fit config.json")

    def _check_tied(self, config: TransformerConfig) -> None:
        """An output kernel in the files is the embedding that stands for it."""
        output, embedding = self._stored.get(_OUTPUT), self._stored[_EMBEDDING]
        if output is None or not config.tie_embeddings:
            return
        same = (output.shape, output.dtype) == (embedding.shape, embedding.dtype)
        step = max(1, _STRIP_BYTES // embedding.row_bytes)
        for start in range(0, embedding.shape[0], step) if same else ():
            rows = slice(start, min(start + step, embedding.shape[0]))
            one, other = (t.read(rows, slice(0, t.shape[1])) for t in (output, embedding))
            same = same and one.tobytes() == other.tobytes()
        if not same:
            raise ModelError(
                f"{self.root}: config.json has tie_word_embeddings = true, yet {_OUTPUT} differs "
                f"from {_EMBEDDING}: expected false, or no {_OUTPUT}"
            )

    def _open(self, files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        """All tensors, each of the one file that has it: of those that an index names, or of all
        that lie there. `files` closes them.
        """
        places = self._index()
        names = {path.name for path in self.root.glob("*.safetensors")}
        if places is not None:
            if "model.safetensors" in names.difference(places.values()):
                raise ModelError(
                    f"{self.root} has model.safetensors beside {INDEX}, which does not name it: "
                    "expected one of the two, for programs differ in which they read"
                )
            names = set(places.values())
        missing = [name for name in sorted(names) if not (self.root / name).is_file()]
        if missing or not names:
            raise ModelError(
                f"{self.root} lacks {missing or ['*.safetensors']}: expected a directory as "
                "`save_pretrained` writes it, with all its files"
            )
        stored: dict[str, StoredTensor] = {}
        found: dict[str, str] = {}
        wrong = []
        for name in sorted(names):
            file = SafetensorsFile(self.root / name)
            files.callback(file.close)
            twice = stored.keys() & file.tensors.keys()
            wrong += [f"{tensor} is in {found[tensor]} and in {name}" for tensor in twice]
            stored |= file.tensors
            found |= dict.fromkeys(file.tensors, name)
        said = found if places is None else places
        wrong += [
            f"{tensor} is in {found.get(tensor, 'no file')}, {INDEX} says "
            f"{said.get(tensor, 'nothing of it')}"
            for tensor in found.keys() | said.keys()
            if found.get(tensor) != said.get(tensor)
        ]
        self._refuse(wrong, "tensors are not in one file each")
        return stored

    def _index(self) -> dict[str, str] | None:
        """The file of every tensor; None without an index."""
        if not (self.root / INDEX).exists():
            return None
        index = TypedValues(self._json(INDEX), str(self.root / INDEX))
        places = index.inner("weight_map")
        if not list(places):
            raise index.error("weight_map", "the file of every tensor, and at least one")
        found = {tensor: places.text(tensor) for tensor in places}
        for tensor, name in found.items():
            if Path(name).name != name:
                raise places.error(tensor, "the name of a file in the directory")
        return found

    def _refuse(self, wrong: Sequence[str], what: str) -> None:
        if wrong:
            shown = "\n  ".join(sorted(wrong)[:_MOST_LINES])
            rest = f"\n  and {len(wrong) - _MOST_LINES} more" * (len(wrong) > _MOST_LINES)
            raise ModelError(f"{self.root}: {len(wrong)} {what}:\n  {shown}{rest}")

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
    """Reads the parts of a tensor's axes into `out`, whose axes are in the file's order.

    Raises:
      ModelError: a number of it is not finite.
    """
    tensor, sizes = parameter.tensor, parameter.sizes
    rows, columns = ([_block(group, parts, sizes) for group in tensor.dims] + [slice(0, 1)])[:2]
    # A block is whole over the axes that share a dimension with a slower one; cut out of it now.
    slowest = {group[0] for group in tensor.dims}
    lengths = [_length(parts[axis]) if axis in slowest else sizes[axis] for axis in tensor.axes]
    cut = tuple(slice(None) if axis in slowest else parts[axis] for axis in tensor.axes)
    found = stored.read(rows, columns).reshape(lengths)[cut].astype(out.dtype, copy=False)
    # NumPy is twenty times as slow in half precision as in single.
    if not np.isfinite(found.astype(np.promote_types(out.dtype, np.float32), copy=False)).all():
        raise ModelError(
            f"{stored.name} has NaN, infinite or, in {out.dtype.name}, too large numbers: the "
            "model cannot be computed with. Copy or save it again"
        )
    out[...] = found  # now turned: twice as fast as both in one


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
