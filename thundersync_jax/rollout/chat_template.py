"""`ChatTemplate`: a model's own jinja template, which turns messages into text.

Invariants:
  * A template is a stranger's program: it runs in jinja's immutable sandbox and sees plain JSON
    values only.
  * What it is given determines its text: `strftime_now` tells the time at which the template was
    loaded, so that a conversation that passes midnight still begins as it began.
  * Whatever breaks in it is a `ChatTemplateError` that names the file, the line and the message.

The environment is the one that `transformers` gives templates (trim_blocks, lstrip_blocks, loop
controls, tojson without HTML escapes, raise_exception, the generation tag), so that a template
renders the same text there. Who calls it: `renderer.ChatRenderer`.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta, nodes, parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thundersync_jax.errors import UserError

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


class ChatTemplateError(UserError, ValueError):
    """A template that is missing, or that cannot render; names its line and the message."""


class ChatTemplate:
    """A template with what it knows of its tokenizer.

    Args:
      source: its jinja text.
      name: the file that it comes from, for errors.
      special_tokens: "bos_token" and its like, by the names that templates use.
      options: the user's, for instance {"enable_thinking": False}: variables that it reads.
      now: what strftime_now tells.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> None:
        self.name = name
        self._known = {**(special_tokens or {}), **(options or {})}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = (now or datetime.datetime.now()).strftime
        try:
            names = meta.find_undeclared_variables(environment.parse(source)) - _GIVEN
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{name}, line {error.lineno}: {str(error.message).rstrip('.')}. Expected the "
                "jinja chat template of a model; copy it again"
            ) from error
        if unknown := sorted(set(options or ()) - names):
            raise ChatTemplateError(
                f"config.chat.template_options has {unknown}, which {name} does not read: expected "
                f"some of {sorted(names)}"
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation; raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._known,
            )
        except Exception as error:  # a stranger's program, whatever it raises
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatTemplateError(
                f"{self.name}, line {_line_of(error)}: {type(error).__name__}: {error}. It was "
                f"given messages of the roles {roles} and {len(tools)} tools: give the "
                "environment messages that this template takes, or take another template"
            ) from error


class _Generation(Extension):
    """{% generation %}: marks what an assistant said; here its body is rendered like any other."""

    tags = {"generation"}  # noqa: RUF012  as jinja declares it

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line_of(error: Exception) -> int | str:
    """The template's last line on the way to the error."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    return lines[-1] if lines and lines[-1] is not None else "unknown"
