"""Whether a policy reads what its environment says, which templates and tokenizers may lose.

Pure; `ChatRenderer.check` calls it for every task before a run starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from thundersync_jax.envs.tools import Tool
from thundersync_jax.errors import ConfigError


def check_shown(
    render: Callable[[list[dict[str, str]], Sequence[Tool]], str],
    messages: Sequence[Mapping[str, str]],
    tools: Sequence[Tool],
    template: str,
) -> None:
    """Raises ConfigError for messages and tools that a prompt does not show, by what they say.

    Each gets a mark at its end, of letters that no template escapes, and is looked for by that:
    templates may trim and quote.

    Args:
      render: makes a prompt of messages and of the tools that the template is given.
      template: its name.
    """
    marks = [f"_probe_{i}_of_the_template" for i in range(len(messages) + len(tools))]
    marked = [
        {**message, "content": message["content"] + mark}
        for message, mark in zip(messages, marks, strict=False)
    ]
    of_tools = list(zip(tools, marks[len(messages) :], strict=True))
    shown = render(marked, [dataclasses.replace(t, name=t.name + mark) for t, mark in of_tools])
    lost = [
        f"the message {message['content']!r:.100} of the role {message['role']!r}"
        for message, mark in zip(messages, marks, strict=False)
        if mark not in shown and message["content"].strip()
    ]
    lost += [f"the tool {tool.name!r}" for tool, mark in of_tools if mark not in shown]
    if lost:
        raise ConfigError(
            f"{template} does not show {', '.join(lost)}, so the policy would not read it: take a "
            "template that does, or say it in a message of the role 'user'"
        )
