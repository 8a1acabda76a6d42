"""How tokens are drawn, and what a sampler can take. Never imports jax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from thundersync_jax.errors import check

# What float32 can divide logits by, or compare a sum of probabilities with.
MIN_SAMPLING = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSection:
    """How tokens are drawn. Training needs the untruncated policy: top_k = 0 and top_p = 1."""

    KEY: ClassVar[str] = "sampling"

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, (is_valid, expected) in sampling_bounds(
            self.temperature, self.top_k, self.top_p
        ).items():
            check(is_valid, f"{self.KEY}.{name}", getattr(self, name), expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSamplingSection(SamplingSection):
    """How held-out attempts draw theirs: greedy by default."""

    KEY: ClassVar[str] = "evaluation.sampling"

    temperature: float = 0.0


def sampling_bounds(temperature: float, top_k: int, top_p: float) -> dict[str, tuple[bool, str]]:
    """Of every parameter, whether a sampler in float32 can take it, and what it can take."""
    is_temperature = temperature == 0 or MIN_SAMPLING <= temperature <= 1 / MIN_SAMPLING
    limits = f"{MIN_SAMPLING:g} to {1 / MIN_SAMPLING:g}"
    return {
        "temperature": (is_temperature, f"0 (greedy), or a number from {limits}"),
        "top_k": (0 <= top_k < 2**31, "0 (off), or a number of tokens below 2**31"),
        "top_p": (MIN_SAMPLING <= top_p <= 1, f"a number from {MIN_SAMPLING:g} to 1"),
    }
