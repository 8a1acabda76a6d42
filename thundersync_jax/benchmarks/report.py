"""The form in which every benchmark answers."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Any

import thundersync_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One benchmark's result.

    Attributes:
      config: what was measured.
      results: the figures; a ratio X_over_Y is time(X) / time(Y).
    """

    benchmark: str
    config: Mapping[str, Any]
    results: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        machine = {"cores": os.cpu_count(), "cpu": platform.machine(), "system": platform.system()}
        return {
            "benchmark": self.benchmark,
            "version": thundersync_jax.__version__,
            "machine": machine,
            **dataclasses.asdict(self),
        }
