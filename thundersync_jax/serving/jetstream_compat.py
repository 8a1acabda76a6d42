"""The only file that imports jetstream: google-jetstream 0.2.2, with or without TensorFlow.

What it does beside importing, each for a reason:
  * seqio serves JetStream's SentencePiece tokenizers, and pulls TensorFlow (3.2 GB). Where it is
    not installed, the two names that JetStream reads from it are stubbed.
  * `orchestrator.delete_pytree` calls `jax.tree_map`, which JAX removed in 0.6: it would kill a
    Driver's process at the first decode. Buffers are freed by their last reference instead.
  * Importing the orchestrator sets the root logger to DEBUG on standard output; that is undone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

from thundersync_jax.errors import UserError

JETSTREAM_VERSION = "0.2.2"
_REMEDY = "Run launch/setup.sh, which installs google-jetstream without TensorFlow."


class JetStreamMissingError(UserError, ImportError):
    """google-jetstream is not installed, or is another version."""


def _check_version() -> None:
    try:
        version = importlib.metadata.version("google-jetstream")
    except importlib.metadata.PackageNotFoundError:
        raise JetStreamMissingError(
            f"google-jetstream {JETSTREAM_VERSION} is missing. {_REMEDY}"
        ) from None
    if version != JETSTREAM_VERSION:
        raise JetStreamMissingError(
            f"google-jetstream is {version}, expected {JETSTREAM_VERSION}: other versions have "
            f"another Engine interface. {_REMEDY}"
        )


def _stub_seqio() -> None:
    """Provides the two names that JetStream imports from seqio.vocabularies, unless it is there."""
    if "seqio" in sys.modules or importlib.util.find_spec("seqio") is not None:
        return
    vocabularies: Any = types.ModuleType("seqio.vocabularies")
    vocabularies.Vocabulary = type("Vocabulary", (), {})
    vocabularies.SentencePieceVocabulary = type(
        "SentencePieceVocabulary", (vocabularies.Vocabulary,), {}
    )
    seqio: Any = types.ModuleType("seqio")
    seqio.vocabularies = vocabularies
    sys.modules.update({"seqio": seqio, "seqio.vocabularies": vocabularies})


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _keep_until_unreferenced(_: Any) -> None:
    """Stands in for `delete_pytree`."""


_check_version()
_stub_seqio()
with _root_logger_kept():
    from jetstream.core import orchestrator
    from jetstream.engine import engine_api, tokenizer_pb2

orchestrator.delete_pytree = _keep_until_unreferenced

__all__ = ["JETSTREAM_VERSION", "engine_api", "orchestrator", "tokenizer_pb2"]
