"""The memory plan counts what the learner really keeps, and refuses what does not fit."""

from __future__ import annotations

import dataclasses

import jax
import learner_cases as lc
import pytest

from thundersync_jax.config_sections import LearnerSection
from thundersync_jax.learner.memory import MemoryPlan, MemoryPlanError, check_fits


class Device:
    """What a device says of its memory."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = int(limit_bytes)

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit_bytes}


def test_the_plan_is_the_size_of_the_live_buffers():
    learner = lc.make_learner(
        lc.tiny(), pool_size=3, held_gradients=2, prompt_buckets=(8,), prompt_slots=4
    )
    buffers = learner._buffers
    live = (learner.state.params, learner.state.opt_state, buffers.batch, buffers._pairs._pairs)
    leaves = jax.tree.leaves((*live, buffers._held, buffers._slots))
    assert learner.memory.resident_bytes == sum(leaf.nbytes for leaf in leaves)


def test_a_pool_larger_than_memory_is_refused_with_the_one_that_fits():
    plan = MemoryPlan(
        state_bytes=int(3e9),
        batch_bytes=int(1e9),
        pairs_bytes=int(16e9),
        held_bytes=0,
        slots_bytes=0,
    )
    config = LearnerSection(pool_size=8)
    check_fits(plan, config, Device(20e9))
    with pytest.raises(MemoryPlanError, match=r"keep 20 GB.*has 16 GB: learner.pool_size = 6"):
        check_fits(plan, config, Device(16e9))
    with pytest.raises(MemoryPlanError, match="no pool fits"):
        check_fits(
            dataclasses.replace(plan, pairs_bytes=0), LearnerSection(pool_size=0), Device(3e9)
        )
