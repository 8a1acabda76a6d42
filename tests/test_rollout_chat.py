"""Text, ids and tool calls."""

from __future__ import annotations

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.rollout.chat import TokenizerError, word_tokenizer
from thundersync_jax.rollout.tool_calls import parse_command_line
from thundersync_jax.trajectory import ToolCall

SENTENCES = ("<bos>", "<eos>", "probe 3", "hi", " padded ", "tab\tword", "ümlaut", "a.b,c")
TOKENIZER = word_tokenizer(SENTENCES)


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, len(SENTENCES) - 1)))
def test_ids_survive_text(token_ids: list[int]) -> None:
    text = TOKENIZER.decode(token_ids)
    assert TOKENIZER.encode(text) == tuple(token_ids)
    assert text == "".join(SENTENCES[i] + "\n" for i in token_ids)


def test_the_texts_of_pieces_join() -> None:
    assert TOKENIZER.decode([2]) + TOKENIZER.decode([3]) == TOKENIZER.decode([2, 3])


def test_ids_are_the_places_in_the_vocabulary() -> None:
    assert (TOKENIZER.vocab_size, TOKENIZER.bos_id, TOKENIZER.eos_id) == (8, 0, 1)
    assert TOKENIZER.encode("hi\n\nprobe 3") == (3, 2)
    assert TOKENIZER.encode("") == ()


@pytest.mark.parametrize("text", ["hi\nho", "ho", "<unknown>", "hi "])
def test_unknown_text_raises_with_its_name(text: str) -> None:
    with pytest.raises(
        TokenizerError, match=r"'(ho|<unknown>|hi )' is not one of the 8 words.*one a line"
    ):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("token_id", [8, -1])
def test_ids_outside_the_vocabulary_raise(token_id: int) -> None:
    with pytest.raises(
        TokenizerError, match=rf"\[{token_id}\] are not below vocab_size = 8.*to 0 or 8"
    ):
        TOKENIZER.decode([0, token_id])


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ((), r"begins with \[\]"),
        (("a", "b"), r"begins with \['a', 'b'\]: put '<bos>' and '<eos>' first"),
        (("<bos>", "<eos>", "a", "a"), r"\['a'\] more than once: list every word once"),
        (("<bos>", "<eos>", ""), r"\[''\]: a word is one whole line"),
        (("<bos>", "<eos>", "a\nb"), "has no newline.*Split or rename"),
        (("<bos>", "<eos>", "<unknown>"), "is not '<unknown>'"),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused(
    vocabulary: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        word_tokenizer(vocabulary)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("probe 3", ToolCall(name="probe", arguments=("3",))),
        ("say\n3\n<eos>\n", ToolCall(name="say", arguments=("3",))),
        ("<|im_start|>ls -l 'a b'<|im_end|>", ToolCall(name="ls", arguments=("-l", "a b"))),
        ("echo # no comment", ToolCall(name="echo", arguments=("#", "no", "comment"))),
        ("stop", ToolCall(name="stop")),
        ("'unclosed", None),
        ("<eos>", None),
        ("", None),
    ],
)
def test_command_lines(text: str, expected: ToolCall | None) -> None:
    assert parse_command_line(text) == expected


@settings(deadline=None)
@given(text=st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    call = parse_command_line(text)
    assert call is None or isinstance(call.name, str)


def test_the_fakes_vocabulary_is_one() -> None:
    assert fakes.tokenizer().encode("say\n3") == fakes.ids("say 3")
