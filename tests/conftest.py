"""One CPU device; programs compiled once a session are shared by its tests through a persistent
cache. Theorems do not depend on how well machine code is optimized, which takes half of the time to
compile: files marked `optimized`, and the slow tests, have programs as they run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"

import pytest

# Workers take whole files (launch/test.sh): these first, or one worker ends long after the others.
LONGEST = (
    *("train", "programs", "objective_streaming", "learner", "exact_reduction", "distiller"),
    *("opd_run", "reference_run", "residuals", "turn_replay", "mesh", "attention", "packing"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Unoptimized code is made twice as fast without the emitters that are meant to optimize it."""
    flags, faster = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"
    if config.option.markexpr == "not slow" and faster not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {faster}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}.py": at for at, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (
            rank.get(item.path.name, len(rank)),
            item.get_closest_marker("optimized") is None,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from thundersync_jax.learner.compilation import enable_persistent_cache

    enable_persistent_cache(tmp_path_factory.mktemp("compile_cache"))
    yield


@pytest.fixture(scope="module", autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    """In this process and those that tests start."""
    import jax

    is_slow_too = request.config.option.markexpr != "not slow"
    is_optimized = is_slow_too or request.node.get_closest_marker("optimized") is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not is_optimized)))
        if jax.config.values["jax_disable_most_optimizations"] == is_optimized:
            jax.clear_caches()  # what is compiled already does not see the setting
        jax.config.update("jax_disable_most_optimizations", not is_optimized)
        yield
