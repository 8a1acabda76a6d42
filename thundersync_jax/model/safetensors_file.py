"""One safetensors file, of which blocks are read into memory of one's own.

The library maps the file: every page that was read stays in the resident memory of a process until
the file is closed. Here a read is a system call into a buffer, and threads may read at the same
time. The library checks the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from thundersync_jax.model.presets import ModelError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Parts of rows below this are read with their rows: disks and kernels read as much anyway.
_LEAST_BYTES = 16 * 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of an open file.

    Attributes:
      file: its descriptor.
      offset: of the tensor's first byte in it.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: int
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """A block of the tensor as a matrix: rows along its first dimension, the others flat."""
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        first = self.offset + rows.start * self.row_bytes
        if num_columns * self.dtype.itemsize < min(self.row_bytes, _LEAST_BYTES):
            found = np.empty((num_rows, self.row_bytes // self.dtype.itemsize), self.dtype)
            self._fill(found, first)
            return found[:, columns]
        found = np.empty((num_rows, num_columns), self.dtype)
        if num_columns * self.dtype.itemsize == self.row_bytes:
            self._fill(found, first)
        else:
            for at, row in enumerate(found):
                self._fill(row, first + at * self.row_bytes + columns.start * self.dtype.itemsize)
        return found

    def _fill(self, array: np.ndarray, at: int) -> None:
        rest = array.reshape(-1).view(np.uint8).data
        while rest:
            count = os.preadv(self.file, [rest], at)
            if count == 0:
                raise ModelError(
                    f"the file of {self.name} became shorter while it was read: copy it again"
                )
            rest, at = rest[count:], at + count


class SafetensorsFile:
    """Owns one open file.

    Attributes:
      tensors: by name.

    Raises:
      ModelError: it is no safetensors file, is cut off, or holds numbers of another kind.
    """

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy"):  # holds the header against the file's length
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}): copy it again") from error
        self._file = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = json.loads(os.pread(self._file, length, 8))
        header.pop("__metadata__", None)
        self.tensors = {
            name: StoredTensor(
                name=name,
                dtype=_dtype(path, name, entry["dtype"]),
                shape=tuple(entry["shape"]),
                file=self._file,
                offset=8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }

    def close(self) -> None:
        os.close(self._file)


def _dtype(path: Path, tensor: str, name: str) -> np.dtype:
    if name not in _DTYPES:
        raise ModelError(
            f"{path}: {tensor} is stored as {name}: expected one of {', '.join(_DTYPES)}. Of a "
            "quantized model, take the one that it was made of"
        )
    return _DTYPES[name]
