"""Which turns run ahead of their content: every order of events ends, and nothing counts twice."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import CAPACITY, Model, example

from thundersync_jax.learner.buckets import bucket_of
from thundersync_jax.learner.groups import Group, Member, Path, Stage
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.schedule import Schedule
from thundersync_jax.learner.turn_schedule import (
    SegmentKind,
    SegmentWork,
    StreamTurns,
    TurnSchedule,
)
from thundersync_jax.learner.turns import Segment, SegmentStage, TurnSequence
from thundersync_jax.learner.turns_ahead import TurnsAhead
from thundersync_jax.losses.objectives import grpo, reinforce_pp
from thundersync_jax.trajectory import ScoredTurn, TrajectoryBuilder

BUCKETS = tuple(CAPACITY)  # of whole contents, and of segments
PREFIX_BUCKETS = (32,)


class TurnModel(Model):
    """Checks the calls of turns too, and counts what each segment was differentiated with."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, 2, is_exact=False)
        self.ran: collections.Counter[tuple[Segment, SegmentKind]] = collections.Counter()
        self._next_work = schedule.next_work
        schedule.next_work = self.checked  # type: ignore[method-assign]

    def checked(self) -> Any:
        work = self._next_work()
        if isinstance(work, SegmentWork):
            assert work.lanes
            for replica, lanes in enumerate(work.replicas):
                assert len(lanes) <= CAPACITY[work.bucket]
                for lane in lanes:
                    self.check_turn(replica, lane.sequence)
                    assert lane.segment is not None
                    self.ran[lane.segment, work.kind] += 1
        return work

    def check_turn(self, replica: int, sequence: TurnSequence) -> None:
        """Cache and held buffer are its own, on the replica that runs it."""
        member = self.schedule.turns.member_of(sequence)
        assert member.held is not None and sequence.cache is not None
        assert replica == member.held.replica == sequence.cache.replica
        assert sequence.buffer == member.held.index
        assert self.held.setdefault((replica, member.held.index), member) is member


def turn(num_actions: int) -> ScoredTurn:
    builder = TrajectoryBuilder()
    builder.append_observation([1])
    builder.append_action([2] * num_actions, [-1.0] * num_actions, [0] * num_actions)
    return ScoredTurn(tokens=builder.build(), teacher_logprobs=None)


def ones(turn: ScoredTurn, mask_before: np.ndarray) -> np.ndarray:
    return turn.tokens.action_mask.astype(np.float64)


