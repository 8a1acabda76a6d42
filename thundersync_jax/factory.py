"""A user's own code, named in a configuration as "package.module:function".

Imported and called here, so that whatever it raises is reported with the key that named it; what
is called of the result is called in `user_code`. Who calls it: what a configuration may replace
(environments, objectives). Never imports jax.
"""

from __future__ import annotations

import contextlib
import importlib
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from thundersync_jax.errors import ConfigError


def import_factory(name: str, key: str) -> Callable[..., Any]:
    """The function that `config.<key>` = "package.module:function" names; ConfigError."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"config.{key} = {name!r}: expected 'package.module:function'")
    with user_code(
        f"config.{key} = {name!r}: importing {module_name}",
        "Modules are looked up in the current directory, on PYTHONPATH and among the installed "
        "packages",
    ):
        module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ConfigError(
            f"config.{key} = {name!r}: module {module_name} has no {attribute!r}. Name a function "
            "that it has"
        )
    return getattr(module, attribute)


def call_factory(
    factory: Callable[..., Any], name: str, options: Mapping[str, Any], options_key: str
) -> Any:
    """`factory(**options)`; ConfigError names the options and what was raised."""
    described = f"{name} with config.{options_key} = {dict(options)!r}"
    with user_code(described, "Mend the options, or the function"):
        return factory(**options)


@contextlib.contextmanager
def user_code(name: str, remedy: str = "Mend the suite") -> Iterator[None]:
    """Whatever is raised in it is a ConfigError: that `name` raised it, where, and the remedy."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} raised {describe_error(error)}. {remedy}") from error


def describe_error(error: BaseException) -> str:
    """Type, message and place of an exception of a user's code, in one paragraph."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if "importlib" in last.filename else f" ({last.filename}, line {last.lineno})"
    return f"{type_and_message(error)}{where}"


def type_and_message(error: BaseException) -> str:
    """In one paragraph; the message is a user's code too."""
    name = type(error).__name__
    try:
        message = textwrap.shorten(str(error), 400, placeholder=" ...")
        return f"{name}: {message}" if message else name
    except Exception as fault:  # whatever it raises: it must not hide the error
        return f"{name}, whose message raised {type(fault).__name__}"
