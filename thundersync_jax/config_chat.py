"""The `chat` section: how a model with its own tokenizer reads and writes. Never imports jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thundersync_jax.errors import check_choice

TOOL_FORMATS = ("auto", "hermes", "llama_json", "bash")
HISTORIES = ("template", "append")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatSection:
    """Of a policy that speaks through a Hugging Face tokenizer and its chat template.

    Attributes:
      tokenizer: a directory with tokenizer.json, tokenizer_config.json and the template. "" is that
        of model.checkpoint, or without one the words of the environment's vocabulary.
      tool_format: how tool calls are written; "auto" takes what the template tells the model.
      history: "template" shows the model its conversation as the template does; where that rewrites
        an earlier turn, for instance drops its reasoning, the trajectory goes on in a segment of
        its own. "append" never takes back what was sampled.
      template_options: the template's own variables, for instance {"enable_thinking": False}.
    """

    tokenizer: str = ""
    tool_format: str = "auto"
    history: str = "template"
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("chat.tool_format", self.tool_format, TOOL_FORMATS)
        check_choice("chat.history", self.history, HISTORIES)
