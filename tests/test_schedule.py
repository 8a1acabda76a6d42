"""The schedule on many replicas: every order of events ends, and every gradient counts once."""

from __future__ import annotations

import collections

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax.benchmarks import schedule as benchmark
from thundersync_jax.learner.buckets import Example
from thundersync_jax.learner.groups import Cohort, Group, Member, Path, Stage
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.schedule import Schedule
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, LaneWork, PromptWork
from thundersync_jax.losses.objectives import grpo, ppo, reinforce_pp

CAPACITY = {4: 3, 8: 2}
OBJECTIVES = (
    grpo(),
    grpo(entropy_coefficient=0.1),
    ppo(entropy_coefficient=0.1),
    reinforce_pp(),
    reinforce_pp(entropy_coefficient=0.1),
)


class Model:
    """Runs whatever the schedule says on paper, and checks each call against what is allowed."""

    def __init__(self, schedule: Schedule, pairs_per_call: int, *, is_exact: bool) -> None:
        self.schedule = schedule
        self.pairs_per_call = pairs_per_call
        self.reduction = REDUCTIONS["exact" if is_exact else "ordered"]
        self.folded: collections.Counter[int] = collections.Counter()
        self.paid: collections.Counter[int] = collections.Counter()
        self.held: dict[tuple[int, int], Member] = {}
        self.owners: dict[tuple[int, int], Cohort] = {}

    def run(self, max_calls: int) -> int:
        for done in range(max_calls):
            work = self.schedule.next_work()
            if work is None:
                return done
            match work:
                case FoldWork():
                    self.check_fold(work)
                case BindWork(index=index, replicas=bound):
                    assert len(work.pairs) <= self.pairs_per_call
                    for replica, lane in enumerate(bound):
                        if lane is not None:
                            assert self.held.pop((replica, index)) is lane.member
                            self.check_pair(replica, lane)
                            self.folded[id(lane.member)] += lane.member.reward is not None
                case CloseWork(index=index, replicas=closing):
                    for replica, cohort in enumerate(closing):
                        if cohort is not None:
                            assert cohort.is_accumulated
                            assert self.owners.pop((replica, index)) is cohort
                case PromptWork(replicas=replicas, is_backward=is_backward):
                    for replica, group in enumerate(replicas):
                        if group is not None:
                            assert (replica in group.loaded) == is_backward
                            is_final = group.is_complete and group.is_accumulated
                            assert not is_backward or is_final
            self.schedule.mark_done(work)
        return max_calls

    def check_fold(self, work: FoldWork) -> None:
        assert work.lanes
        assert len(work.pairs) <= self.pairs_per_call
        for replica, lanes in enumerate(work.replicas):
            assert len(lanes) <= CAPACITY[work.bucket]
            for lane in lanes:
                assert lane.num_positions <= work.bucket
                assert not lane.group.prefix_bucket or replica in lane.group.loaded
                for member in lane.members:
                    self.paid[id(member)] += 1
                if lane.path is Path.TERMS:
                    assert lane.member.owes_terms and lane.member.is_terminal
                    continue
                if lane.path is Path.AHEAD:
                    assert (replica, lane.held) not in self.held
                    assert lane.member.stage is Stage.CONTENT
                    self.held[replica, lane.held] = lane.member
                    continue
                assert (lane.path is Path.DIRECT) == lane.group.is_complete
                assert lane.path is Path.DIRECT or len({m.reward for m in lane.members}) == 1
                self.check_pair(replica, lane)
                for member in lane.members:
                    self.folded[id(member)] += 1

    def check_pair(self, replica: int, lane: LaneWork) -> None:
        """A pair belongs to one cohort at a time on every replica; some groups stay on one."""
        is_paired = lane.path in self.reduction.paired and lane.members[0].reward is not None
        assert is_paired == (lane.pair is not None)
        assert not self.reduction.is_local or replica == lane.group.home
        if lane.pair is not None:
            cohort = lane.group.cohort
            assert self.owners.setdefault((replica, lane.pair), cohort) is cohort


