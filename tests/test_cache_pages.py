"""Trajectory caches in pinned host memory: nothing is lost, and the gradient has the same bits."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import learner_cases as lc
import memory_run
import numpy as np
import pytest
from hypothesis import given, settings

from thundersync_jax.benchmarks import turn_arrivals as oc
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.cache_pages import CachePages
from thundersync_jax.learner.cache_places import CachePlaces
from thundersync_jax.learner.compilation import CompileCounter
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.learner.memory import MemoryPlan, MemoryPlanError, Room, Sizes, check_fits
from thundersync_jax.learner.program_names import Caches
from thundersync_jax.learner.turn_replay import TrajectoryCaches
from thundersync_jax.learner.turn_schedule import (
    SegmentKind,
    SegmentWork,
    StreamTurns,
    TurnSchedule,
)
from thundersync_jax.learner.turns import SegmentStage, TurnSequence
from thundersync_jax.model.kv_cache import KeysValues

pytestmark = pytest.mark.optimized

MODEL = lc.tiny()
NUM_CACHES, NUM_PLACES = 3, 2  # as many caches as in test_distiller.py, whose programs serve here
CASES = [oc.random_case(seed) for seed in range(40)]


# -- which cache lies where -----------------------------------------------------------------------


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_a_wanted_cache_is_there_and_the_least_recently_wanted_leave(data, num_places, num_more):
    """Owners are counted upwards; the arrays are lists here, copied as the exchanges say."""
    places = CachePlaces[int](num_places)
    device: list[Any] = [None] * num_places
    host: dict[int, Any] = {}
    alive: dict[int, int] = {}  # -> what its cache holds: how often it was wanted
    last_wanted: dict[int, int] = {}
    num_owners = 0
    for call in range(data.draw(st.integers(1, 20))):
        over = {owner for owner in alive if data.draw(st.booleans())}
        alive = {owner: count for owner, count in alive.items() if owner not in over}
        for owner in places.release(over.__contains__):
            del host[owner]
        room = num_places + num_more - len(alive)
        new = range(num_owners, num_owners + data.draw(st.integers(0, room)))
        num_owners += len(new)
        alive |= dict.fromkeys(new, 0)
        wanted = data.draw(st.permutations(sorted(alive)))[:num_places]
        exchanges = places.reach(wanted)
        for e in exchanges:
            if e.leaving is not None:
                host[e.leaving] = device[e.place]
                others = set(alive) - set(wanted) - set(host)
                assert all(last_wanted[e.leaving] <= last_wanted[o] for o in others if alive[o])
            if e.entering is not None:
                device[e.place] = host.pop(e.entering)
        assert len(host) <= num_more
        assert len({places[owner] for owner in wanted}) == len(wanted)
        for owner in wanted:
            assert alive[owner] == 0 or device[places[owner]] == (owner, alive[owner])
            alive[owner] += 1
            device[places[owner]] = (owner, alive[owner])
            last_wanted[owner] = call


def test_what_fits_is_never_copied():
    places = CachePlaces[str](3)
    for wanted in ("a", "bc", "cab"):
        assert places.reach(tuple(wanted)) == []
    places.release("b".__eq__)
    assert places.reach(("d",)) == []  # what is over leaves nothing behind
    (exchange,) = places.reach(("e",))
    assert (exchange.leaving, exchange.entering) == ("c", None)  # what begins brings nothing


def test_a_call_that_wants_more_than_there_are_places_is_a_mistake():
    with pytest.raises(AssertionError, match="wants 3 caches, expected at most the 2 places"):
        CachePlaces[int](2).reach((1, 2, 3))


# -- under the schedule ---------------------------------------------------------------------------


class ListedPrograms:
    """One replica whose caches are numbers; copies are made one by one on the host."""

    num_places, num_replicas = NUM_PLACES, 1

    def read_cache(self, caches: TrajectoryCaches, index: np.ndarray) -> TrajectoryCaches:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[:, index[0]]), caches)

    def write_cache(
        self, caches: TrajectoryCaches, index: np.ndarray, cache: TrajectoryCaches
    ) -> TrajectoryCaches:
        return jax.tree.map(lambda x, one: _put(x, index[0], np.asarray(one)[0]), caches, cache)


def _put(x: jax.Array, place: int, value: Any) -> jax.Array:
    changed = np.array(x)
    changed[:, place] = value
    return jax.device_put(changed)


class PagedRun:
    """A schedule of which each call counts up what its lanes' caches hold."""

    def __init__(self, stream_turns: StreamTurns) -> None:
        self.schedule = TurnSchedule(
            num_replicas=1,
            num_caches=5,
            buckets=(8, 40),
            prefix_buckets=(40,),
            lanes_per_call=lambda bucket: min(NUM_PLACES, 40 // bucket),
            stream_turns=stream_turns,
        )
        programs: Any = ListedPrograms()
        self.pages = CachePages(programs)
        zeros = KeysValues(keys=np.zeros((1, NUM_PLACES)), values=np.zeros((1, NUM_PLACES)))
        self.caches: Any = jax.device_put(TrajectoryCaches(kv=zeros, ledger=zeros))
        self.counts: dict[TurnSequence, int] = {}

    def work(self, max_steps: int) -> None:
        for _ in range(max_steps):
            work = self.schedule.next_work()
            if work is None:
                return
            if work.kind is not SegmentKind.WHOLE:
                self._run(work)
            self.schedule.mark_done(work)

    def _run(self, work: SegmentWork) -> None:
        self.caches = self.pages.reach(self.caches, work)
        assert len(self.pages._pages) <= 5 - NUM_PLACES
        for lane in work.lanes:
            segment, place = lane.segment, self.pages.place(lane.sequence)
            assert segment is not None
            begins = segment.stage is SegmentStage.WAITING and not lane.example.prefix_length
            assert begins == (lane.sequence not in self.counts)
            count = self.counts.setdefault(lane.sequence, 0)
            for at, leaf in enumerate(jax.tree.leaves(self.caches)):
                assert begins or leaf[0, place] == count + 1000 * at
            self.counts[lane.sequence] = count + 1
            leaves, structure = jax.tree.flatten(self.caches)
            leaves = [_put(x, place, count + 1 + 1000 * at) for at, x in enumerate(leaves)]
            self.caches = jax.tree.unflatten(structure, leaves)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(StreamTurns)))
