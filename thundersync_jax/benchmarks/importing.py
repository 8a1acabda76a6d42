"""How fast a Hugging Face directory becomes parameters, beside the rate at which its files are read
at all, and how much host memory that takes.

A random checkpoint of a gigabyte is written by a process of its own, into the current directory:
/tmp may be memory. For every repetition another process imports it twice, in float32, each time
dropped from the page cache: first into memory that the process gets from the system, of which the
peak is measured, then into the same again. Between the two it reads the files, dropped as well. On
virtual machines that get their memory page by page the first takes much longer than the disk does.
On the CPU the shards are in host memory too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from thundersync_jax.benchmarks.report import Report
from thundersync_jax.host_memory import keep_freed_memory
from thundersync_jax.model.export_hf import export_hugging_face
from thundersync_jax.model.import_hf import HuggingFaceDirectory, parameters
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.sharded import master_shardings
from thundersync_jax.model.transformer import Params, init_params
from thundersync_jax.sharding import MeshShape, make_mesh

# Layers of Qwen3-0.6B, as many as make a gigabyte.
NUM_LAYERS = {"bfloat16": 29, "float32": 14}
VOCAB_SIZE = 32_768
REPETITIONS = 5
MAX_FILE_BYTES = 2**28
_BUFFER_BYTES = 2**23

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Import:
    """One import of a checkpoint.

    Attributes:
      file_bytes, shard_bytes: of the files and of the parameters.
      tensor_bytes: of the largest tensor of a file, once imported.
      peak_bytes: of host memory in the first import, beyond what the process had before.
      first_s, import_s: of the import into new memory, and of that into memory that it had.
      read_s: of the files.
    """

    file_bytes: int
    shard_bytes: int
    tensor_bytes: int
    peak_bytes: int
    first_s: float
    read_s: float
    import_s: float

    @property
    def memory_over_bound(self) -> float:
        """Against 1.2 times the shards and the largest tensor."""
        return self.peak_bytes / (1.2 * self.shard_bytes + self.tensor_bytes)


def run() -> Report:
    """Medians; `import_over_read` is at most 2 where imports take half of the disk's rate."""
    results: dict[str, float] = {}
    for dtype in NUM_LAYERS:
        found = measure(dtype)
        ratios = [x.import_s / x.read_s for x in found]
        results |= {
            f"{dtype}_import_over_read": statistics.median(ratios),
            f"{dtype}_import_over_read_max": max(ratios),
            f"{dtype}_first_import_over_read": statistics.median(
                x.first_s / x.read_s for x in found
            ),
            f"{dtype}_read_mb_per_s": statistics.median(x.file_bytes / x.read_s for x in found)
            / 1e6,
            f"{dtype}_peak_over_shards": max(x.peak_bytes / x.shard_bytes for x in found),
            f"{dtype}_memory_over_bound": max(x.memory_over_bound for x in found),
        }
    config = {"num_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "repetitions": REPETITIONS}
    return Report(benchmark="import", config=config, results=results)


def measure(dtype: str) -> list[Import]:
    """Imports of a checkpoint stored in `dtype`."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        root = Path(directory)
        _apart(functools.partial(write_checkpoint, root, dtype))
        return [_apart(functools.partial(import_twice, root)) for _ in range(REPETITIONS)]


def write_checkpoint(root: Path, dtype: str) -> None:
    config = _model(NUM_LAYERS[dtype])
    params = init_params(config, 0)
    export_hugging_face(config, params, root, dtype=dtype, max_file_bytes=MAX_FILE_BYTES)


def import_twice(root: Path) -> Import:
    """Imports, reads and imports again, each time from the disk.

    A run knows its shapes before it imports: tracing the model is not counted.
    """
    keep_freed_memory()  # as the mains do
    files = sorted(root.glob("*.safetensors"))
    with HuggingFaceDirectory(root) as directory:
        config = directory.config
        directory.check(config)
        mesh = make_mesh(MeshShape(), jax.devices()[:1])
        shardings = master_shardings(config, mesh)

        def load() -> Params:
            return jax.block_until_ready(directory.load(config, shardings))

        before = _status_bytes("VmRSS")
        params, first_s = _timed_from_disk(files, load)
        peak_bytes = _status_bytes("VmHWM") - before
        shard_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        del params
        file_bytes, read_s = _timed_from_disk(files, functools.partial(read, files))
        _, import_s = _timed_from_disk(files, load)
    return Import(
        file_bytes=file_bytes,
        shard_bytes=shard_bytes,
        tensor_bytes=max(4 * p.like.size // p.num_layers for p in parameters(config)),
        peak_bytes=peak_bytes,
        first_s=first_s,
        read_s=read_s,
        import_s=import_s,
    )


def _timed_from_disk(files: list[Path], work: Callable[[], T]) -> tuple[T, float]:
    drop(files)
    began_s = time.monotonic()
    done = work()
    return done, time.monotonic() - began_s


def drop(files: list[Path]) -> None:
    """From the page cache, so that the next read is the disk's."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read(files: list[Path]) -> int:
    """Reads them from the first byte to the last; returns how many there are."""
    buffer, count = bytearray(_BUFFER_BYTES), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while found := file.readinto(buffer):
                count += found
    return count


def _model(num_layers: int) -> TransformerConfig:
    shapes = preset("qwen3_0p6b", vocab_size=VOCAB_SIZE)
    return dataclasses.replace(shapes, num_layers=num_layers)


def _apart(work: Callable[[], T]) -> T:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(work).result()


def _status_bytes(key: str) -> int:
    """Of this process, from Linux: VmRSS what it has, VmHWM the most that it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
