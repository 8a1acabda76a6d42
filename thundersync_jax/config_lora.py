"""The `model.lora` part of a configuration: low-rank adapters in place of full fine-tuning. Never
imports jax.
"""

from __future__ import annotations

import dataclasses
import math

from thundersync_jax.errors import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Which kernels W become W + alpha / rank * A B; A and B train, everything else is frozen.

    Attributes:
      rank: of every A B; 0 trains all parameters and has no adapters.
      targets: projections of every layer, by name. By default all of them.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")

    def __post_init__(self) -> None:
        check(self.rank >= 0, "model.lora.rank", self.rank, "0 (trains all parameters) or more")
        is_scale = 0 < self.alpha < math.inf
        check(is_scale, "model.lora.alpha", self.alpha, "a finite number above 0")
        is_named = bool(self.targets) and len(set(self.targets)) == len(self.targets)
        expected = "at least one projection, each once"
        check(is_named, "model.lora.targets", self.targets, expected)
        for key in ("alpha", "targets") if self.rank == 0 else ():
            value, default = getattr(self, key), getattr(LoraSection, key)
            expected = f"the default {default} with model.lora.rank = 0, which has no adapters"
            check(value == default, f"model.lora.{key}", value, expected)