def test_every_lane_finds_what_its_trajectory_left_in_its_cache(seed, stream_turns):
    run, rng = PagedRun(stream_turns), np.random.default_rng(seed)
    cases = [CASES[at] for at in rng.permutation(len(CASES))[:12]]
    sequences = [TurnSequence(f"{i}", np.array(c.prompt)) for i, c in enumerate(cases)]
    left = [list(case.turns) for case in cases]
    for sequence in sequences:
        run.schedule.add(sequence)
    growing = list(range(len(cases)))
    while growing:
        at = int(rng.choice(growing))
        if left[at]:
            sequences[at].add(left[at].pop(0))
        else:
            growing.remove(at)
            sequences[at].is_closed = True
        run.work(int(rng.integers(3)))
    run.work(10_000)
    assert all(sequence.is_done for sequence in sequences)
    assert stream_turns is not StreamTurns.ALWAYS or run.pages.num_moved > 0
    assert stream_turns is not StreamTurns.NEVER or run.pages.num_moved == 0


# -- under the distiller --------------------------------------------------------------------------


def paged(cache_memory: str, num_residuals: int = 0) -> Distiller:
    """Calls of two lanes."""
    return oc.make_distiller(
        MODEL,
        stream_turns="always",
        num_caches=NUM_CACHES,
        num_residuals=num_residuals,
        cache_memory=cache_memory,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_residuals", [0, 1])
def test_caches_in_host_memory_give_the_same_bits_and_compile_nothing(num_residuals):
    """Kept residuals stay on the device, whatever becomes of the caches."""
    on_device, in_host = paged("device", num_residuals), paged("pinned_host", num_residuals)
    num_programs = in_host.warm_up()
    assert num_programs == 3 + 1 + 1 + 3 * 2 + 2 + 2 * num_residuals  # 2: READ and WRITE
    counter = CompileCounter()
    pages = in_host._buffers._caches._pages
    assert pages is not None
    for order in range(6):
        cases = [oc.random_case(seed) for seed in range(8 * order, 8 * order + 8)]
        oc.run_events(on_device, cases, np.random.default_rng(order))
        counter.start()
        oc.run_events(in_host, cases, np.random.default_rng(order))
        in_host.work()
        counter.close()
        gradients = in_host.gradient(), on_device.gradient()
        jax.tree.map(np.testing.assert_array_equal, *gradients)
        in_host.abandon()
        on_device.abandon()
    assert counter.count == 0 < pages.num_moved
    assert not pages._pages  # abandoned with their step


def test_the_plan_counts_places_on_the_device_and_the_others_in_the_host():
    plans = {memory: paged(memory).memory for memory in ("device", "pinned_host")}
    one = 2 * MODEL.num_layers * oc.LENGTH * MODEL.num_kv_heads * MODEL.head_dim * (4 + 4)
    sizes = {
        memory: (plan.parts["trajectory caches"], plan.host_parts["trajectory caches"])
        for memory, plan in plans.items()
    }
    assert sizes["device"] == (NUM_CACHES * one, 0)
    assert sizes["pinned_host"] == (NUM_PLACES * one, (NUM_CACHES - NUM_PLACES) * one)


def test_the_planned_bytes_of_the_host_are_the_most_that_lie_there():
    distiller = paged("pinned_host")
    cases = [oc.random_case(seed) for seed in (3, 4, 6, 7, 9)]
    for group, case in zip(oc.open_groups(distiller, cases), cases, strict=True):
        distiller.add_turn(group, 0, case.turns[0])
    distiller.work()
    arrays = [x for x in jax.live_arrays() if x.ndim == 5]
    planned = distiller.memory.host_parts["trajectory caches"]
    assert memory_run.on_device(arrays, "pinned_host") == planned > 0


def test_one_cache_is_all_that_paging_takes_besides():
    distiller = paged("pinned_host")
    programs = distiller._programs
    programs.warm_up([Caches.READ, Caches.WRITE])
    one = distiller.memory.parts["trajectory caches"] // NUM_PLACES
    found = programs.temporaries()
    for name in (Caches.READ, Caches.WRITE):
        assert one <= found[name] < 1.01 * one


@pytest.mark.parametrize(
    ("sizes", "room", "message"),
    [
        (
            {"caches_bytes": 9},
            {"device_bytes": 10},
            r"trajectory caches 9e-09 GB\).*set opd.cache_memory = 'pinned_host', lower opd.num_ca",
        ),
        (
            {"caches_bytes": 1, "host_caches_bytes": 9},
            {"device_bytes": 10, "host_bytes": 8},
            r"its trajectory caches in the host take 9e-09 GB of 8e-09 GB: lower opd.num_caches",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sizes, room, message):
    everything = {"state_bytes": 1, "accumulator_bytes": 1, "held_bytes": 0, "slot_bytes": 0}
    plan = MemoryPlan(
        config=lc.LearnerSection(pool_size=0, held_gradients=0),
        sizes=Sizes(**everything, **sizes),
        room=Room(**room),
    )
    with pytest.raises(MemoryPlanError, match=message):
        check_fits(plan)


def test_the_memory_is_one_of_two():
    with pytest.raises(ConfigError, match=r"opd\.cache_memory = 'host'"):
        OpdSection(cache_memory="host")
