"""`ChatRenderer`: conversations with a model through its own chat template.

The template is given the whole conversation before every turn. In place of what the policy sampled
stand *marks*, one for each text between reasoning tags, so that the template can trim, split and
drop them as it does with text, and the ids of what was sampled are known to be its own:

    shown before      ...<|im_start|>assistant\n
    shown after       ...<|im_start|>assistant\n<think>\nMARK 0\n</think>\n\nMARK 1<|im_end|>\n
                      <|im_start|>user\n<tool_response>\nhigher...<|im_start|>assistant\n

Invariants:
  * Where the second text begins with the first and goes on with all marks and tags in order (white
    space apart), the policy next reads its own ids, and then what follows the last mark.
  * Where it does not, the template rewrites history. The reply then `is_rewritten`: the whole
    template's text after the prompt, with the real text in place of the marks, is encoded anew.
    With `chat.history = "append"` history stays as sampled, and what follows the last mark is read.
  * A sampled token that ends the turn stays, and the template's is left out. A turn that was cut
    gets the template's, which nobody sampled.
  * What the policy spelled with other tokens than a control token's own is quoted in every segment,
    as is what a tool prints, and what the suite says but for the tags of reasoning and calls:
    neither can begin or end a turn.
  * The prompt is what the template says before it asks for a turn: it never changes. A template
    that changes it is refused.

Who calls it: `agent.Agent`, through `renderer.Conversation`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from thundersync_jax.config_chat import ChatSection
from thundersync_jax.envs.base import Action, EnvironmentSuite, Message, Observation
from thundersync_jax.envs.tools import Tool, check_tools, misfit_of
from thundersync_jax.errors import ConfigError
from thundersync_jax.factory import user_code
from thundersync_jax.rollout.chat import TokenizerError
from thundersync_jax.rollout.chat_template import ChatTemplate, ChatTemplateError
from thundersync_jax.rollout.control_tokens import ControlTokens
from thundersync_jax.rollout.prompt_check import check_shown
from thundersync_jax.rollout.renderer import Conversation, Renderer, Reply, WordRenderer
from thundersync_jax.rollout.template_traits import traits_of
from thundersync_jax.rollout.tokenizer_files import (
    TEMPLATE_FILE,
    TokenizerFiles,
    read_tokenizer_files,
)
from thundersync_jax.rollout.tool_calls import BASH, CALL_TAGS, TOOL_FORMATS, is_bash
from thundersync_jax.trajectory import Task

_THINK, _END_THINK = "<think>", "</think>"
_TAGS = re.compile(f"({_THINK}|{_END_THINK})")
_SAYABLE = (_THINK, _END_THINK, *CALL_TAGS)  # of a suite's messages

_MAX_KEPT = 4096  # tasks: more than a step and an evaluation have

_Messages = list[dict[str, str]]


class ChatRenderer:
    """Implements `renderer.Renderer`.

    Args:
      files: the model's tokenizer and template.
      suite: with `messages` and `tools`, if it has them.
    """

    def __init__(
        self, files: TokenizerFiles, suite: EnvironmentSuite, section: ChatSection
    ) -> None:
        if not files.template:
            raise ChatTemplateError(
                f"{files.template_name} is missing: expected a chat template there or in "
                f"{TEMPLATE_FILE}. Take a model that was trained to chat, or write the template"
            )
        self._suite = suite
        self.tokenizer = files.tokenizer
        self.control = ControlTokens(files.tokenizer, files.template)
        self.template = ChatTemplate(
            files.template,
            name=files.template_name,
            special_tokens=files.special_tokens,
            options=section.template_options,
        )
        self.template_fingerprint = files.template_fingerprint
        self.keeps_history = section.history == "append"
        self.traits = traits_of(self.template, self.control)
        self.stop_ids = files.end_ids | {self.traits.end_id}
        self._kept: dict[int, tuple[Task, _Messages]] = {}  # a record that is kept keeps its id
        with user_code("tools of the environment's suite"):
            tools = getattr(suite, "tools", ())
        self.tools = check_tools(tools)
        self._format_name = self._choose_format(section.tool_format)
        self._format = TOOL_FORMATS[self._format_name]

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        return self.control.encode(self.opening(self._kept_messages(task))[0])

    def check(self, task: Task) -> None:
        """Raises ConfigError for messages that change from call to call, and for a message or a
        tool that the prompt does not show; TokenizerError for a text that ids would not say.
        """
        messages, again = self.messages(task), self.messages(task)
        if messages != again:
            differs = next((p for p in zip(messages, again, strict=False) if p[0] != p[1]), None)
            first, second = differs or (messages, again)
            raise ConfigError(
                "messages(task) of the environment's suite changes from call to call: "
                f"{first!r:.200}, then {second!r:.200}. Expected the same of a task each time, for "
                "all its attempts share one prompt: draw what is random by its task_id"
            )
        tools = self.tools if self._is_told_by_template else ()
        check_shown(self.render, messages, tools, self.template.name)
        for message in messages:
            self.control.check_readable(message["content"])

    def begin(self, task: Task) -> Conversation:
        return _Chat(self, self._kept_messages(task))

    def _kept_messages(self, task: Task) -> _Messages:
        """Those of the first call for this record: a suite that tells the time tells all attempts
        what the prompt says. The newest are kept.
        """
        if id(task) not in self._kept:
            self._kept[id(task)] = (task, self.messages(task))
            if len(self._kept) > _MAX_KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(task)][1]

    def messages(self, task: Task) -> _Messages:
        """What an attempt starts from, with the tools where the template does not describe them."""
        with user_code("messages(task) of the environment's suite"):
            make = getattr(self._suite, "messages", None)
            given = make(task) if make else [Message(role="user", content=task.instruction)]
        is_sequence = isinstance(given, Sequence) and len(given) > 0
        if not is_sequence or not all(isinstance(message, Message) for message in given):
            raise ConfigError(
                f"messages(task) of the environment's suite gave {given!r:.200} for "
                f"{task.task_id!r}: expected a sequence of thundersync_jax.envs.base.Message, at "
                "least one"
            )
        quote = self.control.quote
        messages = [{"role": m.role, "content": quote(m.content, _SAYABLE)} for m in given]
        if not self.tools or self._is_told_by_template:
            return messages
        told = quote(self._format.instructions(self.tools), _SAYABLE)
        if messages[0]["role"] != "system" and self.traits.has_system:
            return [{"role": "system", "content": told}, *messages]
        reads = [m for m in messages if m["role"] in ("system", "user")]
        if not reads:
            raise ConfigError(
                f"messages(task) of the environment's suite gave none of a system or user for "
                f"{task.task_id!r}: expected one, in which the tools are described, for "
                f"{self.template.name} does not describe them"
            )
        reads[0]["content"] = f"{reads[0]['content']}\n\n{told}"
        return messages

    @property
    def rewrites_history(self) -> bool:
        """The template shows something else than was said where a user answers what was said, with
        reasoning or without. Raises ChatTemplateError for one that cannot go on.
        """
        return any(map(self._is_rewritten, ("x", f"{_THINK}\nx\n{_END_THINK}\n\nx")))

    def _is_rewritten(self, said: str) -> bool:
        conversation = _Chat(self, [{"role": "user", "content": "x"}])
        conversation.hear((*self.control.encode(said), self.traits.end_id))
        return conversation.answer(Observation(text="x"), max_tokens=100).is_rewritten

    def render(self, messages: _Messages, tools: Sequence[Tool] | None = None) -> str:
        """The template's text up to where the next turn begins, with the suite's tools or these."""
        told = self.tools if self._is_told_by_template else ()
        schemas = [tool.schema for tool in (told if tools is None else tools)]
        quoted = self.control.quote_json(schemas, _SAYABLE)
        return self.template.render(messages, quoted, add_generation_prompt=True)

    def opening(self, messages: _Messages) -> tuple[str, str]:
        """The prompt, and how the template asks for a turn after it, if that is tokens apart."""
        text, ask = self.render(messages), self.traits.ask
        prompt, encode = text.removesuffix(ask), self.control.encode
        is_apart = text.endswith(ask) and encode(prompt) + encode(ask) == encode(text)
        return (prompt, ask) if is_apart else (text, "")

    def opened_by(self, text: str) -> str:
        """What a turn says that the template says for it: where it opens the reasoning itself."""
        ask = self.traits.ask
        return ask[ask.index(_THINK) :] if _THINK in ask and text.endswith(ask) else ""

    def parse(self, text: str, reasoning: str) -> Action:
        """A turn's text as an action whose calls fit the tools."""
        if not self.tools:
            return Action(text=self.control.strip(text), reasoning=reasoning)
        parsed = self._format.parse(text)
        misfits = [misfit_of(call, self.tools) for call in parsed.calls]
        error = parsed.error or next(filter(None, misfits), "")
        return Action(
            text=self.control.strip(parsed.text),
            tool_calls=() if error else parsed.calls,
            reasoning=reasoning,
            error=error,
        )

    @property
    def _is_told_by_template(self) -> bool:
        return self.traits.shows_tools and self._format_name == self.traits.tool_format

    def _choose_format(self, name: str) -> str:
        if name == BASH and self.tools and not any(is_bash(tool) for tool in self.tools):
            raise ConfigError(
                f"config.chat.tool_format = {name!r}: a block of bash calls the tool {BASH!r} with "
                f"its 'command', a string, and the suite's tools are "
                f"{[tool.name for tool in self.tools]}. Give it that tool, or take another format "
                f"of {tuple(TOOL_FORMATS)}"
            )
        if name != "auto":
            return name
        if self.tools and self.traits.shows_tools and not self.traits.tool_format:
            raise ConfigError(
                f"config.chat.tool_format = 'auto': {self.template.name} describes tools, and in "
                f"which format it wants calls is not known: name one of {tuple(TOOL_FORMATS)}"
            )
        return self.traits.tool_format or "hermes"


