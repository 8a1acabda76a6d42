"""The memory plan counts what the learner really keeps, sizes what is asked for, and refuses what
does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import learner_cases as lc
import memory_run
import numpy as np
import pytest
from hypothesis import given

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner import memory
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.memory import HEADROOM, MemoryPlan, MemoryPlanError, Room, Sizes
from thundersync_jax.learner.program_names import Fold, Whole

pytestmark = pytest.mark.optimized

TESTS = Path(__file__).parent
GB, NUM_BYTES = 10**9, 1_000_000
SHAPES: dict[str, Any] = {
    "buckets": (32,),
    "tokens_per_step": 64,
    "pairs_per_call": 1,
    "held_gradients": 0,
}
SIZED = LearnerSection(pool_size=-1, prompt_slots=-1, prompt_buckets=(64,), held_gradients=0)


class Device:
    """What a device says of its memory."""

    platform = "tpu"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def plan_of(
    device_gb: float,
    *,
    state: int = 3 * GB,
    slot: int = 0,
    reserved: int = 0,
    host: float = 0.0,
    program: int = 0,
    **changes: Any,
) -> MemoryPlan:
    """Sums of 1 GB, pairs of 2 GB; on the device: 3 + 1 + 2 pool_size GB."""
    defaults = {"pool_size": 8, "held_gradients": 0, "prompt_buckets": (64,) if slot else ()}
    room = Room(
        device_bytes=int(device_gb * GB), reserved_bytes=reserved, host_bytes=int(host * GB)
    )
    return MemoryPlan(
        config=LearnerSection(**{**defaults, **changes}),
        sizes=Sizes(state_bytes=state, accumulator_bytes=GB, held_bytes=GB, slot_bytes=slot),
        room=room,
        program="program Fold" if program else "",
        program_bytes=program,
    )


# -- what is planned is what is there -------------------------------------------------------------


@pytest.mark.parametrize("pool_memory", ["device", "pinned_host"])
def test_the_plan_is_the_size_of_the_live_buffers(pool_memory: str):
    learner = lc.make_learner(
        lc.tiny(), pool_size=3, prompt_buckets=(32,), prompt_slots=4, pool_memory=pool_memory
    )
    buffers = learner._buffers
    live = (learner.state.params, learner.state.opt_state, buffers.batch, buffers._pairs._pairs)
    leaves = jax.tree.leaves((*live, buffers._held, buffers._slots))
    assert learner.memory.resident_bytes == memory_run.on_device(leaves, "device")
    assert learner.memory.host_bytes == memory_run.on_device(leaves, "pinned_host")


def test_the_plan_is_all_that_lives_on_a_device_of_a_mesh():
    """Data 2 x fsdp 2 x tensor 2: every array of the process is counted, to the byte."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "memory_run.py"), "2", "2", "2"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=250,
        cwd=TESTS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout).values():
        assert found["planned"] == found["live"]


@pytest.mark.slow
def test_pairs_in_host_memory_give_the_same_bits():
    """One order of events, three pairs of which a call reaches one."""
    gradients, moved = [], []
    for pool_memory in ("device", "pinned_host"):
        learner = lc.make_learner(memory_run.MODEL, pool_size=3, pool_memory=pool_memory, **SHAPES)
        lc.run_events(learner, lc.random_batch(0), np.random.default_rng(1))
        learner.work()
        moved.append(learner._buffers._pairs.num_moved)
        gradients.append(learner.gradient())
    assert moved[0] == 0 < moved[1]
    assert lc.rel_l2(*gradients) == 0.0


# -- as many as fit -------------------------------------------------------------------------------


