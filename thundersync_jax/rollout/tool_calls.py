"""Parses the policy's text into a tool call. Pure; called once a turn."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from thundersync_jax.trajectory import ToolCall

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")


def strip_special_tokens(text: str, special_tokens: Collection[str] = SPECIAL_TOKENS) -> str:
    """What the policy said, without control tokens and surrounding whitespace."""
    for token in special_tokens:
        text = text.replace(token, " ")
    return text.strip()


def parse_command_line(
    text: str, special_tokens: Collection[str] = SPECIAL_TOKENS
) -> ToolCall | None:
    """Reads `text` as one command: a name and its arguments, split and quoted as in a shell.

    Newlines separate words like blanks do. Returns None for text that is empty or ends inside a
    quotation.
    """
    try:
        words = shlex.split(strip_special_tokens(text, special_tokens))
    except ValueError:
        return None
    return ToolCall(name=words[0], arguments=tuple(words[1:])) if words else None
