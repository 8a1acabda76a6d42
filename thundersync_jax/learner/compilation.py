"""Ahead-of-time compilation: in parallel, through the persistent cache, and counted."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def configure(cache: Path, *, is_float64: bool = False) -> None:
    """Settings of the whole process, before the first array: 64-bit numbers, compiled programs."""
    jax.config.update("jax_enable_x64", is_float64)
    enable_persistent_cache(cache)


def enable_persistent_cache(directory: Path) -> None:
    """Keeps compiled programs in `directory`, so that a resumed run loads them."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
