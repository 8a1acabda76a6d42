"""Learners and batches of every objective of `benchmark exactness`, for tests."""

from __future__ import annotations

import dataclasses

import learner_cases as lc
import numpy as np

from thundersync_jax.benchmarks.exactness import OBJECTIVES
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.learner import Learner

LENGTH = 64


def cases_of(seed: int) -> list[lc.Case]:
    """Groups of every kind, some of whose prompts are long enough to be shared."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, lc.VOCAB_SIZE, n).tolist()) for n in (20, 3, 14, 9)]
    cases = lc.random_batch(seed, num_groups=4, size=4)
    return [dataclasses.replace(c, prompt=p) for c, p in zip(cases, prompts, strict=True)]


def learner_of(name: str, dtype: str = "float32", **changes) -> Learner:
    objective, options = OBJECTIVES[name]
    return lc.make_learner(
        lc.tiny(dtype),
        objective=objective,
        objective_options=options,
        buckets=(LENGTH,),
        tokens_per_step=2 * LENGTH,
        **{"pool_size": 1, "held_gradients": 0, **changes},
    )


def section(name: str) -> LearnerSection:
    objective, options = OBJECTIVES[name]
    return LearnerSection(objective=objective, objective_options=options)


def one_group(rewards, size: int = 2) -> lc.Case:
    case = cases_of(5)[0]
    return dataclasses.replace(case, trajectories=case.trajectories[:size], rewards=rewards)