def example(num_tokens: int) -> Example:
    ids, weights = np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.float32)
    return Example(tokens=ids, targets=ids, weights=weights, behavior_logprobs=weights)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_order_of_events_ends_with_every_gradient_counted_once(data: st.DataObject):
    """Pools of 0 to 2 of everything, 1 to 4 replicas, failures before and after `ahead`; what
    streams by trajectory, group and batch, with reward-free terms and without.
    """
    objective = data.draw(st.sampled_from(OBJECTIVES), "objective")
    is_exact = data.draw(st.booleans(), "exact")
    reduction = REDUCTIONS["exact" if is_exact else "ordered"]
    pairs = data.draw(st.integers(int(is_exact), 2), "pairs")
    pairs_per_call = min(pairs, data.draw(st.integers(1, 2), "pairs per call"))
    schedule = Schedule(
        num_replicas=data.draw(st.sampled_from([1, 2, 4]), "replicas"),
        num_pairs=pairs,
        num_slots=data.draw(st.integers(int(is_exact), 2), "slots"),
        num_held=data.draw(st.integers(0, 2), "held"),
        pairs_per_call=pairs_per_call,
        lanes_per_call=CAPACITY.__getitem__,
        objective=objective,
        pack_buckets=() if is_exact else data.draw(st.sampled_from([(), (4,), (4, 8)]), "packs"),
        paired=reduction.paired,
        is_local=reduction.is_local,
    )
    model = Model(schedule, pairs_per_call, is_exact=is_exact)
    groups = []
    for number in range(data.draw(st.integers(1, 4), "groups")):
        group = Group(
            group_id=number,
            task_id=str(number),
            prompt_ids=np.zeros(5, np.int32),
            members=[Member(index=i) for i in range(data.draw(st.integers(2, 4)))],
            prefix_bucket=data.draw(st.sampled_from([0, 8])),
        )
        shared = group.prefix_bucket
        schedule.open(group)
        assert group.prefix_bucket == shared or not is_exact  # content alone decides
        groups.append(group)
    events = [(g, m) for g in groups for m in g.members for _ in range(2)]
    for group, member in data.draw(st.permutations(events)):
        name = group.name(member)
        if member.stage is Stage.EXPECTED and data.draw(st.integers(0, 9)) > 0:
            member.advance(Stage.CONTENT, name)
            member.bucket = data.draw(st.sampled_from([0, 4, 8]))
            shortest = max(member.bucket // 4, 1)
            length = data.draw(st.integers(shortest, max(member.bucket, 1)))
            member.example = example(length)
            member.owes_terms = bool(member.bucket and objective.term_sums)
        elif member.stage is Stage.CONTENT and data.draw(st.integers(0, 4)) > 0:
            group.set_reward(member, float(data.draw(st.integers(0, 2))))
        elif not member.is_terminal:
            member.advance(Stage.FAILED, name)
        model.run(data.draw(st.integers(0, 3)))
    assert model.run(1000) < 1000
    assert not schedule.unfinished()
    schedule.seal()
    assert model.run(1000) < 1000
    assert not model.held and not model.owners
    for group in groups:
        assert group.is_closed and not group.cohort.pairs and not group.slots
        is_zero = group.is_zero
        for member in group.members:
            has_reward = member.reward is not None
            assert (member.path is not None) == has_reward
            most = int(has_reward and bool(member.bucket))
            least = 0 if is_zero else most
            if objective.term_sums:
                assert not member.owes_terms
                assert model.paid[id(member)] == int(bool(member.bucket))
            assert least <= model.folded[id(member)] <= most


def test_a_slot_that_a_group_without_a_gradient_leaves_goes_to_the_next_in_the_same_call():
    """The last group would wait for a slot that nobody holds, with nothing else to do."""
    schedule = Schedule(
        num_replicas=1,
        num_pairs=1,
        num_slots=1,
        num_held=0,
        pairs_per_call=1,
        lanes_per_call=CAPACITY.__getitem__,
        objective=reinforce_pp(),
        paired=REDUCTIONS["exact"].paired,
        is_local=True,
    )
    model = Model(schedule, 1, is_exact=True)
    for number, bucket in enumerate((0, 8)):
        members = [Member(index=i, bucket=bucket, example=example(bucket)) for i in range(2)]
        group = Group(
            group_id=number,
            task_id=str(number),
            prompt_ids=np.zeros(5, np.int32),
            members=members,
            prefix_bucket=8,
        )
        schedule.open(group)
        for member in members:
            member.advance(Stage.CONTENT, group.name(member))
            group.set_reward(member, float(member.index))
    schedule.seal()
    assert model.run(100) == 4  # the prompt, its branches, its gradient, the pair
    assert all(group.is_closed for group in schedule.groups)


def test_streaming_on_16_replicas_stays_near_the_rollout_horizon():
    """Learner work equal to the rollouts: barrier takes 2.0 horizons, streaming at most 1.25."""
    times = {
        ratio: float(np.median([benchmark.stream_step(seed, ratio).horizons for seed in range(9)]))
        for ratio in (0.25, 0.5, 1.0)
    }
    assert times[1.0] <= 1.25
    assert times[0.5] <= 1.5
    assert times[0.25] <= 1.25
