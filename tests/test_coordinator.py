"""The coordinator's shell with real tasks and a real learner thread."""

from __future__ import annotations

import asyncio
import cProfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import fakes
import pytest

from thundersync_jax.config_sections import RunSection
from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.coordinator import Coordinator, StepAbandoned
from thundersync_jax.coordinator.decode_priority import DecodePriority
from thundersync_jax.coordinator.group_tracker import StateError
from thundersync_jax.coordinator.journal import Journal, read_journal
from thundersync_jax.coordinator.step_run import AttemptPort, StepResult
from thundersync_jax.trajectory import Rollout, Task, TrajectoryKey, TrajectoryRecord, Verdict

OnContent = Callable[[Rollout], None]
Body = Callable[[Coordinator], Coroutine[Any, Any, Any]]


class World:
    """A coordinator over fakes; `run` gives it a loop, and leaves no task behind."""

    def __init__(
        self,
        path: Path,
        attempts: AttemptPort = fakes.instant_attempt,
        learner: fakes.FakeLearner | None = None,
        priority: DecodePriority | None = None,
        **run: object,
    ) -> None:
        self.priority = priority or DecodePriority(lambda: 0, 0.0)
        self.learner = learner or fakes.FakeLearner()
        self.journal = Journal(path / "events.jsonl", time.monotonic)
        self.path = path / "events.jsonl"
        self.published: list[int] = []
        self.committed: list[list[TrajectoryKey]] = []
        self.run_section = RunSection(**{"group_size": 4, **run})
        self.attempts = attempts
        self.num_groups = self.run_section.groups_per_step

    def commit(self, records: Sequence[TrajectoryRecord]) -> None:
        assert "update" not in self.learner.names()[-1:]
        self.committed.append([r.key for r in records])

    async def publish(self, version: int) -> None:
        self.published.append(version)

    def run(self, body: Body) -> Any:
        async def main() -> Any:
            self.journal.start()
            coordinator = Coordinator(
                run=self.run_section,
                learner=self.learner,
                attempts=self.attempts,
                publish=self.publish,
                commit=self.commit,
                journal=self.journal,
                priority=self.priority,
            )
            coordinator.start()
            try:
                return await asyncio.wait_for(body(coordinator), 20)
            finally:
                await coordinator.close()
                self.journal.close()
                assert asyncio.all_tasks() == {asyncio.current_task()}

        return asyncio.run(main())

    async def step(self, coordinator: Coordinator, step: int = 0) -> StepResult:
        tasks = [fakes.task(f"task {group}") for group in range(self.num_groups)]
        prompts = [(0, group) for group in range(self.num_groups)]
        return await coordinator.run_step(step, tasks, prompts)

    def run_one(self) -> StepResult:
        return self.run(self.step)

    def events(self) -> list[object]:
        return [line.entry for line in read_journal(self.path)]


def test_a_step_trains_every_trajectory_once_and_publishes(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=3)
    result = world.run_one()
    assert world.published == [1]
    assert world.committed == [[r.key for r in result.records]]
    assert result.report.num_trajectories == 12
    assert [r.verdict.reward for r in result.records] == [1.0, 2.0, 3.0, 4.0] * 3
    assert [r.task_id for r in result.records][::4] == ["task 0", "task 1", "task 2"]
    calls = world.learner.calls
    assert [c for c in calls if c[0] == "open_group"] == [
        ("open_group", f"task {g}", (0, g), 4) for g in range(3)
    ]
    assert world.learner.names().count("set_reward") == 12
    assert result.opened_s <= result.rollout_s <= result.last_reward_s
    assert result.last_reward_s <= result.updated_s <= result.published_s


def test_steps_follow_each_other_and_versions_count_up(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=2)

    async def three_steps(coordinator: Coordinator) -> list[int]:
        return [(await world.step(coordinator, s)).report.policy_version for s in range(3)]

    assert world.run(three_steps) == [1, 2, 3]
    assert world.published == [1, 2, 3]


def test_every_learner_call_is_on_one_other_thread(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=2)

    async def body(coordinator: Coordinator) -> None:
        await world.step(coordinator)
        world.learner.threads.add(await coordinator.call_learner(threading.get_ident))

    world.run(body)
    assert len(world.learner.threads) == 1
    assert threading.get_ident() not in world.learner.threads


def test_a_blocking_learner_does_not_block_the_loop(tmp_path: Path) -> None:
    learner = fakes.FakeLearner(program_s=0.4)
    result = World(tmp_path, learner=learner, groups_per_step=1, group_size=2).run_one()
    assert result.updated_s - result.opened_s > 0.8
    assert result.max_loop_lag_s < 0.3


