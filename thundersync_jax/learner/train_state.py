"""What a checkpoint holds and an update changes."""

from __future__ import annotations

import dataclasses

import optax

from thundersync_jax.learner.grids import SumStart
from thundersync_jax.learner.streaming import Params


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """State at the start of a step; only `Learner.update` changes it.

    Attributes:
      params, opt_state: pytrees of device arrays, of what trains; donated to every update.
      policy_version: number of applied updates.
      sums: what the step's sums begin with.
      base: fingerprint of the frozen parameters that `params` belong to; "" where all train.
    """

    params: Params
    opt_state: optax.OptState
    policy_version: int = 0
    sums: SumStart = dataclasses.field(default_factory=SumStart)
    base: str = ""
