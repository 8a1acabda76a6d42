"""A small learner for tests; the batches and orders are those of `benchmark exactness`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.benchmarks.arrivals import (
    VOCAB_SIZE,
    Case,
    enqueue,
    random_batch,
    random_tokens,
    reference,
    rel_l2,
    run_events,
    run_turn_events,
    turns_of,
)
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import init_params

__all__ = [
    "VOCAB_SIZE",
    "Case",
    "copied",
    "copy_state",
    "enqueue",
    "init_params",
    "make_learner",
    "random_batch",
    "random_tokens",
    "reference",
    "rel_l2",
    "run_events",
    "run_turn_events",
    "tiny",
    "turns_of",
]


def tiny(dtype: str = "float32") -> TransformerConfig:
    """A two-layer model: the learner's arithmetic does not depend on depth."""
    return dataclasses.replace(
        preset("tiny", vocab_size=VOCAB_SIZE, dtype=dtype),
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        head_dim=8,
    )


def make_learner(
    model: TransformerConfig,
    *,
    seed: int = 0,
    optimizer: OptimizerSection | None = None,
    **changes: Any,
) -> Learner:
    config = dataclasses.replace(LearnerSection(max_logprob_gap=100.0), **changes)
    return Learner(config, optimizer or OptimizerSection(), model, init_params(model, seed))


def copy_state(learner: Learner) -> list[np.ndarray]:
    """Every array of the train state, copied before an update donates it."""
    leaves = jax.tree.leaves((learner.state.params, learner.state.opt_state))
    return [np.array(leaf, copy=True) for leaf in leaves]


def copied(state: TrainState) -> TrainState:
    """A state whose arrays may be donated."""
    params, opt_state = jax.tree.map(jnp.array, (state.params, state.opt_state))
    return dataclasses.replace(state, params=params, opt_state=opt_state)
