"""What a policy reads and says: from an environment's text to token ids, and from ids to actions.

A `Renderer` belongs to a run, a `Conversation` to an attempt. There are two kinds: `WordRenderer`
for policies that are trained from scratch on an environment's vocabulary, and, in
`chat_renderer.py`, `ChatRenderer` for models with a tokenizer and a chat template of their own.

Invariants, of both:
  * All attempts at a task share `prompt_ids`; a conversation's ids follow them.
  * What the policy sampled is never encoded again: a `Reply` holds what comes after it. Only a
    reply that `is_rewritten` begins anew after the prompt.

Who calls it: a main makes the renderer; `agent.Agent` leads the conversation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from thundersync_jax.envs.base import Action, EnvironmentSuite, Observation
from thundersync_jax.errors import ConfigError
from thundersync_jax.factory import user_code
from thundersync_jax.rollout.chat import Tokenizer, word_tokenizer
from thundersync_jax.rollout.tool_calls import parse_command_line
from thundersync_jax.trajectory import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy reads next.

    Attributes:
      token_ids: follow what was sampled last.
      is_rewritten: they follow the prompt instead, and say all that happened since in the words of
        the template.
    """

    token_ids: tuple[int, ...]
    is_rewritten: bool = False


class Conversation(Protocol):
    """One attempt's, from its prompt on."""

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """What follows the prompt before the first turn."""
        ...

    def hear(self, token_ids: tuple[int, ...]) -> Action:
        """What the policy said in a turn. Malformed tool calls are an action, not an exception."""
        ...

    def answer(self, observation: Observation, max_tokens: int) -> Reply:
        """What the policy reads of an observation, of whose own text at most `max_tokens`."""
        ...


class Renderer(Protocol):
    """Leads the conversations of one run's policy.

    Attributes:
      stop_ids: each ends a turn.
      template_fingerprint: equal for templates that read and write alike; "" without one.
      rewrites_history: a conversation may have a reply that `is_rewritten`.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def template_fingerprint(self) -> str: ...

    @property
    def rewrites_history(self) -> bool: ...

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """What every attempt at `task` starts from."""
        ...

    def check(self, task: Task) -> None:
        """Raises UserError where the policy would not read what the suite says of `task`."""
        ...

    def begin(self, task: Task) -> Conversation:
        """A new attempt's conversation."""
        ...


class WordRenderer:
    """Speaks the words of a suite's vocabulary, one token each; an action is a command line."""

    template_fingerprint = ""
    rewrites_history = False

    def __init__(self, suite: EnvironmentSuite) -> None:
        self._suite = suite
        with user_code("vocabulary of the environment's suite"):
            words = suite.vocabulary
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"vocabulary of the environment's suite is {words!r:.200}: expected a sequence of "
                "words, each a str. Mend the suite"
            )
        self.tokenizer = word_tokenizer(words)
        self.stop_ids = frozenset({self.tokenizer.eos_id})

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        with user_code("prompt(task) of the environment's suite"):
            text = self._suite.prompt(task)
        if not isinstance(text, str):
            raise ConfigError(
                f"prompt(task) of the environment's suite gave {text!r:.80} for {task.task_id!r}: "
                "expected a str. Mend the suite"
            )
        return self.tokenizer.encode(text)

    def check(self, task: Task) -> None:
        """Nothing: its words are its tokens."""

    def begin(self, task: Task) -> Conversation:
        return _Words(self.tokenizer)


class _Words:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.opening_ids: tuple[int, ...] = ()

    def hear(self, token_ids: tuple[int, ...]) -> Action:
        text = self._tokenizer.decode(token_ids)
        call = parse_command_line(text)
        return Action(text=text.strip(), tool_calls=(call,) if call else ())

    def answer(self, observation: Observation, max_tokens: int) -> Reply:
        ids = self._tokenizer.encode(observation.text)
        return Reply(token_ids=truncate_middle(ids, max_tokens))


def truncate_middle(token_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The head and the tail of `token_ids`, `max_tokens` in all; errors tend to be at the end."""
    if len(token_ids) <= max_tokens:
        return token_ids
    num_head = (max_tokens + 1) // 2
    return token_ids[:num_head] + token_ids[len(token_ids) - (max_tokens - num_head) :]
