"""Freed blocks are used again without a page fault."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import sys
import numpy as np
from thundersync_jax.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = keep_freed_memory()
faults()
print(kept, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize(("platform", "is_kept"), [("cpu", True), ("tpu", False)])
def test_only_a_process_that_computes_on_the_cpu_keeps_what_it_frees(platform, is_kept):
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60
    )
    kept, faults = done.stdout.split()
    assert (kept == "True") == is_kept
    assert (int(faults) < 100) == is_kept