def make_renderer(suite: EnvironmentSuite, section: ChatSection) -> Renderer:
    """The suite's words where no tokenizer is named, or one of words; else a model's template."""
    if not section.tokenizer:
        return WordRenderer(suite)
    files = read_tokenizer_files(Path(section.tokenizer))
    if not files.has_words:
        return ChatRenderer(files, suite, section)
    renderer = WordRenderer(suite)
    if renderer.tokenizer.fingerprint != files.tokenizer.fingerprint:
        raise TokenizerError(
            f"{section.tokenizer} has {files.tokenizer.vocab_size} words which are not the "
            f"{renderer.tokenizer.vocab_size} of the environment's vocabulary in their order: its "
            "policy was trained in another environment"
        )
    return renderer


class _Chat:
    """One attempt's conversation.

    `_marked` and `_real` are its messages, with marks and with text, and `_shown` is what the
    template made of the marked ones when it last asked for a turn.
    """

    def __init__(self, renderer: ChatRenderer, messages: _Messages) -> None:
        self._renderer = renderer
        self._marked, self._real = list(messages), list(messages)
        self._prompt, ask = renderer.opening(messages)
        self._shown = self._prompt + ask
        self._num_marks = 0
        self._last = Action(text="")
        self._said, self._is_ended = "", False
        self.opening_ids = renderer.control.encode(ask)

    def hear(self, token_ids: tuple[int, ...]) -> Action:
        self._is_ended = bool(token_ids) and token_ids[-1] in self._renderer.stop_ids
        text = self._renderer.control.decode(token_ids[: len(token_ids) - self._is_ended])
        opened = self._renderer.opened_by(self._shown)
        self._said = self._mark(text)
        self._marked.append({"role": "assistant", "content": opened + self._said})
        self._real.append({"role": "assistant", "content": opened + text})
        answer, reasoning = map(self._renderer.control.unquote, _split_reasoning(opened + text))
        self._last = self._renderer.parse(answer, self._renderer.control.strip(reasoning))
        return self._last

    def answer(self, observation: Observation, max_tokens: int) -> Reply:
        renderer, control = self._renderer, self._renderer.control
        is_call = bool(self._last.tool_calls or self._last.error)
        message = {
            "role": "tool" if is_call and renderer.traits.has_tool else "user",
            "content": control.clip(observation.text, max_tokens),
        }
        self._marked.append(message)
        self._real.append(message)
        before, self._shown = self._shown, renderer.render(self._marked)
        end = _end_of_turn(before, self._said, self._shown)
        if end is None and renderer.keeps_history:
            end = self._end_of_marks()
        if end is None:
            return self._rewritten()
        ids = control.encode(self._shown[end:])
        if self._is_ended and ids and ids[0] in renderer.stop_ids:
            ids = ids[1:]
        return Reply(token_ids=ids)

    def _mark(self, text: str) -> str:
        """`text` with a mark in place of everything between reasoning tags, and one at its end."""
        pieces = _TAGS.split(text.rstrip())  # texts at even places, tags between
        for at in range(0, len(pieces), 2):
            if (core := pieces[at].strip()) or at == len(pieces) - 1:
                before, _, after = pieces[at].partition(core) if core else (pieces[at], "", "")
                pieces[at] = f"{before}\ufdd0{self._num_marks}\ufdd1{after}"
                self._num_marks += 1
        return "".join(pieces)

    def _end_of_marks(self) -> int:
        mark = f"\ufdd0{self._num_marks - 1}\ufdd1"
        found = self._shown.find(mark)
        if found < 0:
            raise ChatTemplateError(
                f"{self._renderer.template.name} does not show the end of what the policy said "
                "last, so nothing can be appended: set config.chat.history = 'template'"
            )
        return found + len(mark)

    def _rewritten(self) -> Reply:
        text = self._renderer.render(self._real)
        if not text.startswith(self._prompt):
            at = next(
                (i for i, (a, b) in enumerate(zip(text, self._prompt, strict=False)) if a != b),
                len(text),
            )
            raise ChatTemplateError(
                f"{self._renderer.template.name} changes the prompt when the conversation goes on: "
                f"from {self._prompt[at : at + 40]!r} to {text[at : at + 40]!r}. Expected a prompt "
                "that all turns share: take another template, or change the environment's messages"
            )
        ids = self._renderer.control.encode(text[len(self._prompt) :])
        return Reply(token_ids=ids, is_rewritten=True)


def _split_reasoning(text: str) -> tuple[str, str]:
    """The answer, and the reasoning before it; a turn that was cut in its reasoning has none."""
    if not text.lstrip().startswith(_THINK):
        return text, ""
    reasoning, _, answer = text.lstrip().removeprefix(_THINK).partition(_END_THINK)
    return answer, reasoning


def _end_of_turn(before: str, said: str, after: str) -> int | None:
    """Where `after`, which begins with `before`, has said what was said; None where it does not.

    White space around that counts for nothing: templates trim.
    """
    at = len(before.rstrip())
    if not after.startswith(before.rstrip()):
        return None
    for character in "".join(said.split()):
        while after[at : at + 1].isspace():
            at += 1
        if after[at : at + 1] != character:
            return None
        at += 1
    return at
