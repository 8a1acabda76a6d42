"""`TextStream`: the text of tokens as they come, in whole characters.

Invariants:
  * What `push` returned so far, with what `finish` returns, is the text of all tokens decoded at
    once, wherever they are cut.
  * Nothing that was returned changes later: the replacement characters at the end of a text, which
    stand for bytes of a character that is not whole yet, are held back.

A token's text may depend on the tokens around it, so a few that were returned are decoded again
with those that follow. Who calls it: whoever looks at text while it is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """One text.

    Args:
      decode: the text of token ids.
      open_ids: tokens whose text is only settled by a token that is none of them, as the bytes that
        some vocabularies fall back to: a run of them is decoded together.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], open_ids: Collection[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._open_ids = open_ids
        self._window: list[int] = []  # from the last token that stands for itself on
        self._num_shown = 0  # characters of the window's text

    def push(self, token_ids: Iterable[int]) -> str:
        """What is settled of the text with these tokens, beyond what was returned before."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def finish(self) -> str:
        """The rest: what may be half a character."""
        rest = self._decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return rest

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        if token_id in self._open_ids:
            return ""
        text = self._decode(self._window)
        settled = text.rstrip(_REPLACEMENT)
        new = settled[self._num_shown :]
        self._num_shown = max(self._num_shown, len(settled))
        alone = self._decode([token_id])
        if settled == text and alone and _REPLACEMENT not in alone:
            self._window, self._num_shown = [token_id], len(alone)
        return new
