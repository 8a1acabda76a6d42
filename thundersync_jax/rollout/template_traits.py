"""What a chat template can say, found by giving it small conversations and looking for their parts.

Templates do not declare what they take: some know no tools, some refuse the role of a tool or of a
system, and each ends a turn with a token of its own. Pure; called once a run by `ChatRenderer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thundersync_jax.envs.tools import Tool
from thundersync_jax.rollout.chat_template import ChatTemplate, ChatTemplateError
from thundersync_jax.rollout.control_tokens import ControlTokens

_MARK, _NAME = "\ufdd0probe\ufdd1", "probe_of_the_template"
_TOOL = Tool(name=_NAME, description="Nothing.", parameters={"key": {"type": "string"}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateTraits:
    """See the module's docstring.

    Attributes:
      ask: how it asks for a turn, after everything else; "" where that is not apart.
      end_id: the special token that ends an assistant's turn.
      has_system, has_tool: whether messages of these roles are shown.
      shows_tools: it describes the tools that it is given.
      tool_format: the format of calls in which it does; "" for one that is not known.
    """

    ask: str
    end_id: int
    has_system: bool
    has_tool: bool
    shows_tools: bool
    tool_format: str


def traits_of(template: ChatTemplate, control: ControlTokens) -> TemplateTraits:
    """Raises ChatTemplateError for a template that cannot render a plain conversation."""
    turns = [("user", "hello"), ("assistant", _MARK), ("user", "more")]
    text, unasked = _render(template, turns), _render(template, turns, asks=False)
    if _MARK not in text:
        raise ChatTemplateError(
            f"{template.name} does not show what the assistant says: expected the chat template "
            "of a model"
        )
    after = control.encode(text[text.index(_MARK) + len(_MARK) :].lstrip())
    if not after or after[0] not in control.special_ids:
        raise ChatTemplateError(
            f"{template.name} ends what the assistant says with "
            f"{text[text.index(_MARK) + len(_MARK) :][:40]!r}, which begins with no special token "
            "of the tokenizer, so no turn could end: take both from the same model"
        )
    with_tools = _attempt(template, [("user", "hello")], [_TOOL])
    return TemplateTraits(
        ask=text.removeprefix(unasked) if text.startswith(unasked) else "",
        end_id=after[0],
        has_system=_MARK in _attempt(template, [("system", _MARK), ("user", "hello")]),
        has_tool=_MARK in _attempt(template, [*turns[:2], ("tool", _MARK)]).replace(_MARK, "", 1),
        shows_tools=_NAME in with_tools,
        tool_format=_format_of(with_tools),
    )


def _format_of(text: str) -> str:
    """In which words a template describes tools; their schemas hold "parameters" once."""
    if "<tool_call>" in text:
        return "hermes"
    return "llama_json" if text.count('"parameters"') > 1 else ""


def _render(
    template: ChatTemplate,
    turns: Sequence[tuple[str, str]],
    tools: Sequence[Tool] = (),
    asks: bool = True,
) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    schemas = [tool.schema for tool in tools]
    return template.render(messages, schemas, add_generation_prompt=asks)


def _attempt(
    template: ChatTemplate, turns: Sequence[tuple[str, str]], tools: Sequence[Tool] = ()
) -> str:
    """The text; "" where the template refuses."""
    try:
        return _render(template, turns, tools)
    except ChatTemplateError:
        return ""
