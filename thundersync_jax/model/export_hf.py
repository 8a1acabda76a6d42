"""Writes parameters as a Hugging Face directory that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from thundersync_jax.model.families import Tensor, tensors, write_config
from thundersync_jax.model.import_hf import INDEX, at_path
from thundersync_jax.model.lora import merged_kernel
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import Params, logical_axes

# Goes along from the directory that was imported; the rest follows from the parameters.
_KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def export_hugging_face(
    config: TransformerConfig,
    params: Params,
    root: Path,
    *,
    dtype: str = "bfloat16",
    source: Path | None = None,
    max_file_bytes: int = 2 * 2**30,
) -> None:
    """Writes config.json and safetensors files, and replaces those that are there. Adapters are
    merged into their kernels.

    Args:
      params: on devices of this host, in any float dtype.
      dtype: of the files.
      source: the Hugging Face directory that was imported, whose special ids go along.
      max_file_bytes: of a file, and of the host's memory that this takes.
    """
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob("model*.safetensors*"):
        old.unlink()
    places = _places(config, params, dtype, max_file_bytes)
    num_files = 1 + max(places.values())
    names = [f"model-{at + 1:05}-of-{num_files:05}.safetensors" for at in range(num_files)]
    for at, name in enumerate(names):
        wanted = {tensor for tensor, place in places.items() if place == at}
        save_file(
            {n: x.astype(dtype) for n, x in _arrays(config, params, wanted)},
            root / name,
            metadata={"format": "pt"},
        )
    index = {
        "metadata": {"total_size": _num_bytes(config, params, dtype)},
        "weight_map": {tensor: names[at] for tensor, at in places.items()},
    }
    (root / INDEX).write_text(json.dumps(index, indent=1))
    text = {**write_config(config), "torch_dtype": dtype}
    if source is not None:
        entries = json.loads((source / "config.json").read_text(encoding="utf-8"))
        text |= {key: entries[key] for key in _KEPT if key in entries}
    (root / "config.json").write_text(json.dumps(text, indent=1))


def _names(config: TransformerConfig) -> Iterator[tuple[str, Tensor, int | None]]:
    """(name in a file, parameter, layer) of everything."""
    for tensor in tensors(config):
        for layer in range(config.num_layers) if tensor.is_stacked else (None,):
            yield tensor.name.format(layer), tensor, layer


def _places(
    config: TransformerConfig, params: Params, dtype: str, max_file_bytes: int
) -> dict[str, int]:
    """The number of the file that each tensor goes into."""
    places, file, used = {}, 0, 0
    for name, tensor, layer in _names(config):
        shape = at_path(params, tensor.path).shape
        size = int(np.prod(shape[layer is not None :])) * np.dtype(dtype).itemsize
        if used and used + size > max_file_bytes:
            file, used = file + 1, 0
        places[name] = file
        used += size
    return places


def _arrays(
    config: TransformerConfig, params: Params, wanted: set[str]
) -> Iterator[tuple[str, np.ndarray]]:
    axes = logical_axes(config)
    for name, tensor, layer in _names(config):
        if name in wanted:
            array, own = at_path(params, tensor.path), at_path(axes, tensor.path)
            if layer is not None and tensor.path[-1] == "kernel":
                array, own = (
                    merged_kernel(config, at_path(params, tensor.path[:-1]), layer),
                    own[1:],
                )
            elif layer is not None:
                array, own = array[layer], own[1:]
            yield name, as_in_file(np.asarray(jax.device_get(array)), own, tensor)


def as_in_file(array: np.ndarray, axes: Sequence[str], tensor: Tensor) -> np.ndarray:
    """A parameter, or one layer of it, as its file has it.

    Args:
      axes: the array's logical axes.
    """
    sizes = dict(zip(axes, array.shape, strict=True))
    order = [axes.index(axis) for group in tensor.dims for axis in group]
    shape = [int(np.prod([sizes[axis] for axis in group])) for group in tensor.dims]
    return np.ascontiguousarray(array.transpose(order).reshape(shape))


def _num_bytes(config: TransformerConfig, params: Params, dtype: str) -> int:
    sizes = [at_path(params, tensor.path).size for tensor in tensors(config)]
    return sum(sizes) * np.dtype(dtype).itemsize
