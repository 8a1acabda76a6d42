"""What options of environment factories share: waiting times, and the check of their bounds."""

from __future__ import annotations

import dataclasses
import math
import random


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delay:
    """A lognormal waiting time of the given mean; a mean of 0 waits never."""

    mean_s: float
    sigma: float

    def seconds(self, *seed: int) -> float:
        if self.mean_s == 0:
            return 0.0
        mu = math.log(self.mean_s) - self.sigma**2 / 2
        return random.Random(repr(seed)).lognormvariate(mu, self.sigma)


def check_least(factory: str, **options: tuple[float, float]) -> None:
    """Raises ValueError for an option (value, least) whose value is below the least, or NaN."""
    for name, (value, least) in options.items():
        if not value >= least:
            raise ValueError(f"{factory} option {name} = {value!r}: expected at least {least}")
