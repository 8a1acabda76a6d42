"""`ControlTokens`: text to ids and back where some text stands for control tokens.

Invariants:
  * Control tokens come from the template and from the policy. What an environment says is quoted:
    a tool that prints `<|im_end|>` ends no turn, for its letters are encoded one by one.
  * encode(quote(text)) has no control token, for every text.
  * Quotation marks and place marks are Unicode noncharacters; in quoted text they are replaced.

Who calls it: `chat_renderer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer as TokenizersBackend

from thundersync_jax.rollout.chat import Tokenizer, TokenizerError

_BEGIN, _END = "\ufdd2", "\ufdd3"
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
        control = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        self.ids = frozenset(control)
        self.special_ids = frozenset(i for i in control if added[i].special)
        self._control = _any_of(control.values())
        self._special = _any_of(control[i] for i in self.special_ids)
        self._plain = _without_added_tokens(tokenizer.backend)

    def quote(self, text: str) -> str:
        """`text` with its control tokens marked as letters."""
        return self._control.sub(lambda found: f"{_BEGIN}{found[0]}{_END}", without_marks(text))

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a template's text, in which quoted parts are letters."""
        ids: list[int] = []
        for piece in re.split(f"({_BEGIN}.*?{_END})", text, flags=re.DOTALL):
            if piece.startswith(_BEGIN):
                letters = self._plain.encode(piece[1:-1], add_special_tokens=False).ids
                if not self.ids.isdisjoint(letters):
                    raise TokenizerError(
                        f"the tokenizer has no other ids for the letters of {piece[1:-1]!r}, which "
                        "an environment said, than the control token: change what it says"
                    )
                ids += letters
            elif piece:
                ids += self._tokenizer.encode(piece)
        return tuple(ids)

    def strip(self, text: str) -> str:
        """`text` without special tokens and surrounding whitespace."""
        return self._special.sub("", text).strip()

    def clip(self, text: str, max_tokens: int) -> str:
        """The head and the tail of a long text, of `max_tokens` tokens together, in whole
        characters; errors tend to be at the end.
        """
        offsets = self._tokenizer.backend.encode(text, add_special_tokens=False).offsets
        if len(offsets) <= max_tokens:
            return text
        num_head = (max_tokens + 1) // 2
        num_tail = max_tokens - num_head
        tail = text[offsets[-num_tail][0] :] if num_tail else ""
        return text[: offsets[num_head - 1][1]] + _ELISION + tail


def without_marks(text: str) -> str:
    """`text` without what could be taken for a mark of this package."""
    return _NONCHARACTERS.sub("\ufffd", text)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches each of `names`, the longest of those that begin alike; nothing without any."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _without_added_tokens(backend: TokenizersBackend) -> TokenizersBackend:
    described = json.loads(backend.to_str())
    return TokenizersBackend.from_str(
        json.dumps({**described, "added_tokens": [], "post_processor": None})
    )
