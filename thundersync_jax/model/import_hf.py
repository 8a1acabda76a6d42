"""Reads a Hugging Face directory straight into sharded arrays.

Every host reads the pieces of the files that its devices hold, and no other: a piece is read,
turned and converted in one step, so a host's memory is that of its shards and of one piece of a
layer. What is missing or has another shape is found before anything is read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from thundersync_jax.model.families import Tensor, read_config, tensors
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.transformer import Params, abstract_params, logical_axes

INDEX = "model.safetensors.index.json"


class HuggingFaceDirectory:
    """The model in a directory: config.json and one or more safetensors files.

    Raises:
      ModelError: the directory, its configuration or its tensors are not what a model has.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = read_config(self._json("config.json"))
        self._files = contextlib.ExitStack()
        self._readers = self._open()

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
        self._check(config)
        params: Params = {}
        for tensor in tensors(config):
            shape = at_path(abstract_params(config), tensor.path).shape
            sharding = at_path(shardings, tensor.path)
            array = jax.make_array_from_callback(shape, sharding, self.reader(config, tensor))
            _put(params, tensor.path, array)
        return params

    def reader(self, config: TransformerConfig, tensor: Tensor) -> Callable[[Any], np.ndarray]:
        """Reads a piece of a parameter, by its index in the whole: slices, whole over head_dim."""
        like = at_path(abstract_params(config), tensor.path)
        axes = at_path(logical_axes(config), tensor.path)
        sizes = dict(zip(axes, like.shape, strict=True))
        file_axes = [axis for group in tensor.dims for axis in group]
        order = [file_axes.index(axis) for axis in axes if axis != "layers"]

        def read_one(name: str, parts: Mapping[str, slice], out: np.ndarray) -> None:
            piece = self._readers[name].get_slice(name)[
                tuple(_joined(group, parts, sizes) for group in tensor.dims)
            ]
            lengths = [_length(parts[axis]) for axis in file_axes]
            out[...] = piece.reshape(lengths).transpose(order)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            whole = [
                slice(*part.indices(size)) for part, size in zip(index, like.shape, strict=True)
            ]
            parts = dict(zip(axes, whole, strict=True))
            piece = np.empty([_length(part) for part in whole], like.dtype)
            if not tensor.is_stacked:
                read_one(tensor.name, parts, piece)
            else:
                layers = parts.pop("layers")
                for at, layer in enumerate(range(layers.start, layers.stop)):
                    read_one(tensor.name.format(layer), parts, piece[at])
            return piece

        return read

    def _check(self, config: TransformerConfig) -> None:
        """Names everything that is missing or misshapen at once."""
        wrong, shapes, axes = [], abstract_params(config), logical_axes(config)
        for tensor in tensors(config):
            sizes = dict(
                zip(at_path(axes, tensor.path), at_path(shapes, tensor.path).shape, strict=True)
            )
            want = [int(np.prod([sizes[axis] for axis in group])) for group in tensor.dims]
            for layer in range(config.num_layers if tensor.is_stacked else 1):
                name = tensor.name.format(layer)
                if name not in self._readers:
                    wrong.append(f"{name} is missing")
                    continue
                found = self._readers[name].get_slice(name).get_shape()
                if found != want:
                    wrong.append(f"{name} has shape {found}, config.json asks for {want}")
        if wrong:
            raise ModelError(
                f"{self.root}: {len(wrong)} tensors do not fit config.json:\n  "
                + "\n  ".join(wrong)
            )

    def _open(self) -> dict[str, Any]:
        """By tensor, the open file that holds it."""
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
        readers: dict[str, Any] = {}
        for name in names:
            try:
                file = self._files.enter_context(safe_open(self.root / name, framework="numpy"))
            except SafetensorError as error:
                raise ModelError(
                    f"{self.root / name} cannot be read ({error}): copy it again"
                ) from error
            readers |= dict.fromkeys(file.keys(), file)
        return readers

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.root / name}: expected a JSON file of a Hugging Face model "
                f"({type(error).__name__}: {error})"
            ) from error


def _joined(group: Sequence[str], parts: Mapping[str, slice], sizes: Mapping[str, int]) -> slice:
    """The rows of a file's dimension that a piece of its axes is: whole but for the slowest."""
    slowest, *others = group
    width = int(np.prod([sizes[axis] for axis in others]))
    assert all(_length(parts[axis]) == sizes[axis] for axis in others)
    return slice(parts[slowest].start * width, parts[slowest].stop * width)


def _length(part: slice) -> int:
    return part.stop - part.start


def at_path(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: Params, path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