class Growing:
    """A member with the turns that are still to come."""

    def __init__(self, schedule: Schedule, group: Group, member: Member, turns: list[int]) -> None:
        self.schedule, self.group, self.member = schedule, group, member
        self.left = [turn(count) for count in turns]
        self.sequence = TurnSequence(group.name(member), group.prompt_ids, ones)
        self.num_positions = 0

    def advance(self, *, fails: bool, reward: float) -> None:
        """The next event of the trajectory, if it has not ended."""
        group, member = self.group, self.member
        if member.is_terminal:
            return
        if fails:
            member.advance(Stage.FAILED, group.name(member))
        elif self.left:
            self.sequence.add(self.left.pop(0))
            if member.turns is None:
                member.turns = self.sequence
                self.schedule.turns.grow(group, member)
        elif member.stage is Stage.EXPECTED:
            member.advance(Stage.CONTENT, group.name(member))
            num_positions = self.sequence.num_tokens - 1 if self.sequence.segments else 0
            num_positions = min(num_positions or 3, BUCKETS[-1])  # of a lane on paper
            member.example = example(num_positions)
            member.bucket = bucket_of(num_positions, BUCKETS)
            self.schedule.turns.end(member)
        else:
            group.set_reward(member, reward)

    def check_ended(self, ran: collections.Counter[tuple[Segment, SegmentKind]]) -> None:
        """Every segment has its score once, and what later ones owe it unless it is the last."""
        member, group = self.member, self.group
        if not member.is_by_turns or member.reward is None or group.is_zero:
            return
        assert member.path is Path.AHEAD
        segments = self.sequence.to_run()
        for segment in segments:
            num_scored = ran[segment, SegmentKind.STREAM] + ran[segment, SegmentKind.CLOSE]
            assert num_scored == 1 and segment.stage is SegmentStage.DONE
            is_streamed = ran[segment, SegmentKind.STREAM] == 1
            is_replayed = is_streamed and segment is not segments[-1]
            assert ran[segment, SegmentKind.REPLAY] == int(is_replayed)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_order_of_turns_contents_and_verdicts_ends(data: st.DataObject):
    """Pools, held buffers and caches of 0 to 2, 1 to 4 replicas, failures at every point."""

    def size(name: str) -> int:
        return data.draw(st.integers(0, 2), name)

    num_replicas = data.draw(st.sampled_from([1, 2, 4]), "replicas")
    reduction, num_held, num_caches = REDUCTIONS["ordered"], size("held"), size("caches")
    turns = TurnSchedule(
        num_replicas=num_replicas,
        num_caches=num_caches if num_held else 0,
        buckets=BUCKETS,
        prefix_buckets=PREFIX_BUCKETS,
        lanes_per_call=CAPACITY.__getitem__,
        stream_turns=StreamTurns.IDLE,
    )
    pairs = size("pairs")
    schedule = Schedule(
        num_replicas=num_replicas,
        num_pairs=pairs,
        num_slots=size("slots"),
        num_held=num_held,
        pairs_per_call=min(pairs, 2),
        lanes_per_call=CAPACITY.__getitem__,
        objective=data.draw(st.sampled_from([grpo(), reinforce_pp()]), "objective"),
        paired=reduction.paired,
        turns=turns,
    )
    model, growing = TurnModel(schedule), []
    for number in range(data.draw(st.integers(1, 3), "groups")):
        group = Group(
            group_id=number,
            task_id=str(number),
            prompt_ids=np.zeros(3, np.int32),
            members=[Member(index=i) for i in range(data.draw(st.integers(2, 3)))],
            prefix_bucket=data.draw(st.sampled_from([0, 8])),
        )
        schedule.open(group)
        lengths = st.lists(st.integers(1, 3), max_size=4)
        growing += [Growing(schedule, group, m, data.draw(lengths)) for m in group.members]
    events = [one for one in growing for _ in range(len(one.left) + 2)]
    for one in data.draw(st.permutations(events)):
        fails = data.draw(st.integers(0, 12)) == 0
        one.advance(fails=fails, reward=float(data.draw(st.integers(0, 2))))
        model.run(data.draw(st.integers(0, 2)))
    assert model.run(1000) < 1000
    assert not schedule.unfinished()
    schedule.seal()
    assert model.run(1000) < 1000
    assert not model.held and not model.owners
    for one in growing:
        assert one.group.is_closed and one.member.held is None and one.member.turns is None
        one.check_ended(model.ran)
    assert all(free == set(range(num_held)) for free in schedule._free_held)
    assert all(len(free) == (num_caches if num_held else 0) for free in turns._free)


def test_the_last_held_buffer_is_left_for_final_content():
    """A trajectory that grows takes it only where nobody with final content could use it."""
    for num_held, is_final, is_taken in ((1, True, False), (2, True, True), (1, False, True)):
        turns = TurnSchedule(
            num_replicas=1,
            num_caches=2,
            buckets=BUCKETS,
            prefix_buckets=PREFIX_BUCKETS,
            lanes_per_call=CAPACITY.__getitem__,
            stream_turns=StreamTurns.IDLE,
        )
        free_held = [set(range(num_held))]
        ahead = TurnsAhead(turns, free_held)
        members = [Member(index=i) for i in range(2)]
        group = Group(group_id=0, task_id="a", prompt_ids=np.zeros(3, np.int32), members=members)
        if is_final:
            members[0].advance(Stage.CONTENT, "a")
            members[0].bucket = BUCKETS[0]
        members[1].turns = TurnSequence("b", group.prompt_ids, ones)
        members[1].turns.add(turn(2))
        ahead.grow(group, members[1])
        assert (ahead.growing_work([group]) is not None) == is_taken
        assert (members[1].held is not None) == is_taken
        assert len(free_held[0]) == num_held - is_taken
