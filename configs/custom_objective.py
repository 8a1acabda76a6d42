"""A user's own objective and its experiment, in one file: rewards against the group's median.

    python -m thundersync_jax.train --config=configs/custom_objective.py --workdir=runs/median

Copy this file and change it. `learner.objective` is imported by its name, from the directory in
which the command is started or from PYTHONPATH, and called with `learner.objective_options`. What
it declares is checked with numbers when the run starts.
"""

import numpy as np
from ml_collections import ConfigDict

from thundersync_jax.config import default_config
from thundersync_jax.losses.normalizers import Kind, Normalizer
from thundersync_jax.losses.objective import Objective, Streams
from thundersync_jax.losses.token_scores import TruncatedRatio


def from_median(rewards: np.ndarray) -> np.ndarray:
    """A = r - median: affine in the reward, given the group's, so it streams by trajectory."""
    return rewards - np.median(rewards)


def median_baseline(tis_cap: float) -> Objective:
    """1/n sum_i A_i 1/|o_i| sum_t sg(min(p_t / b_t, tis_cap)) log p_t."""
    return Objective(
        name="median_baseline",
        streams=Streams.TRAJECTORY,
        score=TruncatedRatio(cap=tis_cap),
        advantages=from_median,
        normalizer=Normalizer(kind=Kind.TRAJECTORY_MEAN),
        weighs_sampler=True,
    )


def get_config() -> ConfigDict:
    config = default_config()
    config.learner.objective = "configs.custom_objective:median_baseline"
    config.learner.objective_options = ConfigDict({"tis_cap": 2.0})
    config.env.options = ConfigDict({"num_values": 4, "max_turns": 4})
    return config