def test_a_blocked_loop_shows_in_the_lag(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.index == 0:
            time.sleep(0.2)
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    assert World(tmp_path, attempt, groups_per_step=1).run_one().max_loop_lag_s > 0.1


@pytest.mark.parametrize("mode", ["stream", "barrier"])
def test_stream_works_while_attempts_run_and_barrier_only_after(tmp_path: Path, mode: str) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.index == 3:
            await asyncio.sleep(0.05)
            while mode == "stream" and len(world.learner.program_times_s) < 3:
                await asyncio.sleep(0.005)
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    world = World(tmp_path, attempt, groups_per_step=1, mode=mode)
    result = world.run_one()
    early = [t for t in world.learner.program_times_s if t < result.last_reward_s]
    assert len(early) == (3 if mode == "stream" else 0)
    assert len(world.learner.program_times_s) == 4


def test_five_empty_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        return Verdict(failure="no sandbox")

    world = World(tmp_path, attempt, groups_per_step=1)

    async def until_stop(coordinator: Coordinator) -> tuple[int, str | None]:
        step = 0
        while coordinator.stop_reason is None:
            result = await world.step(coordinator, step)
            assert result.published_s is None
            step += 1
        return step, coordinator.stop_reason

    reason = "5 steps in a row, up to step 4, had no gradient"
    assert world.run(until_stop) == (5, reason)
    assert world.published == []


def test_request_stop_finishes_the_step(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=1)

    async def body(coordinator: Coordinator) -> str | None:
        running = asyncio.create_task(world.step(coordinator))
        await asyncio.sleep(0)
        coordinator.request_stop("interrupted")
        await running
        return coordinator.stop_reason

    assert world.run(body) == "interrupted"
    assert world.published == [1]


def test_only_one_step_runs_at_a_time(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=1)

    async def body(coordinator: Coordinator) -> int:
        running = asyncio.create_task(world.step(coordinator))
        await asyncio.sleep(0)
        with pytest.raises(StateError, match="step 1 cannot run beside another"):
            await world.step(coordinator, 1)
        return (await running).report.num_trajectories

    assert world.run(body) == 4


@pytest.mark.parametrize("how", ["abandon", "cancel"])
def test_abandoning_cancels_every_attempt_and_leaves_none(tmp_path: Path, how: str) -> None:
    alive = set()

    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        alive.add(key)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            alive.discard(key)
        raise AssertionError("unreachable")

    world = World(tmp_path, attempt, groups_per_step=2)

    async def body(coordinator: Coordinator) -> None:
        running = asyncio.create_task(world.step(coordinator))
        await asyncio.sleep(0.05)
        assert len(alive) == 8 == len(coordinator.waiting_for())
        if how == "abandon":
            coordinator.abandon("interrupted twice")
            with pytest.raises(StepAbandoned, match="step 0: interrupted twice"):
                await running
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert coordinator.stop_reason is not None
        assert not coordinator.waiting_for()

    world.run(body)
    assert not alive
    assert isinstance(world.events()[-1], ev.Abandoned)


def test_what_an_attempt_costs_the_shell_does_not_grow_with_the_step(tmp_path: Path) -> None:
    """Counted in calls: 12 groups of 12 make at most 4.4 times as many as 3 groups."""

    def num_calls(num_groups: int) -> int:
        world = World(tmp_path / str(num_groups), groups_per_step=num_groups, group_size=12)
        profile = cProfile.Profile()
        profile.enable()
        world.run(world.step)
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    assert num_calls(12) <= 4.4 * num_calls(3)


def test_a_long_call_waits_until_nothing_decodes(tmp_path: Path) -> None:
    """Group 0 is ready while group 1 still decodes: the learner's call comes after that."""
    decoding = {"rows": 1}
    ended_s: list[float] = []

    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.group == 1:
            await asyncio.sleep(0.2)
            decoding["rows"] = 0
            ended_s.append(time.monotonic())
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    learner = fakes.FakeLearner(program_s=0.02)
    priority = DecodePriority(lambda: decoding["rows"], 0.01)
    world = World(tmp_path, attempt, learner, priority, groups_per_step=2)
    result = world.run_one()
    assert result.report.num_trajectories == 8
    assert min(learner.program_times_s) > min(ended_s)
    assert result.decode_stall_s == 0


def test_short_calls_run_beside_decode_and_are_counted(tmp_path: Path) -> None:
    learner = fakes.FakeLearner(program_s=0.01)
    priority = DecodePriority(lambda: 3, 0.5)
    result = World(tmp_path, learner=learner, priority=priority, groups_per_step=1).run_one()
    assert result.decode_stall_s >= 4 * 0.01


def test_a_quiet_step_says_what_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.index == 2:
            await asyncio.sleep(0.5)
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    World(tmp_path, attempt, groups_per_step=1, watchdog_s=0.1).run_one()
    warnings = [record.getMessage() for record in caplog.records]
    assert any("group 0 index 2 (running)" in text for text in warnings), warnings
