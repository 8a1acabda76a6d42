"""Text to token ids and back, over the `tokenizers` library.

Invariants:
  * Text that the vocabulary cannot express raises, naming the text; nothing becomes an unknown
    token.
  * Only prompts and observations are encoded. What the policy sampled stays ids; its decoded text
    is for parsers and people and never comes back here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizersBackend

from thundersync_jax.errors import UserError
from thundersync_jax.transport.text_stream import TextStream

BOS = "<bos>"
EOS = "<eos>"
_UNKNOWN = "<unknown>"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class TokenizerError(UserError, ValueError):
    """A vocabulary that cannot work, or text or ids outside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A vocabulary with its two control tokens.

    Attributes:
      backend: what splits and looks up.
      vocab_size: ids are 0 to vocab_size - 1.
      bos_id: opens a prompt; None where nothing does.
      eos_id: ends a turn.
      unknown_id: the id by which `backend` says that it does not know a text; None when it knows
        all.
      unused_text: what an id beyond the vocabulary is in a text, for models whose vocabulary is
        padded; None refuses such ids.
    """

    backend: TokenizersBackend
    vocab_size: int
    bos_id: int | None
    eos_id: int
    unknown_id: int | None = None
    unused_text: str | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids."""
        described = f"{self.vocab_size} {self.bos_id} {self.eos_id} {self.backend.to_str()}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text`, nothing added; raises TokenizerError naming what is unknown."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        if self.unknown_id in encoding.ids:
            start, end = encoding.offsets[encoding.ids.index(self.unknown_id)]
            raise TokenizerError(
                f"{text[start:end]!r} is not one of the {self.vocab_size} words of the vocabulary. "
                "Prompts and observations consist of its words, one a line: put newlines between "
                "them, or add this one to the vocabulary"
            )
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, control tokens included."""
        outside = [i for i in token_ids if not 0 <= i < self.vocab_size]
        if outside and self.unused_text is None:
            raise TokenizerError(
                f"token ids {outside[:4]} are not below vocab_size = {self.vocab_size}: "
                "the model's vocabulary is larger than its tokenizer's. Set "
                f"config.model.vocab_size to 0 or {self.vocab_size}"
            )
        return "".join(
            self.backend.decode(list(run), skip_special_tokens=False)
            if is_known
            else str(self.unused_text) * len(list(run))
            for is_known, run in itertools.groupby(
                token_ids, key=lambda token_id: 0 <= token_id < self.vocab_size
            )
        )

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Single bytes, for characters that the vocabulary lacks; a run of them is one text."""
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        return frozenset(i for token, i in vocabulary.items() if _BYTE.fullmatch(token))

    def text_stream(self) -> TextStream:
        """The text of tokens as they come."""
        return TextStream(self.decode, self.byte_ids)


def word_tokenizer(vocabulary: Sequence[str]) -> Tokenizer:
    """One token for each word of `vocabulary`; in text every word stands on its own line.

    Decoded text ends with a newline, so that the texts of consecutive pieces may be joined.
    """
    duplicates = [word for word, count in collections.Counter(vocabulary).items() if count > 1]
    if duplicates:
        raise TokenizerError(
            f"the vocabulary has {duplicates[:4]} more than once: list every word once"
        )
    broken = [word for word in vocabulary if not word or "\n" in word or word == _UNKNOWN]
    if broken:
        raise TokenizerError(
            f"the vocabulary has {broken[:4]}: a word is one whole line of text, so it is not "
            f"empty and has no newline, and it is not {_UNKNOWN!r}. Split or rename these words"
        )
    if tuple(vocabulary[:2]) != (BOS, EOS):
        raise TokenizerError(
            f"the vocabulary begins with {list(vocabulary[:2])}: put {BOS!r} and {EOS!r} first"
        )
    ids = {word: i for i, word in enumerate((*vocabulary, _UNKNOWN))}
    backend = TokenizersBackend(models.WordLevel(ids, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    backend.decoder = decoders.Replace(Regex("$"), "\n")
    return Tokenizer(
        backend=backend,
        vocab_size=len(vocabulary),
        bos_id=ids[BOS],
        eos_id=ids[EOS],
        unknown_id=ids[_UNKNOWN],
    )
