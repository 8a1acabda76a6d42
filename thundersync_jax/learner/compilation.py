"""Ahead-of-time compilation: in parallel, through the persistent cache, and counted.

Where XLA computes on the CPU, an empty cache is filled by a process of its own. Compiling leaves
the heap in pieces (570 MB in 140,000 of them for the learner's benchmark) and the CPU back-end
allocates on every call: a quickstart step takes a quarter longer in a process that compiled.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def configure(cache: Path, *, is_float64: bool = False) -> None:
    """Settings of the whole process, before the first array: 64-bit numbers, compiled programs."""
    jax.config.update("jax_enable_x64", is_float64)
    enable_persistent_cache(cache)


def enable_persistent_cache(directory: Path | None) -> None:
    """Keeps compiled programs in `directory`, so that a resumed run loads them; None: nowhere."""
    compilation_cache.reset_cache()  # JAX takes the directory that it first met otherwise
    jax.config.update("jax_compilation_cache_dir", None if directory is None else str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own caches enter a program's key with their path: a copy would compile everything again.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


@contextlib.contextmanager
def temporary_cache() -> Iterator[None]:
    """A persistent cache for as long as the context lasts."""
    before = _setting("jax_compilation_cache_dir")
    with tempfile.TemporaryDirectory() as directory:
        enable_persistent_cache(Path(directory))
        try:
            yield
        finally:
            enable_persistent_cache(None if before is None else Path(before))


def compile_apart(warm_up: Callable[..., object], *args: Any) -> None:
    """Runs `warm_up(*args)` in a process of its own where that pays: CPU, a cache not yet filled.

    What that process does not compile, or fails at, is left to this one. The process imports the
    main module, as all that multiprocessing spawns: scripts need `if __name__ == "__main__"`.
    """
    cache = Path(_setting("jax_compilation_cache_dir"))
    filled = cache / "filled"
    if jax.default_backend() != "cpu" or filled.exists():
        return
    settings = functools.partial(configure, cache, is_float64=_setting("jax_enable_x64"))
    process = multiprocessing.get_context("spawn").Process(
        target=_fill_cache, args=(settings, warm_up, args, filled), daemon=True
    )
    process.start()
    process.join()
    if process.exitcode:
        logging.warning(
            "the process that compiles ended with exit code %d: compiling here, after which steps "
            "are slower",
            process.exitcode,
        )


def _fill_cache(
    settings: Callable[[], None], warm_up: Callable[..., object], args: Sequence[Any], filled: Path
) -> None:
    _end_with_parent()
    settings()
    with contextlib.suppress(Exception):  # the process that waits meets the same, and reports it
        warm_up(*args)
        filled.touch()


def _end_with_parent() -> None:
    """However the process that waits ends, a kill included, this one ends too (Linux)."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before this one got here
        os._exit(1)


def _setting(name: str) -> Any:
    return jax.config.values[name]


class CompileCounter:
    """Counts the programs that this process compiles or loads from the cache, from `start` to
    `close`.
    """

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


def compile_all(
    lowerings: Mapping[Any, Callable[[], jax.stages.Lowered]],
) -> dict[Any, jax.stages.Compiled]:
    """Lowers and compiles every program, one thread a core; raises the first error."""

    def build(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        return lower().compile()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as executor:
        futures = {name: executor.submit(build, lower) for name, lower in lowerings.items()}
        return {name: future.result() for name, future in futures.items()}