@given(
    device_gb=st.floats(1, 200),
    sized=st.sampled_from([{"pool_size"}, {"prompt_slots"}, {"pool_size", "prompt_slots"}]),
    pool_memory=st.sampled_from(["device", "pinned_host"]),
    slot=st.integers(0, 3 * GB),
    host=st.floats(0, 100),
    program=st.integers(0, 20 * GB),
    is_host=st.booleans(),
)
def test_sized_buffers_fit_and_one_group_more_would_not(
    device_gb: float,
    sized: set[str],
    pool_memory: str,
    slot: int,
    host: float,
    program: int,
    is_host: bool,
):
    changes = {"pool_size": 2, "prompt_slots": 3, "pool_memory": pool_memory}
    changes |= dict.fromkeys(sized, memory.MAX_GROUPS)
    most = plan_of(device_gb, slot=slot, host=host, program=program, **changes)
    most = dataclasses.replace(most, room=dataclasses.replace(most.room, is_host=is_host))
    config = dataclasses.replace(most.config, **dict.fromkeys(sized, -1))

    def fits(num_groups: int) -> bool:
        """By hand: with headroom, next to the largest program or a second state."""
        numbers = {key: num_groups if key in sized else changes[key] for key in changes}
        pool, slots = numbers["pool_size"], numbers["prompt_slots"]
        near = pool if pool_memory == "device" else min(pool, 2)
        far = pool - near
        besides = max(program, 3 * GB)
        device = 4 * GB + 2 * GB * near + slots * slot + besides
        limit = int(HEADROOM * int(device_gb * GB))
        if is_host:
            return device + 2 * GB * far <= limit
        return device <= limit and 2 * GB * far <= int(host * GB)

    try:
        plan = memory.fit(config, most)
    except MemoryPlanError:
        assert not fits(1)
        return
    num_groups = {getattr(plan.config, key) for key in sized}
    assert len(num_groups) == 1
    (number,) = num_groups
    assert fits(number)
    assert plan.fits
    assert number == memory.MAX_GROUPS or not fits(number + 1)


def learner_on(num_bytes: int, **numbers: int) -> Learner:
    """A small learner on a device with so many bytes, instead of this one."""
    with pytest.MonkeyPatch.context() as patch:
        room = Room(device_bytes=num_bytes)
        patch.setattr("thundersync_jax.learner.learner.room_of", lambda *_: room)
        return lc.make_learner(memory_run.MODEL, **SHAPES, **numbers)


@pytest.fixture(scope="module")
def sized() -> Learner:
    """Warmed up on a device of NUM_BYTES."""
    learner = learner_on(NUM_BYTES, pool_size=-1)
    learner.warm_up()
    return learner


def test_a_learner_sized_to_its_device_fits_it_with_its_programs(sized: Learner):
    """And one pair more would not."""
    plan, number = sized.memory, sized.memory.config.pool_size
    assert 1 < number < memory.MAX_GROUPS
    assert plan.program_bytes == max(sized._programs.temporaries().values())
    assert plan.peak_bytes <= HEADROOM * NUM_BYTES
    config = dataclasses.replace(plan.config, pool_size=number + 1)
    assert dataclasses.replace(plan, config=config).peak_bytes > HEADROOM * NUM_BYTES
    assert f" of buffers a device ({number} pairs) and " in plan.describe()


def test_programs_that_do_not_fit_are_refused_when_they_are_compiled(sized: Learner):
    number = sized.memory.config.pool_size
    num_bytes = sized.memory.peak_bytes
    learner_on(num_bytes, pool_size=number).warm_up()
    learner = learner_on(num_bytes - 1, pool_size=number)
    with pytest.raises(MemoryPlanError, match=r"program Fold\(prefix_bucket=0, bucket=32\) needs"):
        learner.warm_up()


def test_the_number_that_a_refusal_names_works_with_the_programs_on_top():
    with pytest.raises(MemoryPlanError) as refused:
        learner_on(20 * NUM_BYTES, pool_size=10**30)
    number = int(re.findall(r"learner.pool_size = (\d+) would fit", str(refused.value))[0])
    assert number > 1
    learner_on(20 * NUM_BYTES, pool_size=number).warm_up()


