"""Tool calls in the formats of chat models: written and read again, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax import config_chat
from thundersync_jax.envs.tools import Tool, misfit_of
from thundersync_jax.rollout.tool_calls import TOOL_FORMATS, Parsed
from thundersync_jax.trajectory import ToolCall

TEXTS = st.text(st.characters(codec="utf-8"))
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
SCALARS |= st.sampled_from(["</tool_call>", "<tool_call>", "```"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(ToolCall, name=TEXTS, keywords=st.dictionaries(TEXTS, JSON, max_size=3))
every_format = pytest.mark.parametrize("name", TOOL_FORMATS)


def parse(name: str, text: str) -> Parsed:
    return TOOL_FORMATS[name].parse(text)


def test_the_configuration_names_the_formats_that_there_are() -> None:
    assert set(config_chat.TOOL_FORMATS) == {"auto", *TOOL_FORMATS}


@pytest.mark.parametrize("name", ["hermes", "llama_json"])
@settings(deadline=None)
@given(call=CALLS)
def test_a_written_call_is_read_as_it_was(name: str, call: ToolCall) -> None:
    """Also one whose arguments hold the tags of the format."""
    assert parse(name, TOOL_FORMATS[name].write(call)) == Parsed(text="", calls=(call,))


@settings(deadline=None)
@given(command=st.text(st.characters(codec="utf-8")).filter(lambda text: "```" not in text))
def test_a_written_command_is_read_as_it_was(command: str) -> None:
    call = ToolCall(name="bash", keywords={"command": command})
    text = f"First:\n{TOOL_FORMATS['bash'].write(call)}\nand then."
    assert parse("bash", text) == Parsed(text="First:\n\nand then.", calls=(call,))


@settings(deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
def test_hermes_calls_stand_between_text_in_order(calls: list[ToolCall], data: Any) -> None:
    write = TOOL_FORMATS["hermes"].write
    assert parse("hermes", "so " + " then ".join(map(write, calls)) + " done") == Parsed(
        text="so " + " then " * (len(calls) - 1) + " done", calls=tuple(calls)
    )
    listed = [{"name": call.name, "arguments": dict(call.keywords)} for call in calls]
    text = f"<tool_call>{json.dumps(listed)}</tool_call>"
    assert parse("hermes", text).calls == tuple(calls)


PIECES = [
    "<tool_call>", "</tool_call>", '{"name":', '"x"', '"arguments"', "{", "}", "[", "]", ":", ",",
    "```bash\n", "\n```", "\n", '"\\ud800"', "1e999", "NaN", "[" * 2000,
]  # fmt: skip


@every_format
@settings(deadline=None)
@given(text=st.lists(st.text() | st.sampled_from(PIECES)).map("".join))
def test_no_text_breaks_a_parser(name: str, text: str) -> None:
    parsed = parse(name, text)
    assert not (parsed.calls and parsed.error)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hermes", "<tool_call>{'name': 'x'}</tool_call>", "what follows <tool_call> is not JSON"),
        ("hermes", '<tool_call>{"name": "x"}', "after its JSON, but the text ends there"),
        ("hermes", '<tool_call>{"name": "x"}}</tool_call>', "but goes on with '}</tool_call>'"),
        ("hermes", "<tool_call>3</tool_call>", 'a call is an object {"name": a string, "argu'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'got {"arguments": {}}'),
        ("hermes", '<tool_call>{"name": "x", "arguments": "{}"}</tool_call>', "an object}, got"),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', "surrogates not allowed"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"v": 1e999}}</tool_call>', "1e999 is"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"v": NaN}}</tool_call>', "NaN is no"),
        ("llama_json", '{"name": "x", "parameters": [3]}', '"parameters": an object}, got'),
        ("llama_json", '{"name": "x"} and', "a call is all of a text, got ' and' after it"),
        ("llama_json", "{name}", "a text that begins with { is not JSON"),
        ("bash", "```bash\nls", "is not closed by ``` on a line of its own"),
        ("bash", "```bash\nls\n```\n```bash\nls\n```", "is not alone: expected exactly one"),
    ],
)  # fmt: skip
def test_what_is_no_call_says_why(name: str, text: str, message: str) -> None:
    parsed = parse(name, text)
    assert message in parsed.error and parsed.calls == () and parsed.text == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "{} `ls`"),
        ("llama_json", "I say {}"),
        ("bash", "```python\n1\n```"),
        ("bash", "ls"),
    ],
)
def test_other_text_is_no_call_and_no_error(name: str, text: str) -> None:
    assert parse(name, text) == Parsed(text=text)


def test_one_bad_call_stops_all_of_its_turn() -> None:
    write = TOOL_FORMATS["hermes"].write
    good = write(ToolCall(name="x"))
    assert parse("hermes", f"{good} <tool_call>oops</tool_call>").calls == ()


def test_a_list_of_no_calls_is_malformed() -> None:
    assert "holds an empty list" in parse("hermes", "<tool_call>[]</tool_call>").error


def test_llama_calls_may_have_a_tag_before_them() -> None:
    text = '<|python_tag|>{"name": "x", "parameters": {}}'
    assert parse("llama_json", text).calls == (ToolCall(name="x"),)


TOOL = Tool(
    name="look",
    description="Looks.",
    parameters={
        "path": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "how": {"enum": ["fast", "slow"]},
        "where": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}},
    },
    required=("path",),
)


@pytest.mark.parametrize(
    ("arguments", "misfit"),
    [
        ({"path": "a"}, ""),
        ({"path": "a", "lines": [1, 2.0], "how": "slow", "where": {"x": 0.5}}, ""),
        ({"path": "a", "where": None}, ""),
        ({}, "the arguments of look lack ['path']: expected ['path', 'lines', 'how', 'where']"),
        ({"path": "a", "size": 1}, "the arguments of look have ['size']: expected"),
        ({"path": 3}, "the arguments of look, path: expected string, got 3"),
        ({"path": "a", "lines": [1, True]}, "lines[1]: expected integer, got True"),
        ({"path": "a", "lines": [1.5]}, "lines[0]: expected integer, got 1.5"),
        ({"path": "a", "how": "soon"}, "how: expected one of ['fast', 'slow'], got 'soon'"),
        ({"path": "a", "where": {"x": "y"}}, "where, x: expected number, got 'y'"),
        ({"path": "a", "where": 3}, "where: expected object or null, got 3"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], misfit: str) -> None:
    found = misfit_of(ToolCall(name="look", keywords=arguments), [TOOL])
    assert misfit in found and bool(misfit) == bool(found)


def test_a_tool_that_there_is_not_is_named_with_those_that_there_are() -> None:
    found = misfit_of(ToolCall(name="lock"), [TOOL])
    assert found == "there is no tool 'lock': expected one of ['look']"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "the tool ''"),
        ({"name": 3}, "tool 3: expected a name and a description, both str"),
        ({"description": None}, "tool 'look': expected a name and a description, both str"),
        ({"required": ("size",)}, r"tool 'look' requires \['size'\]: expected some of \[\]"),
        ({"required": "path"}, "tool 'look' has required = 'path': expected a list of names"),
        ({"parameters": ["path"]}, r"has properties = \['path'\]: expected an object of schemas"),
        ({"parameters": {"path": "string"}}, "'path' of the tool 'look' is 'string': expected a J"),
        ({"parameters": {"path": {"type": "text"}}}, "'path' of the tool 'look' has the type 'tex"),
        ({"parameters": {"path": {"type": None}}}, "has the type None: expected one of"),
        ({"parameters": {"path": {"enum": 5}}}, "has enum = 5: expected a list of values"),
        ({"parameters": {"path": {"items": 5}}}, "an item of property 'path' .* is 5: expected"),
        ({"parameters": {"path": {"properties": {"x": 5}}}}, "'x' of property 'path' .* is 5"),
        ({"parameters": {"path": {"default": {5}}}}, "a schema that is not JSON: .*set"),
        ({"parameters": {5: {}}}, "tool 'look' has the name 5 in its schema: expected a str"),
        ({"parameters": {"path": {"default": [{5: 1}]}}}, "has the name 5 in its schema"),
        ({"description": "\ud800"}, "a schema that is not JSON: .*surrogates not allowed"),
    ],
)
def test_tools_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tool(**{"name": "look", "description": "", "parameters": {}} | changes)


@every_format
def test_instructions_tell_the_tools_and_the_format(name: str) -> None:
    told = TOOL_FORMATS[name].instructions([TOOL])
    assert json.dumps(TOOL.schema) in told and TOOL_FORMATS[name].request in told
