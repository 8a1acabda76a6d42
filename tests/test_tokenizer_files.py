"""A Hugging Face directory's tokenizer: what is read of it, and what is refused by its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATES, write_tokenizer
from test_chat import GuessSuite

from thundersync_jax.config_chat import ChatSection
from thundersync_jax.rollout.chat import TokenizerError
from thundersync_jax.rollout.chat_renderer import make_renderer
from thundersync_jax.rollout.chat_template import ChatTemplateError
from thundersync_jax.rollout.tokenizer_files import copy_tokenizer_files, read_tokenizer_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model", "llama3")


def write(path: Path, value: Any) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def change(directory: Path, **settings: Any) -> None:
    path = directory / "tokenizer_config.json"
    write(path, json.loads(path.read_text()) | settings)


def test_control_tokens_and_ends_are_those_of_the_files(directory: Path):
    write(directory / "generation_config.json", {"eos_token_id": [1, 3]})
    files = read_tokenizer_files(directory)
    it = files.tokenizer
    assert it.decode([it.bos_id, it.eos_id]) == "<|begin_of_text|><|eot_id|>"
    assert files.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    assert files.end_ids == {1, 2, 3} and it.eos_id == 2
    assert it.vocab_size == max(it.backend.get_vocab().values()) + 1


def test_ids_that_the_model_has_beyond_the_tokenizer_are_no_text(directory: Path):
    """Models pad their vocabularies: what is sampled there is shown, and breaks nothing."""
    it = read_tokenizer_files(directory).tokenizer
    (a,) = it.encode("a")
    assert it.decode([a, it.vocab_size, it.vocab_size + 9, a]) == "a\ufffd\ufffda"


def template_of(directory: Path) -> str:
    return read_tokenizer_files(directory).template


def test_the_template_is_a_file_or_in_the_settings_or_the_one_for_tools(directory: Path):
    change(directory, chat_template="other")
    assert template_of(directory) == TEMPLATES["llama3"]
    (directory / "chat_template.jinja").unlink()
    assert template_of(directory) == "other"
    several = [{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}]
    change(directory, chat_template=several)
    assert template_of(directory) == "one"
    change(directory, chat_template=[*several, {"name": "tool_use", "template": "three"}])
    assert template_of(directory) == "three"


def test_a_copy_speaks_like_the_original(directory: Path, tmp_path: Path):
    (tmp_path / "copy").mkdir()
    copy_tokenizer_files(directory, tmp_path / "copy")
    copy, original = map(read_tokenizer_files, (tmp_path / "copy", directory))
    assert copy.tokenizer.fingerprint == original.tokenizer.fingerprint
    assert (copy.template, copy.special_tokens) == (original.template, original.special_tokens)


def test_a_template_has_a_fingerprint_of_all_that_shapes_its_text(directory: Path):
    """Beside the tokenizer's own, which policies and their teachers share."""
    found = {read_tokenizer_files(directory).template_fingerprint}
    tokenizer = read_tokenizer_files(directory).tokenizer.fingerprint
    assert found == {read_tokenizer_files(directory).template_fingerprint}
    template = directory / "chat_template.jinja"
    for change_one in (
        lambda: write(template, TEMPLATES["llama3"] + "{# #}"),
        lambda: change(directory, unk_token="<|eom_id|>"),
        lambda: write(directory / "generation_config.json", {"eos_token_id": 3}),
    ):
        change_one()
        found.add(read_tokenizer_files(directory).template_fingerprint)
    assert len(found) == 4
    assert read_tokenizer_files(directory).tokenizer.fingerprint == tokenizer


def test_an_end_that_is_null_leaves_the_tokenizers_own(directory: Path):
    write(directory / "generation_config.json", {"eos_token_id": None})
    assert read_tokenizer_files(directory).end_ids == {2}


def test_a_template_that_is_no_text_is_refused(directory: Path):
    (directory / "chat_template.jinja").write_bytes("{{ 'ü' }}".encode("latin-1"))
    with pytest.raises(TokenizerError, match=r"chat_template.jinja: expected a text in UTF-8"):
        read_tokenizer_files(directory)


def test_a_missing_template_is_refused(directory: Path):
    (directory / "chat_template.jinja").unlink()
    message = r"chat_template in .*tokenizer_config.json is missing: expected a chat template there"
    with pytest.raises(ChatTemplateError, match=message):
        make_renderer(GuessSuite(), ChatSection(tokenizer=str(directory)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json: expected the directory"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read by `tokenizers`"),
        ("tokenizer_config.json", None, "names no eos_token: expected the token that ends a text"),
        ("tokenizer_config.json", "[]", "expected a JSON object .*it is a list"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "eos_token '<end>', and tokenizer.json"),
        ("generation_config.json", {"eos_token_id": [1, 9999]}, "eos_token_id 9999: .* below"),
        (
            "generation_config.json",
            {"eos_token_id": "x"},
            "names the eos_token_id 'x': expected nu",
        ),
        ("generation_config.json", {"eos_token_id": [[1]]}, r"names the eos_token_id \[1\]: expec"),
        (
            "generation_config.json",
            {"eos_token_id": {}},
            "names the eos_token_id {}: expected null",
        ),
        ("generation_config.json", {"eos_token_id": True}, "names the eos_token_id True: expected"),
    ],
)
def test_files_that_are_missing_or_disagree_are_refused_by_name(
    name: str, content: Any, message: str, directory: Path
):
    if content is None:
        (directory / name).unlink()
    else:
        write(directory / name, content)
    with pytest.raises(TokenizerError, match=message):
        read_tokenizer_files(directory)
