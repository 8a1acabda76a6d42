"""Text of tokens as they come: in the end all of it, and never half a character."""

from __future__ import annotations

import functools

import pytest
from chat_models import bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.rollout.chat import Tokenizer, word_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "words":
        return word_tokenizer(("<bos>", "<eos>", "a", "ü", "two words"))
    backend = bpe(kind)
    return Tokenizer(
        backend=backend,
        vocab_size=backend.get_vocab_size(),
        bos_id=None,
        eos_id=0,
        unused_text="\ufffd",
    )


KINDS = pytest.mark.parametrize("kind", ["words", "qwen3", "llama3", "gemma"])


@KINDS
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_pieces_join_to_the_text_of_all_tokens_for_every_cut(kind: str, data: st.DataObject):
    """Of any tokens, also such as are no text: lone bytes, control tokens, unused ids."""
    it = tokenizer(kind)
    most = it.vocab_size - 1 if kind == "words" else it.vocab_size + 1
    ids = data.draw(st.lists(st.integers(0, most) | st.sampled_from(sorted(it.byte_ids) or [0])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    stream, pieces = it.text_stream(), []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pieces.append(stream.push(ids[begin:end]))
    assert "".join(pieces) + stream.finish() == it.decode(ids)


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "gemma"])
@settings(deadline=None, max_examples=200)
@given(text=TEXTS)
def test_text_never_shows_half_a_character(kind: str, text: str):
    """Nor does it wait longer than the character's last token, but for bytes that go on."""
    it = tokenizer(kind)
    stream, shown = it.text_stream(), ""
    ids = it.encode(text)
    for at, token_id in enumerate(ids):
        shown += stream.push([token_id])
        assert text.startswith(shown.removesuffix("\ufffd") if "\ufffd" in text else shown)
        if not it.byte_ids and "\ufffd" not in text:
            assert shown == it.decode(ids[: at + 1]).rstrip("\ufffd")
    assert shown + stream.finish() == text
