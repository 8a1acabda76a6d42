"""The reference policy's part of a configuration. Never imports jax."""

from __future__ import annotations

import dataclasses

INITIAL = "initial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The frozen policy q of an objective's KL or distillation term. A run has one at most.

    It scores the tokens of every turn while the turn's tool runs, at sampling.temperature.

    Attributes:
      policy: "initial" is the policy that the run starts from, made again from model.checkpoint or
        run.seed on a resume; any other name is a Hugging Face directory, or the work directory of a
        run, whose newest checkpoint it is. "" is none, for objectives that read none.
    """

    policy: str = ""
