"""`Tool`: what an environment lets a chat model call, as the JSON schema that its template shows.

A call is checked against the schema before the environment sees it: a name that no tool has, a
missing, unknown or ill-typed argument is a sentence for the policy to read, not an exception.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from thundersync_jax.errors import ConfigError
from thundersync_jax.trajectory import ToolCall

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """One function.

    Attributes:
      name, description: what the policy reads of it.
      parameters: its arguments, by name: the JSON schema of each. Types, enum, items and nested
        properties are checked; what else a schema says is for the policy to read.
      required: names of those that a call must give; None for all.
    """

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        where = f"the tool {self.name!r}"
        if not (self.name and isinstance(self.name, str) and isinstance(self.description, str)):
            raise ValueError(f"{where}: expected a name and a description, both str")
        required = () if self.required is None else self.required
        _check_schema({"properties": self.parameters, "required": required}, where)
        try:
            json.dumps(self.schema, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where} has a schema that is not JSON: {error}") from error
        _check_keys(self.schema, where)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and other interfaces read it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self._arguments,
            },
        }

    def misfit(self, arguments: Mapping[str, Any]) -> str:
        """Why `arguments` do not fit the schema; "" when they do."""
        return _misfit(dict(arguments), self._arguments, f"the arguments of {self.name}")

    @property
    def _arguments(self) -> dict[str, Any]:
        required = list(self.parameters if self.required is None else self.required)
        return {
            "type": "object",
            "properties": {name: dict(schema) for name, schema in self.parameters.items()},
            "required": required,
        }


def misfit_of(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Why no tool can answer `call`; "" when one can."""
    for tool in tools:
        if tool.name == call.name:
            return tool.misfit(call.keywords)
    return f"there is no tool {call.name!r}: expected one of {[tool.name for tool in tools]}"


def check_tools(tools: Any) -> tuple[Tool, ...]:
    """Raises ConfigError for a suite's `tools` that are not a sequence of them, each its own."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
        raise ConfigError(
            f"the tools of the environment's suite are {tools!r:.200}: expected a sequence of "
            "thundersync_jax.envs.tools.Tool, () for none"
        )
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"the environment's suite has several tools named {twice}: expected one of each name, "
            "by which calls find theirs"
        )
    return tuple(tools)


_PARTS: dict[str, tuple[Any, str]] = {
    "properties": (Mapping, "an object of schemas"),
    "required": ((list, tuple), "a list of names"),
    "enum": ((list, tuple), "a list of values"),
}


def _check_schema(schema: Any, where: str) -> None:
    """Raises ValueError for what `_misfit` could not check a value against."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where} is {schema!r}: expected a JSON schema, which is an object")
    for part, (kind, expected) in _PARTS.items():
        if part in schema and not isinstance(schema[part], kind):
            raise ValueError(f"{where} has {part} = {schema[part]!r}: expected {expected}")
    unknown = [kind for kind in _kinds(schema) if not (isinstance(kind, str) and kind in _TYPES)]
    if unknown:
        raise ValueError(f"{where} has the type {unknown[0]!r}: expected one of {list(_TYPES)}")
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing and "properties" in schema:
        raise ValueError(f"{where} requires {missing}: expected some of {list(properties)}")
    for name, inner in properties.items():
        _check_schema(inner, f"property {name!r} of {where}")
    if "items" in schema:
        _check_schema(schema["items"], f"an item of {where}")


def _check_keys(value: Any, where: str) -> None:
    """Raises ValueError for a key that is no str, anywhere in a JSON value."""
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{where} has the name {wrong[0]!r} in its schema: expected a str")
        value = list(value.values())
    for part in value if isinstance(value, list | tuple) else ():
        _check_keys(part, where)


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """The types that it allows; none named allows all."""
    kind = schema.get("type", ())
    return tuple(kind) if isinstance(kind, list | tuple) else (kind,)


def _misfit(value: Any, schema: Mapping[str, Any], where: str) -> str:
    kinds = _kinds(schema)
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return f"{where}: expected {' or '.join(kinds)}, got {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where}: expected one of {schema['enum']}, got {value!r}"
    if isinstance(value, list) and "items" in schema:
        found = (_misfit(v, schema["items"], f"{where}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), "")
    if not isinstance(value, dict) or "properties" not in schema:
        return ""
    properties = schema["properties"]
    missing = [name for name in schema.get("required", ()) if name not in value]
    unknown = [name for name in value if name not in properties]
    if missing or unknown:
        said = f"lack {missing}" if missing else f"have {unknown}"
        return f"{where} {said}: expected {list(properties)}"
    found = (_misfit(value[name], properties[name], f"{where}, {name}") for name in value)
    return next(filter(None, found), "")


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a JSON value has a schema's type: true is no number, and 3.0 is an integer."""
    if isinstance(value, bool) and kind != "boolean":
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])
