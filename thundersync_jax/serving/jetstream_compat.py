"""The only file that imports jetstream: google-jetstream 0.2.2, with or without TensorFlow.

What it does beside importing, each for a reason:
  * seqio serves JetStream's SentencePiece tokenizers, and pulls TensorFlow (3.2 GB). Where it is
    not installed, the two names that JetStream reads from it are stubbed.
  * `orchestrator.delete_pytree` calls `jax.tree_map`, which JAX removed in 0.6: it would kill a
    Driver's process at the first decode. It is replaced by one that does the same.
  * Importing the orchestrator sets the root logger to DEBUG on standard output; that is undone.
  * JetStream's server listens on every interface and makes its servicer by name: `make_server`
    gives it the loopback interface and another servicer.
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

import grpc
import jax

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


def _delete_arrays(tree: Any) -> None:
    """Frees a prefix that was inserted; its request would keep it to the end of the turn."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


_check_version()
_stub_seqio()
with _root_logger_kept():
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

orchestrator.delete_pytree = _delete_arrays


def make_server(driver: Any, servicer: type[Any], *, port: int, threads: int) -> Any:
    """JetStream's own server of `servicer(driver)` on 127.0.0.1:port, not started."""
    with _root_logger_kept():
        from jetstream.core import server_lib
    server_lib._HOST = "127.0.0.1"
    orchestrator.LLMOrchestrator = servicer
    return server_lib.JetStreamServer(driver, threads, port, grpc.insecure_server_credentials())


__all__ = [
    "JETSTREAM_VERSION",
    "engine_api",
    "jetstream_pb2",
    "jetstream_pb2_grpc",
    "make_server",
    "orchestrator",
    "tokenizer_api",
    "tokenizer_pb2",
]
