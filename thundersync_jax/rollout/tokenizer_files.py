"""Reads the tokenizer of a Hugging Face directory: tokenizer.json, and what says how it is used.

    tokenizer.json              the vocabulary, for the `tokenizers` library
    tokenizer_config.json       which tokens are special, and often the chat template
    chat_template.jinja         the template, where it is a file of its own: it goes first
    generation_config.json      ids that end a turn, if there is one

What is missing or does not fit is a `TokenizerError` that names the file. Only read; who calls it:
`renderer.load_renderer`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizersBackend
from tokenizers import models

from thundersync_jax.rollout.chat import BOS, EOS, Tokenizer, TokenizerError, word_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_GENERATION = "generation_config.json"
_TOOL_TEMPLATE = "tool_use"  # of a directory with several templates, the one for tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a directory says of its tokenizer.

    Attributes:
      special_tokens: "bos_token" and its like, by name.
      end_ids: tokens that end a turn.
      template: the chat template, "" without one; template_name: the file that it is in.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    end_ids: frozenset[int]
    template: str
    template_name: str

    @property
    def template_fingerprint(self) -> str:
        """Equal for templates that say the same with the same tokens, and the same ends."""
        described = repr((self.template, sorted(self.special_tokens.items()), sorted(self.end_ids)))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def has_words(self) -> bool:
        """It is a vocabulary of words, as of policies that are trained from scratch."""
        return isinstance(self.tokenizer.backend.model, models.WordLevel)


def read_tokenizer_files(root: Path) -> TokenizerFiles:
    """Raises TokenizerError for a directory without a tokenizer, or with files that disagree."""
    path = root / "tokenizer.json"
    if not path.is_file():
        lack = "has no tokenizer.json" if root.is_dir() else "does not exist"
        raise TokenizerError(
            f"{root} {lack}: expected the directory of a Hugging Face model, as `save_pretrained` "
            "of a fast tokenizer writes it, or import_gguf"
        )
    try:
        backend = TokenizersBackend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise TokenizerError(
            f"{path} cannot be read by `tokenizers` ({error}): copy it again, or update the library"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    settings = _json(root / _CONFIG)
    special = _special_tokens(_json(root / _SPECIAL) | settings)
    used = [name for name in ("bos_token", "eos_token") if name in special]
    ids = {name: _id_of(backend, special[name], name, root) for name in used}
    if "eos_token" not in ids:
        raise TokenizerError(
            f"{root / _CONFIG} names no eos_token: expected the token that ends a text"
        )
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    template, name = _template(root, settings)
    if isinstance(backend.model, models.WordLevel):
        vocabulary = backend.get_vocab(with_added_tokens=False)
        tokenizer = word_tokenizer(sorted(vocabulary, key=lambda word: vocabulary[word]))
    else:
        tokenizer = Tokenizer(
            backend=backend,
            vocab_size=vocab_size,
            bos_id=ids.get("bos_token"),
            eos_id=ids["eos_token"],
            unused_text="\ufffd",
        )
    return TokenizerFiles(
        tokenizer=tokenizer,
        special_tokens=special,
        end_ids=_end_ids(root, vocab_size) | {ids["eos_token"]},
        template=template,
        template_name=name,
    )


def copy_tokenizer_files(root: Path, to: Path) -> None:
    """Copies a directory's tokenizer and template, whatever form they have there."""
    for name in ("tokenizer.json", _CONFIG, _SPECIAL, TEMPLATE_FILE, _GENERATION):
        if (root / name).is_file():
            shutil.copyfile(root / name, to / name)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The entries "*_token", which are strings or objects with a content."""
    found = {}
    for name, value in settings.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _id_of(backend: TokenizersBackend, token: str, name: str, root: Path) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise TokenizerError(
            f"{root / _CONFIG} names the {name} {token!r}, and tokenizer.json has no such token: "
            "take both from the same model"
        )
    return token_id


def _end_ids(root: Path, vocab_size: int) -> frozenset[int]:
    path = root / _GENERATION
    value = _json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    outside = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if outside:
        raise TokenizerError(
            f"{path} names the eos_token_id {outside[0]!r}: expected null, or one or a list of "
            f"tokenizer.json's ids, which are below {vocab_size}. Take both from the same model"
        )
    return frozenset(ids)


def _template(root: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The template and where it is: a file, the one of the settings, or of several the best."""
    path = root / TEMPLATE_FILE
    if path.is_file():
        return _text(path), str(path)
    found, name = settings.get("chat_template"), f"the chat_template in {root / _CONFIG}"
    if isinstance(found, list):
        by_name = {
            entry["name"]: entry.get("template")
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        found = by_name.get(_TOOL_TEMPLATE, by_name.get("default"))
    return (found if isinstance(found, str) else ""), name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path}: expected a text in UTF-8 ({error}); copy it again, or save it in UTF-8"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; {} for a file that is not there."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path}: expected a JSON object of a Hugging Face tokenizer ({error}); copy it again"
        ) from error
    return value


def write_words(tokenizer: Tokenizer, to: Path, max_context: int) -> None:
    """Writes a word tokenizer, with as many ids as its model has."""
    content = json.loads(tokenizer.backend.to_str())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {w: i for w, i in words.items() if i < tokenizer.vocab_size}
    (to / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_context,
    }
    (to / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
