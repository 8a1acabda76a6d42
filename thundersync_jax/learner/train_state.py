"""What a checkpoint holds and an update changes."""

from __future__ import annotations

import dataclasses

import optax

from thundersync_jax.learner.streaming import Params


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """State at the start of a step; only `Learner.update` changes it.

    Attributes:
      params, opt_state: pytrees of device arrays; donated to every update.
      policy_version: number of applied updates.
      reward_center: c of the reward-linear form: mean reward of the previous update (float64), 0 at
        first.
    """

    params: Params
    opt_state: optax.OptState
    policy_version: int = 0
    reward_center: float = 0.0
