"""Parses what the policy said into tool calls. Pure; called once a turn.

    command line    `probe 3`: the words of a policy trained from scratch
    hermes          <tool_call>{"name": "probe", "arguments": {"value": 3}}</tool_call>, any number
                    of them between text (Hermes, Qwen); one may hold a list (SmolLM2)
    llama_json      the whole text is {"name": "probe", "parameters": {"value": 3}} (Llama 3)
    bash            one fenced block of bash, and text around it

Invariants:
  * No text raises: what looks like a call and is none has an `error`, a sentence for the policy.
  * An erroneous turn has no calls: none of them runs.
  * parse(write(call)) is that call, for every JSON argument; of bash, for every command that does
    not hold the fence itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from typing import Any

from thundersync_jax.envs.tools import Tool
from thundersync_jax.trajectory import ToolCall

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BASH = "bash"  # the name of the call that a block of bash is, with the keyword `command`

CALL_TAGS = _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_FENCE = re.compile(r"^```(?:bash|sh)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_OPEN_FENCE = re.compile(r"^```(?:bash|sh)\b", re.MULTILINE)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a text is: the part outside of its calls, the calls, and why there are none."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are written.

    Attributes:
      parse: reads a whole turn's text, without reasoning and control tokens.
      write: a call as the policy should write it.
      request: tells the policy how to write one, where its template does not.
    """

    parse: Callable[[str], Parsed]
    write: Callable[[ToolCall], str]
    request: str

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Describes `tools` to a policy whose template cannot."""
        schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
        return f"You may call these functions:\n{schemas}\n{self.request}"


class _MalformedCallError(ValueError):
    """What looks like a call and is none."""


def _parse_hermes(text: str) -> Parsed:
    outside, calls, at = "", list[ToolCall](), 0
    try:
        while (begin := text.find(_OPEN, at)) >= 0:
            outside += text[at:begin]
            value, end = _read_json(text, begin + len(_OPEN), f"what follows {_OPEN}")
            rest = text[end:].lstrip()
            if not rest.startswith(_CLOSE):
                found = f"goes on with {rest[:40]!r}" if rest else "the text ends there"
                raise _MalformedCallError(
                    f"a {_OPEN} is not closed by {_CLOSE} after its JSON, but {found}"
                )
            if value == []:
                raise _MalformedCallError(f"a {_OPEN} holds an empty list: expected a call in it")
            calls += [
                _call(v, "arguments") for v in (value if isinstance(value, list) else [value])
            ]
            at = len(text) - len(rest) + len(_CLOSE)
    except _MalformedCallError as error:
        return Parsed(text=text.strip(), error=str(error))
    return Parsed(text=(outside + text[at:]).strip(), calls=tuple(calls))


def _parse_llama_json(text: str) -> Parsed:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return Parsed(text=text.strip())
    try:
        value, end = _read_json(body, 0, "a text that begins with {")
        if end < len(body):
            raise _MalformedCallError(f"a call is all of a text, got {body[end:][:40]!r} after it")
        call = _call(value, "parameters")
    except _MalformedCallError as error:
        return Parsed(text=text.strip(), error=str(error))
    return Parsed(text="", calls=(call,))


def _parse_bash(text: str) -> Parsed:
    blocks = _FENCE.findall(text)
    num_opened = len(_OPEN_FENCE.findall(text))
    if not num_opened:
        return Parsed(text=text.strip())
    if len(blocks) != 1 or num_opened != 1:
        said = "is not closed by ``` on a line of its own" if num_opened == 1 else "is not alone"
        return Parsed(
            text=text.strip(), error=f"a block of bash {said}: expected exactly one whole block"
        )
    call = ToolCall(name=BASH, keywords={"command": blocks[0].removesuffix("\n")})
    return Parsed(text=_FENCE.sub("", text).strip(), calls=(call,))


def is_bash(tool: Tool) -> bool:
    """Whether a block of bash is a call of `tool`."""
    return tool.name == BASH and not tool.misfit({"command": "true"})


def _read_json(text: str, begin: int, what: str) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise _MalformedCallError(f"{what} is not JSON: {error}") from error
    return value, end


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no JSON number")
    return value


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _call(value: Any, key: str) -> ToolCall:
    """A JSON value as a call, whose arguments it has under `key`."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key, {}) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _MalformedCallError(
            f'a call is an object {{"name": a string, "{key}": an object}}, got '
            + json.dumps(value, ensure_ascii=False)[:200]
        )
    return ToolCall(name=name, keywords=arguments)


def _write_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: dict(call.keywords)}, ensure_ascii=False)


TOOL_FORMATS = {
    "hermes": ToolFormat(
        parse=_parse_hermes,
        write=lambda call: f"{_OPEN}\n{_write_json(call, 'arguments')}\n{_CLOSE}",
        request=(
            "To call one, write a JSON object with its name and arguments between the tags:\n"
            f'{_OPEN}\n{{"name": <function name>, "arguments": <arguments object>}}\n{_CLOSE}'
        ),
    ),
    "llama_json": ToolFormat(
        parse=_parse_llama_json,
        write=lambda call: _write_json(call, "parameters"),
        request=(
            "To call one, answer with nothing but a JSON object:\n"
            '{"name": <function name>, "parameters": <arguments object>}'
        ),
    ),
    BASH: ToolFormat(
        parse=_parse_bash,
        write=lambda call: f"```bash\n{call.keywords['command']}\n```",
        request="To run a command, write it in exactly one block:\n```bash\n<command>\n```",
    ),
}
