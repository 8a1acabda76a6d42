"""The step machine under every order of events, against a strict observer of its commands."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import fakes
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.admission import num_groups_to_open
from thundersync_jax.coordinator.group_tracker import (
    TRANSITIONS,
    GroupState,
    StateError,
    StepMachine,
    StepState,
    TrajectoryState,
)
from thundersync_jax.coordinator.journal import Journal, read_journal, replay
from thundersync_jax.trajectory import TrajectoryError, TrajectoryKey


def started(**fields: object) -> ev.RunStarted:
    defaults = {"mode": ev.Mode.STREAM, "max_open_groups": 100, "max_empty_steps": 2}
    return ev.RunStarted(**{**defaults, **fields})


def opened(**fields: object) -> ev.StepOpened:
    defaults = {"step": 0, "policy_version": 0, "groups": 2, "group_size": 2}
    return ev.StepOpened(**{**defaults, **fields})


class Observer:
    """Checks every command against what the contract of its receiver allows."""

    def __init__(self, run: ev.RunStarted) -> None:
        self.run = run
        self.step_open = False
        self.is_stopped = False
        self.running: set[TrajectoryKey] = set()

    def begin(self, event: ev.StepOpened) -> None:
        self.step_open = True
        self.keys = {
            TrajectoryKey(step=event.step, group=g, index=i)
            for g in range(event.groups)
            for i in range(event.group_size)
        }
        self.group_size = event.group_size
        self.refills = event.refills
        self.limit, self.num_refilled = event.refills, 0
        self.num_groups = event.groups
        self.opened: list[int] = []
        self.dispatched: list[TrajectoryKey] = []
        self.running = set()
        self.content: set[TrajectoryKey] = set()
        self.verdicts: dict[TrajectoryKey, float | None] = {}
        self.is_released = False
        self.is_updating = False

    def open_groups(self) -> set[int]:
        return {g for g in self.opened if self.missing(g)}

    def end(self, key: TrajectoryKey, reward: float | None) -> None:
        """A group without two different rewards is replaced while there are refills."""
        self.verdicts[key] = reward
        rewards = {r for k, r in self.verdicts.items() if k.group == key.group} - {None}
        if not self.missing(key.group) and len(rewards) < 2 and self.refills:
            self.refills -= 1
            self.num_refilled += 1
            self.keys |= {
                dataclasses.replace(key, group=self.num_groups, index=index)
                for index in range(self.group_size)
            }
            self.num_groups += 1

    def is_at_its_limit(self) -> bool:
        """Every refill was used, and no group has two different rewards."""
        by_group: dict[int, set[float]] = {}
        for key, reward in self.verdicts.items():
            by_group.setdefault(key.group, set()).update({reward} - {None})
        is_tied = all(len(rewards) < 2 for rewards in by_group.values())
        return is_tied and 0 < self.limit == self.num_refilled

    def missing(self, group: int) -> set[TrajectoryKey]:
        return {key for key in self.keys if key.group == group} - self.verdicts.keys()

    def see(self, command: ev.Command) -> None:
        match command:
            case ev.ReleaseLearner():
                assert not self.is_released
                self.is_released = True
                if self.run.mode is ev.Mode.BARRIER:
                    assert self.verdicts.keys() == self.keys
                else:
                    assert not self.opened
            case ev.OpenGroup(group=group):
                assert group not in self.opened
                self.opened.append(group)
                assert len(self.open_groups()) <= self.run.max_open_groups
            case ev.Dispatch(key=key):
                assert key.group == self.opened[-1], "a group is dispatched whole"
                assert key not in self.dispatched
                self.dispatched.append(key)
                self.running.add(key)
            case ev.CancelAttempt(key=key):
                self.running.remove(key)
            case ev.AddTrajectory(key=key):
                assert key.group in self.opened and key not in self.content | self.verdicts.keys()
                self.content.add(key)
            case ev.SetReward(key=key, reward=reward):
                assert key in self.content and key not in self.verdicts
                self.end(key, reward)
                self.running.remove(key)
            case ev.SetFailed(key=key):
                assert key.group in self.opened and key not in self.verdicts
                self.end(key, None)
                self.running.discard(key)
            case ev.Update():
                assert self.is_released and self.verdicts.keys() == self.keys
                assert sorted(self.opened) == sorted({key.group for key in self.keys})
                self.is_updating = True
            case ev.Publish():
                assert self.is_updating
            case ev.CloseStep():
                assert self.is_updating
                self.step_open = False
            case ev.StopRun():
                self.is_stopped = True


class AnyOrder(RuleBasedStateMachine):
    """Drives a machine with every legal order of events."""

    @initialize(
        mode=st.sampled_from(ev.Mode),
        max_open_groups=st.integers(1, 4),
        empty_steps=st.integers(0, 1),
    )
    def start(self, mode: ev.Mode, max_open_groups: int, empty_steps: int) -> None:
        run = started(mode=mode, max_open_groups=max_open_groups, empty_steps=empty_steps)
        self.machine = StepMachine(run)
        self.observer = Observer(run)
        self.empty_steps = empty_steps
        self.step = -1
        self.log: list[tuple[ev.RunStarted | ev.Event, list[ev.Command]]] = [(run, [])]
        self.directory = tempfile.TemporaryDirectory()
        self.journal = Journal(Path(self.directory.name) / "events.jsonl", lambda: 1.5)
        self.journal.start()
        self.journal.append(run)

    def apply(self, event: ev.Event) -> list[ev.Command]:
        self.journal.append(event)
        commands = self.machine.apply(event)
        self.log.append((event, commands))
        for command in commands:
            self.observer.see(command)
        return commands

    def is_in(self, *states: StepState) -> bool:
        return self.machine.state in states

    @precondition(lambda self: self.is_in(StepState.IDLE))
    @rule(groups=st.integers(1, 4), group_size=st.integers(1, 3), refills=st.integers(0, 2))
    def open_step(self, groups: int, group_size: int, refills: int) -> None:
        self.step += 1
        event = opened(
            step=self.step,
            policy_version=self.machine.policy_version,
            groups=groups,
            group_size=group_size,
            refills=refills,
        )
        self.observer.begin(event)
        self.apply(event)

    @precondition(lambda self: self.observer.step_open and self.silent())
    @rule(data=st.data())
    def finish_content(self, data: st.DataObject) -> None:
        self.apply(ev.ContentFinal(key=data.draw(st.sampled_from(self.silent()))))

    @precondition(lambda self: self.observer.step_open and self.graded())
    @rule(data=st.data(), reward=st.sampled_from([-0.5, 0.0, 1.0]))
    def reward(self, data: st.DataObject, reward: float) -> None:
        key = data.draw(st.sampled_from(self.graded()))
        commands = self.apply(ev.RewardKnown(key=key, reward=reward))
        assert commands[0] == ev.SetReward(key=key, reward=reward)

    @precondition(lambda self: self.observer.step_open and self.observer.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.observer.running)))
        commands = self.apply(ev.AttemptFailed(key=key, reason="broke"))
        assert commands[0] == ev.SetFailed(key=key, reason="broke")

    @precondition(lambda self: self.is_in(StepState.ROLLING_OUT))
    @rule()
    def pass_deadline(self) -> None:
        self.observer.refills = 0
        self.apply(ev.DeadlinePassed(timeout_s=60.0))
        assert self.is_in(StepState.DRAINING)

    @precondition(lambda self: self.is_in(StepState.DRAINING))
    @rule()
    def idle(self) -> None:
        assert self.apply(ev.LearnerIdle()) == [ev.Update()]

    @precondition(lambda self: self.is_in(StepState.UPDATING))
    @rule(is_empty=st.booleans())
    def update(self, is_empty: bool) -> None:
        version = self.machine.policy_version + (not is_empty)
        commands = self.apply(ev.Updated(policy_version=version, is_empty=is_empty))
        self.empty_steps = self.empty_steps + 1 if is_empty else 0
        assert (ev.Publish(policy_version=version) in commands) is not is_empty
        is_over = self.empty_steps >= 2 or (is_empty and self.observer.is_at_its_limit())
        assert self.observer.is_stopped is is_over

    @precondition(lambda self: self.is_in(StepState.PUBLISHING))
    @rule()
    def publish(self) -> None:
        version = self.machine.policy_version
        assert self.apply(ev.Published(policy_version=version)) == [ev.CloseStep(step=self.step)]

    @precondition(lambda self: not self.is_in(StepState.STOPPED) and self.step >= 2)
    @rule()
    def abandon(self) -> None:
        self.apply(ev.Abandoned(reason="enough"))
        assert self.observer.is_stopped and not self.observer.running

    @precondition(lambda self: self.observer.step_open)
    @rule(data=st.data(), event=st.sampled_from([ev.ContentFinal, ev.RewardKnown]))
    def repeat_after_the_end(self, data: st.DataObject, event: type) -> None:
        """A second terminal event, or content after it, raises and changes nothing."""
        if not self.observer.verdicts:
            return
        key = data.draw(st.sampled_from(sorted(self.observer.verdicts)))
        late = event(key=key, reward=1.0) if event is ev.RewardKnown else event(key=key)
        before = self.machine.waiting_for()
        with pytest.raises(StateError, match=f"{key} is (rewarded|failed)"):
            self.machine.apply(late)
        assert self.machine.waiting_for() == before

    @precondition(lambda self: self.is_in(StepState.STOPPED))
    @rule()
    def restart(self) -> None:
        run = dataclasses.replace(
            self.observer.run, policy_version=self.machine.policy_version, empty_steps=0
        )
        self.journal.append(run)
        self.log.append((run, []))
        self.machine = StepMachine(run)
        self.observer = Observer(run)
        self.empty_steps = 0

    def silent(self) -> list[TrajectoryKey]:
        return sorted(self.observer.running - self.observer.content)

    def graded(self) -> list[TrajectoryKey]:
        return sorted(self.observer.running & self.observer.content)

    @invariant()
    def the_machine_waits_for_what_has_no_verdict(self) -> None:
        if self.is_in(StepState.ROLLING_OUT):
            missing = self.observer.keys - self.observer.verdicts.keys()
            assert self.machine.waiting_for().keys() == missing
            assert self.observer.running, "something can still happen: no deadlock"
        elif self.is_in(StepState.DRAINING):
            assert not self.machine.waiting_for()

    def teardown(self) -> None:
        """However far it got: failures alone end the step, and the journal replays to the same."""
        while self.is_in(StepState.ROLLING_OUT):
            self.apply(ev.AttemptFailed(key=min(self.observer.running), reason="teardown"))
        assert self.is_in(*(set(StepState) - {StepState.ROLLING_OUT}))
        self.journal.close()
        lines = list(read_journal(Path(self.directory.name) / "events.jsonl"))
        assert [line.entry for line in lines] == [event for event, _ in self.log]
        assert list(replay(lines)) == [commands for _, commands in self.log]
        self.directory.cleanup()


def test_every_order_of_events_ends_every_step_with_one_verdict_each() -> None:
    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_back_pressure_opens_the_next_group_with_the_last_verdict_of_one() -> None:
    machine = StepMachine(started(max_open_groups=1))
    commands = machine.apply(opened())
    keys = [fakes.key(index=0), fakes.key(index=1)]
    dispatches = [ev.Dispatch(key=key) for key in keys]
    assert commands == [ev.ReleaseLearner(), ev.OpenGroup(group=0), *dispatches]
    assert len(machine.apply(ev.AttemptFailed(key=keys[0], reason="broke"))) == 1
    commands = machine.apply(ev.AttemptFailed(key=keys[1], reason="broke"))
    assert commands[1:] == [
        ev.OpenGroup(group=1),
        ev.Dispatch(key=fakes.key(group=1, index=0)),
        ev.Dispatch(key=fakes.key(group=1, index=1)),
    ]


def all_tied(machine: StepMachine, step: int, *, refills: int, num_groups: int) -> str | None:
    """A step of one group and its refills, every reward 1; why the run ends after it."""
    commands = machine.apply(opened(step=step, groups=1, refills=refills))
    for group in range(num_groups):
        assert ev.OpenGroup(group=group) in commands
        for index in range(2):
            key = fakes.key(step=step, group=group, index=index)
            machine.apply(ev.ContentFinal(key=key))
            commands = machine.apply(ev.RewardKnown(key=key, reward=1.0))
    assert not any(isinstance(c, ev.OpenGroup) for c in commands)
    assert machine.state is StepState.DRAINING
    machine.apply(ev.LearnerIdle())
    last = machine.apply(ev.Updated(policy_version=0, is_empty=True))[-1]
    return last.reason if isinstance(last, ev.StopRun) else None


def test_groups_that_tie_are_replaced_up_to_the_limit_and_the_run_ends_with_the_reason() -> None:
    reason = all_tied(StepMachine(started(max_empty_steps=9)), 0, refills=2, num_groups=3)
    assert reason == (
        "step 0 had no gradient: the rewards of each of its 3 groups tie, and 2 of them took the "
        "place of others, the limit being run.max_refilled_groups = 2; 6 of 6 attempts have a "
        "reward, 1 in the mean. Take tasks that the policy solves sometimes, raise "
        "sampling.temperature or run.group_size, or raise the limit"
    )


def test_without_refills_groups_that_tie_end_the_run_by_their_steps() -> None:
    machine = StepMachine(started(max_empty_steps=2))
    assert all_tied(machine, 0, refills=0, num_groups=1) is None
    reason = all_tied(machine, 1, refills=0, num_groups=1)
    assert reason == "2 steps in a row, up to step 1, had no gradient"


@pytest.mark.parametrize(
    ("num_waiting", "num_open", "max_open_groups", "expected"),
    [(5, 0, 3, 3), (5, 3, 3, 0), (1, 1, 3, 1), (0, 0, 3, 0)],
)
def test_admission(num_waiting: int, num_open: int, max_open_groups: int, expected: int) -> None:
    assert expected == num_groups_to_open(
        num_waiting=num_waiting, num_open=num_open, max_open_groups=max_open_groups
    )


def test_waiting_for_names_the_trajectories_and_what_they_wait_for() -> None:
    machine = StepMachine(started(max_open_groups=1))
    machine.apply(opened())
    machine.apply(ev.ContentFinal(key=fakes.key(index=0)))
    named = {str(key): state.value for key, state in machine.waiting_for().items()}
    assert named == {
        "step 0 group 0 index 0": "waiting for its verifier",
        "step 0 group 0 index 1": "running",
        "step 0 group 1 index 0": "waiting for its group to open",
        "step 0 group 1 index 1": "waiting for its group to open",
    }


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.ContentFinal(key=fakes.key(group=7)), "step 0 group 7 index 0 is unknown"),
        (ev.ContentFinal(key=fakes.key(step=1)), "step 1 group 0 index 0 is unknown"),
        (ev.RewardKnown(key=fakes.key(), reward=1.0), "is running: a reward is not expected"),
        (ev.LearnerIdle(), "step 0 is waiting for verdicts: an idle learner is not expected"),
        (ev.Updated(policy_version=1, is_empty=False), "an update is not expected"),
        (ev.Updated(policy_version=1, is_empty=True), "policy version 1, expected 0"),
        (ev.Published(policy_version=0), "a publication is not expected"),
        (opened(step=1), "step 0 is waiting for verdicts: opening is not expected"),
        (opened(step=1, policy_version=3), "policy version 3, expected 0"),
    ],
)
def test_an_event_out_of_place_raises_with_names_and_changes_nothing(
    event: ev.Event, message: str
) -> None:
    machine = StepMachine(started())
    machine.apply(opened())
    before = (machine.state, machine.waiting_for())
    with pytest.raises(StateError, match=message):
        machine.apply(event)
    assert (machine.state, machine.waiting_for()) == before


def test_a_stopped_machine_takes_nothing() -> None:
    machine = StepMachine(started())
    machine.apply(ev.Abandoned(reason="enough"))
    with pytest.raises(StateError, match="is stopped: opening is not expected; expected nothing"):
        machine.apply(opened())


def test_the_count_of_empty_steps_is_restored_and_reset() -> None:
    def run_step(machine: StepMachine, step: int, is_empty: bool) -> list[ev.Command]:
        version = machine.policy_version
        machine.apply(opened(step=step, policy_version=version))
        machine.apply(ev.DeadlinePassed(timeout_s=1.0))
        machine.apply(ev.LearnerIdle())
        updated = ev.Updated(policy_version=version + (not is_empty), is_empty=is_empty)
        commands = machine.apply(updated)
        if not is_empty:
            machine.apply(ev.Published(policy_version=version + 1))
        return commands

    machine = StepMachine(started(max_empty_steps=3, empty_steps=2, policy_version=7))
    assert run_step(machine, 10, is_empty=False) == [ev.Publish(policy_version=8)]
    assert machine.empty_steps == 0
    run_step(machine, 11, is_empty=True)
    restored = StepMachine(
        started(max_empty_steps=2, empty_steps=machine.empty_steps, policy_version=8)
    )
    stop = ev.StopRun(reason="2 steps in a row, up to step 12, had no gradient")
    assert run_step(restored, 12, is_empty=True) == [ev.CloseStep(step=12), stop]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1", True])
def test_a_reward_that_is_no_finite_number_is_no_event(reward: object) -> None:
    with pytest.raises(TrajectoryError, match="reward must be"):
        ev.RewardKnown(key=fakes.key(), reward=reward)


def test_the_table_ends_in_states_that_nothing_leaves() -> None:
    left = {state for state, _ in TRANSITIONS}
    ends = {TrajectoryState.REWARDED, TrajectoryState.FAILED, GroupState.CLOSED, StepState.STOPPED}
    assert not left & ends
    assert left | ends == {*TrajectoryState, *GroupState, *StepState}


def test_commands_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ev.OpenGroup(group=0).group = 1
