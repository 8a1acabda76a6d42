"""`ControlTokens`: text to ids and back where some text stands for control tokens.

Invariants:
  * Control tokens come from the template, and from the policy where it sampled them. What others
    say, and what the policy spells with other tokens, is *quoted*: a mark with the control token's
    id stands for its letters, so that no template takes them for its own words, and `encode`
    writes them one by one. A tool that prints `<|im_end|>` ends no turn.
  * encode(quote(text)) has no control token, for every text.
  * Marks are made of Unicode noncharacters, which are replaced in what is quoted.

Who calls it: `chat_renderer`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as TokenizersBackend

from thundersync_jax.rollout.chat import Tokenizer, TokenizerError

_BEGIN, _END = "\ufdd2", "\ufdd3"
_QUOTED = re.compile(f"{_BEGIN}([0-9]+){_END}")
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_ELISION = "\n...\n"


class ControlTokens:
    """The special tokens of one tokenizer, and others that a template writes (<think>). What else
    was added to a vocabulary (in Gemma's runs of newlines, and tags of HTML) is text.

    Args:
      template: the chat template's source.

    Attributes:
      ids: of all of them. special_ids: of those that end, begin or pad.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._names = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        self.ids = frozenset(self._names)
        self.special_ids = frozenset(i for i in self.ids if added[i].special)
        self._ids_by_name = {name: token_id for token_id, name in self._names.items()}
        self._control = _any_of(self._names.values())
        self._special = _any_of(self._names[i] for i in self.special_ids)
        self._plain = _without_added_tokens(tokenizer.backend)
        self._letters = functools.cache(self._spell)

    def quote(self, text: str, but: Collection[str] = ()) -> str:
        """`text` with marks in place of its control tokens, `but` for these."""
        return self._control.sub(
            lambda found: (
                found[0] if found[0] in but else f"{_BEGIN}{self._ids_by_name[found[0]]}{_END}"
            ),
            _NONCHARACTERS.sub("\ufffd", text),
        )

    def quote_json(self, value: Any, but: Collection[str] = ()) -> Any:
        """A JSON value with every string in it quoted."""
        if isinstance(value, str):
            return self.quote(value, but)
        if isinstance(value, dict):
            return {self.quote(k, but): self.quote_json(v, but) for k, v in value.items()}
        return (
            [self.quote_json(v, but) for v in value] if isinstance(value, list | tuple) else value
        )

    def unquote(self, text: str) -> str:
        """Letters in place of marks."""
        return _QUOTED.sub(lambda found: self._names[int(found[1])], text)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a template's text, in which quoted parts are letters."""
        return tuple(token_id for token_id, _, _ in self._tokens(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of what was sampled: control tokens, and everything else quoted."""
        texts = []
        for is_control, run in itertools.groupby(token_ids, key=self.ids.__contains__):
            text = self._tokenizer.decode(tuple(run))
            texts.append(text if is_control else self.quote(text))
        return "".join(texts)

    def check_readable(self, quoted: str) -> None:
        """Raises TokenizerError where the ids of `quoted` do not say it: text would be lost. What
        the tokenizer normalizes, and white space that it adds before a text, is not lost.
        """
        for piece in itertools.chain(*map(self._control.split, _QUOTED.split(quoted)[::2])):
            ids = self._tokenizer.backend.encode(piece, add_special_tokens=False).ids
            said, read = map(self._normal, (piece, self._tokenizer.decode(ids)))
            if said != read:
                pairs = enumerate(zip(said, read, strict=False))
                short = min(len(said), len(read))
                at = next((i for i, (a, b) in pairs if a != b), short)
                raise TokenizerError(
                    f"the tokenizer loses text: its ids of {said[at : at + 40]!r} say "
                    f"{read[at : at + 40]!r}. Expected a tokenizer.json with the vocabulary, the "
                    "pre_tokenizer and the decoder of the model's: copy it again"
                )

    def _normal(self, text: str) -> str:
        """As the tokenizer reads it."""
        normalizer = self._tokenizer.backend.normalizer
        return normalizer.normalize_str(text.lstrip()) if normalizer else text.lstrip()

    def strip(self, text: str) -> str:
        """`text` without special tokens and surrounding whitespace."""
        return self._special.sub("", text).strip()

    def clip(self, text: str, max_tokens: int) -> str:
        """`text`, quoted, in at most `max_tokens` tokens: of a long one head and tail, in whole
        characters, around an elision; errors tend to be at the end. "" where no elision fits.
        """
        quoted = self.quote(text)
        tokens = self._tokens(quoted)
        if len(tokens) <= max_tokens:
            return quoted
        for room in range(max_tokens, -1, -1):
            begin, end = _middle(tokens, room)
            clipped = self.quote(text[:begin]) + _ELISION + self.quote(text[end:])
            if len(self._tokens(clipped)) <= max_tokens:
                return clipped
        return ""

    def _tokens(self, quoted: str) -> list[tuple[int, int, int]]:
        """Each id, and where the text that it stands for begins and ends in the unquoted text."""
        found, at = list[tuple[int, int, int]](), 0
        for place, piece in enumerate(_QUOTED.split(quoted)):  # ids of marks at odd places
            if place % 2:
                end = at + len(self._names[int(piece)])
                found += [(i, at, end) for i in self._letters(int(piece))]
            else:
                end = at + len(piece)
                it = self._tokenizer.backend.encode(piece, add_special_tokens=False)
                found += [(i, at + b, at + e) for i, (b, e) in zip(it.ids, it.offsets, strict=True)]
            at = end
        return found

    def _spell(self, token_id: int) -> tuple[int, ...]:
        """The letters of a control token."""
        name = self._names[token_id]
        letters = self._plain.encode(name, add_special_tokens=False).ids
        if not self.ids.isdisjoint(letters):
            raise TokenizerError(
                f"the tokenizer has no other ids for the letters of {name!r}, which were spelled, "
                "than the control token: change what the environment says"
            )
        return tuple(letters)


def _middle(tokens: Sequence[tuple[int, int, int]], room: int) -> tuple[int, int]:
    """Where the text begins and ends that lies between its first and its last tokens, `room` of
    them in all; what is several tokens is not cut, but left out.
    """
    head, tail = (room + 1) // 2, len(tokens) - room // 2
    while head and tokens[head][1] < tokens[head - 1][2]:
        head -= 1
    while tail < len(tokens) and tokens[tail][1] < tokens[tail - 1][2]:
        tail += 1
    return (
        tokens[head - 1][2] if head else 0,
        tokens[tail][1] if tail < len(tokens) else tokens[-1][2],
    )


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches each of `names`, the longest of those that begin alike; nothing without any."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _without_added_tokens(backend: TokenizersBackend) -> TokenizersBackend:
    described = json.loads(backend.to_str())
    return TokenizersBackend.from_str(
        json.dumps({**described, "added_tokens": [], "post_processor": None})
    )
