"""`Tool`: what an environment lets a chat model call, as the JSON schema that its template shows.

A call is checked against the schema before the environment sees it: a name that no tool has, a
missing, unknown or ill-typed argument is a sentence for the policy to read, not an exception.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
        missing = [name for name in self.required or () if name not in self.parameters]
        if not self.name or missing:
            raise ValueError(
                f"a tool named {self.name!r} that requires {missing} besides its parameters "
                f"{list(self.parameters)}: expected a name, and required ones among the parameters"
            )
        for name, schema in self.parameters.items():
            _check_schema(schema, f"parameter {name!r} of the tool {self.name!r}")

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


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    kinds = _kinds(schema)
    unknown = [kind for kind in kinds if kind not in _TYPES]
    if unknown:
        raise ValueError(f"{where} has the type {unknown[0]!r}: expected one of {list(_TYPES)}")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{name!r} in {where}")
    if "items" in schema:
        _check_schema(schema["items"], f"an item of {where}")


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """The types that it allows; none named allows all."""
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


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
