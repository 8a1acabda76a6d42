"""Programs are compiled by a process of their own, and a failure there costs only time."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from thundersync_jax.learner.compilation import (
    compile_apart,
    enable_persistent_cache,
    temporary_cache,
)

HITS, MISSES = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


def program(scale: float) -> jax.stages.Compiled:
    return jax.jit(lambda x: jnp.tanh(x @ x) * scale).lower(jnp.ones((7, 7))).compile()


def warm_up(scale: float, marks: Path) -> None:
    (marks / str(os.getpid())).touch()
    program(scale)


def warm_up_half(scale: float, marks: Path) -> None:
    warm_up(scale, marks)
    raise MemoryError("refused")


@pytest.fixture
def events():
    counts: dict[str, int] = {HITS: 0, MISSES: 0}

    def listen(event: str, **_):
        counts[event] = counts.get(event, 0) + 1

    jax.monitoring.register_event_listener(listen)
    yield counts
    jax.monitoring.unregister_event_listener(listen)


def test_what_a_process_of_its_own_compiled_is_loaded_here(events, tmp_path: Path):
    with temporary_cache():
        compile_apart(warm_up, 3.0, tmp_path)
        (pid,) = tmp_path.iterdir()
        assert int(pid.name) != os.getpid()
        before = dict(events)
        program(3.0)
        assert events[HITS] > before[HITS]
        assert events[MISSES] == before[MISSES]
        compile_apart(warm_up, 4.0, tmp_path)  # filled: a resumed run
        assert len(list(tmp_path.iterdir())) == 1


def test_a_copied_directory_keeps_its_programs(events, tmp_path: Path):
    """Wherever a work directory lies: nothing of its path is in the programs' keys."""
    with temporary_cache():  # which comes back at the end
        enable_persistent_cache(tmp_path / "here")
        program(6.0)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        enable_persistent_cache(tmp_path / "there")
        before = dict(events)
        program(6.0)
        assert events[HITS] > before[HITS]
        assert events[MISSES] == before[MISSES]


def test_a_cache_that_was_not_filled_to_the_end_is_filled_again(events, tmp_path: Path):
    with temporary_cache():
        compile_apart(warm_up_half, 3.0, tmp_path)
        compile_apart(warm_up, 3.0, tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
        compile_apart(warm_up, 3.0, tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


def kill_itself(_: float, marks: Path) -> None:
    (marks / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named_and_its_work_left_to_this_one(tmp_path: Path, caplog):
    with temporary_cache():
        compile_apart(kill_itself, 3.0, tmp_path)
        assert "ended with exit code -9: compiling here" in caplog.text
        program(3.0)


def test_float64_programs_are_compiled_as_such(events, tmp_path: Path):
    with jax.enable_x64(True), temporary_cache():
        compile_apart(warm_up, 5.0, tmp_path)
        before = dict(events)
        program(5.0)
        assert events[HITS] > before[HITS]
        assert events[MISSES] == before[MISSES]
