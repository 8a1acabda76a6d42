"""One CPU device; programs compiled once a session are shared by its tests through a persistent
cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"

import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from thundersync_jax.learner.compilation import enable_persistent_cache

    enable_persistent_cache(tmp_path_factory.mktemp("compile_cache"))
    yield