def test_without_a_stated_limit_the_cpu_offers_its_host_and_others_refuse_nothing():
    learner = lc.make_learner(memory_run.MODEL, pool_size=-1, **SHAPES)
    assert learner.memory.config.pool_size == memory.MAX_GROUPS
    room = memory.room_of(jax.devices()[0], reserved_bytes=5)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert room.is_host
    assert room.reserved_bytes == 5
    assert 0 < (room.device_bytes or 0) <= physical
    beyond = plan_of(1)
    with pytest.raises(MemoryPlanError):
        memory.check_fits(dataclasses.replace(beyond, room=Room(device_bytes=1, is_host=True)))
    memory.check_fits(dataclasses.replace(beyond, room=memory.room_of(Device(None))))
    assert memory.room_of(Device({"bytes_limit": 7})).device_bytes == 7


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            plan_of(16),
            r"keeps 20 GB on every device \(state 3 GB, batch sum 1 GB, pairs 16 GB\), and 16 GB "
            r"are there for it: learner.pool_size = 5 would fit, and leave 5% for programs "
            r"\(-1 takes as many as fit\); or use more devices",
        ),
        (plan_of(18, reserved=2 * GB), r"16 GB are there for it besides 2 GB for serving"),
        (
            plan_of(16, host=14, pairs_per_call=1),
            r"learner.pool_size = 5 or learner.pool_memory = 'pinned_host' would fit",
        ),
        (
            plan_of(14, slot=GB, prompt_slots=12, pool_size=1),
            r"prompt slots 12 GB\).*learner.prompt_slots = 7 would fit",
        ),
        (
            plan_of(7, held_gradients=4, pool_size=0),
            r"held_gradients = 2 would fit, and leave 5% for programs; or",
        ),
        (
            plan_of(5, held_gradients=2, pool_size=0, stream_turns="idle"),  # without any: 4 GB
            r"5 GB are there for it: lower learner.num_turn_caches, use more devices",
        ),
        (
            plan_of(3),
            r"3 GB are there for it: use more devices along fsdp or tensor, or a smaller model$",
        ),
        (
            plan_of(7, pool_memory="pinned_host", host=14, pairs_per_call=2),
            r"pairs 4 GB\), and 7 GB.*learner.pairs_per_call = 1 would fit",
        ),
        (
            plan_of(16, pool_memory="pinned_host", host=5, pairs_per_call=2),
            r"its pairs in the host take 12 GB of 5 GB: learner.pool_size = 4 would fit",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_every_change_that_would(plan: MemoryPlan, message: str):
    with pytest.raises(MemoryPlanError, match=message):
        memory.check_fits(plan)


def test_a_program_that_does_not_fit_is_named_with_what_to_lower():
    temporaries = {Fold(0, 64): 4 * GB, Whole.UPDATE: 2 * GB}
    checked = memory.check_programs(plan_of(24), temporaries)
    assert (checked.program_bytes, checked.peak_bytes) == (4 * GB, 24 * GB)
    with pytest.raises(
        MemoryPlanError,
        match=r"program Fold\(prefix_bucket=0, bucket=64\) needs 4 GB more, and 22 GB are there "
        r"for it: learner.pool_size = 7 would fit; or shorten the longest bucket, set model.remat",
    ):
        memory.check_programs(plan_of(22), temporaries)
    with pytest.raises(MemoryPlanError, match=r"program update needs .*; or use more devices"):
        memory.check_programs(plan_of(22), {Whole.UPDATE: 4 * GB})


def test_a_device_without_room_for_one_group_is_refused():
    most = plan_of(9, slot=GB, pool_size=32, prompt_slots=32, program=3 * GB)
    with pytest.raises(
        MemoryPlanError,
        match=r"not one group fits 95% of a device: the learner keeps 7 GB .*pairs 2 GB, prompt "
        r"slots 1 GB\), program Fold needs 3 GB more, and 8.55 GB.*learner.pool_size = 0 would fit",
    ):
        memory.fit(SIZED, most)
    with pytest.raises(MemoryPlanError, match=r"reading a checkpoint needs 3 GB more"):
        memory.fit(SIZED, dataclasses.replace(most, program_bytes=2 * GB))


def test_a_silent_device_cannot_be_sized(monkeypatch: pytest.MonkeyPatch):
    name = "thundersync_jax.learner.learner.room_of"
    monkeypatch.setattr(name, lambda *_: memory.room_of(Device(None)))
    with pytest.raises(MemoryPlanError, match=r"does not say how much.*give numbers for"):
        lc.make_learner(lc.tiny(), pool_size=-1)


@pytest.mark.parametrize("changes", [{"pool_size": -2}, {"prompt_slots": 0}, {"prompt_slots": -2}])
def test_numbers_below_are_refused(changes: dict[str, int]):
    with pytest.raises(ConfigError, match=r"expected .*or -1 for as many as fit"):
        LearnerSection(**changes)
