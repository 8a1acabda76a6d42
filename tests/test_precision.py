"""bfloat16 replicas, float32 masters: small steps are not lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import learner_cases as lc
import numpy as np

from thundersync_jax.config_sections import OptimizerSection


def test_steps_too_small_for_bfloat16_reach_the_masters_and_at_last_the_replicas():
    model = lc.tiny("bfloat16")
    optimizer = OptimizerSection(learning_rate=1e-5)
    learner = lc.make_learner(model, optimizer=optimizer, buckets=(64,), held_gradients=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(learner.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(learner.state.params)} == {"float32"}
    before = jax.device_get((learner.params, learner.state.params))
    lc.enqueue(learner, lc.random_batch(0))
    learner.update()
    for replica, master in zip(
        *map(jax.tree.leaves, (learner.params, learner.state.params)), strict=True
    ):
        np.testing.assert_array_equal(replica, master.astype(jnp.bfloat16))
    moved = [
        np.mean(np.asarray(new) != np.asarray(old))
        for old, new in zip(
            *map(jax.tree.leaves, (before, (learner.params, learner.state.params))), strict=True
        )
    ]
    half = len(moved) // 2
    assert np.mean(moved[half:]) > 0.5  # masters
    assert np.mean(moved[:half]) < 0.1  # replicas: the step is below their resolution
