"""What breaks costs itself: attempts, environments, deadlines, the learner and the engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fakes
import pytest
from test_coordinator import OnContent, World

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.coordinator import events as ev
from thundersync_jax.coordinator.coordinator import Coordinator
from thundersync_jax.coordinator.step_run import AttemptPort, StepResult
from thundersync_jax.rollout.renderer import WordRenderer
from thundersync_jax.rollout.rollout import RolloutRunner
from thundersync_jax.trajectory import Task, TrajectoryKey, Verdict


def test_one_of_64_raises_and_63_train(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if (key.group, key.index) == (3, 5):
            raise ValueError("worker broke")
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    result = World(tmp_path, attempt, groups_per_step=8, group_size=8).run_one()
    failed = [r for r in result.records if r.verdict.reward is None]
    assert [str(r.key) for r in failed] == ["step 0 group 3 index 5"]
    assert "ValueError: worker broke" in failed[0].verdict.failure
    assert result.report.num_failed == 1
    assert result.report.action_tokens == 63 * 3


def test_a_failure_leaves_its_group_s_mean(tmp_path: Path) -> None:
    """Rewards [1, 3, 2, failed] train as [1, 3, 2] do."""

    def attempt_with(rewards: list[float | None]) -> AttemptPort:
        async def attempt(
            key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
        ) -> Verdict:
            on_content(fakes.rollout(key, num_tokens=key.index + 1))
            reward = rewards[key.index]
            return Verdict(failure="broke") if reward is None else Verdict(reward=reward)

        return attempt

    four = World(tmp_path / "4", attempt_with([1, 3, 2, None]), groups_per_step=1, group_size=4)
    three = World(tmp_path / "3", attempt_with([1, 3, 2]), groups_per_step=1, group_size=3)
    assert four.run_one().report.grad_norm == three.run_one().report.grad_norm == 1 / 6


@pytest.mark.parametrize("has_content", [False, True])
def test_the_deadline_fails_the_missing_by_name_and_the_rest_trains(
    tmp_path: Path, has_content: bool
) -> None:
    was_cancelled = []

    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.group == 1 and key.index == 2:
            if has_content:
                on_content(fakes.rollout(key))
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.append(key)
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    world = World(tmp_path, attempt, groups_per_step=2, step_timeout_s=0.3)
    result = world.run_one()
    record = result.records[6]
    assert was_cancelled == [record.key]
    state = "waiting for its verifier" if has_content else "running"
    expected = f"step 0 group 1 index 2 was {state} at the step's deadline of 0.3 s"
    assert record.verdict.failure == expected
    assert result.report.num_failed == 1
    assert world.published == [1]


def test_the_deadline_also_ends_groups_that_never_opened(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.group == 1:
            await asyncio.Event().wait()
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    world = World(tmp_path, attempt, groups_per_step=3, max_open_groups=1, step_timeout_s=0.3)
    result = world.run_one()
    assert result.report.num_failed == 8
    assert result.records[8].dispatched_s is None
    assert "waiting for its group to open" in result.records[8].verdict.failure


def test_an_attempt_that_cancels_itself_fails_at_once(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.index == 0:
            raise asyncio.CancelledError
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    result = World(tmp_path, attempt, groups_per_step=1).run_one()
    assert result.records[0].verdict.failure == (
        "the attempt step 0 group 0 index 0 cancelled itself"
    )


def test_what_a_cancelled_attempt_says_does_not_count(tmp_path: Path) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        if key.index == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                on_content(fakes.rollout(key))
                return Verdict(reward=100.0)
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    result = World(tmp_path, attempt, groups_per_step=1, step_timeout_s=0.3).run_one()
    assert result.records[0].verdict.reward is None
    assert result.report.reward_mean == 3.0


@pytest.mark.parametrize("method", ["open_group", "set_reward", "work", "update"])
def test_an_exception_of_the_learner_reaches_the_caller(tmp_path: Path, method: str) -> None:
    world = World(tmp_path, learner=fakes.FakeLearner(fail_in=method), groups_per_step=2)
    with pytest.raises(RuntimeError, match=f"{method} broke"):
        world.run_one()
    assert isinstance(world.events()[-1], ev.Abandoned)


def test_an_exception_of_publish_reaches_the_caller(tmp_path: Path) -> None:
    world = World(tmp_path, groups_per_step=1)

    async def publish(version: int) -> None:
        raise ConnectionError("no engine")

    world.publish = publish
    with pytest.raises(ConnectionError, match="no engine"):
        world.run_one()


@pytest.mark.parametrize("fault", ["twice", "never", "other"])
def test_an_attempt_port_that_breaks_its_contract_ends_the_run(tmp_path: Path, fault: str) -> None:
    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        reported = fakes.key(step=9) if fault == "other" else key
        for _ in range({"twice": 2, "never": 0, "other": 1}[fault]):
            on_content(fakes.rollout(reported))
        return Verdict(reward=1.0)

    with pytest.raises(RuntimeError, match="step 0 group 0 index 0"):
        World(tmp_path, attempt, groups_per_step=1).run_one()


def test_an_attempt_that_ignores_its_cancellation_is_named_and_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("thundersync_jax.coordinator.step_run.ATTEMPT_END_TIMEOUT_S", 0.05)
    is_over = asyncio.Event()

    async def attempt(
        key: TrajectoryKey, task: Task, prompt_ids: tuple[int, ...], on_content: OnContent
    ) -> Verdict:
        while key.index == 0 and not is_over.is_set():
            try:
                await is_over.wait()
            except asyncio.CancelledError:
                continue
        return await fakes.instant_attempt(key, task, prompt_ids, on_content)

    world = World(tmp_path, attempt, groups_per_step=1, step_timeout_s=0.05)

    async def body(coordinator: Coordinator) -> StepResult:
        result = await world.step(coordinator)
        is_over.set()
        await asyncio.sleep(0.01)
        return result

    assert world.run(body).report.num_failed == 1
    assert "0.05 s after they were cancelled these still run: step 0 group 0 index 0" in caplog.text


def test_broken_environments_fail_their_own_trajectories_only(tmp_path: Path) -> None:
    """One group of each fault of a user's environment beside one that works."""
    suite = fakes.FakeSuite()
    faults = [{"raises": phase} for phase in ("make", "reset", "step", "grade")]
    faults += [{"hangs": phase} for phase in ("reset", "step", "grade")]
    faults += [{"reward": float("nan")}, {"answer": "nonsense"}, {"cancels_itself": "step"}]
    tasks = [fakes.task("works", done_after=2)]
    tasks += [fakes.task(str(fault), **{"done_after": 2, **fault}) for fault in faults]
    runner = RolloutRunner(
        client=fakes.FakePolicyClient(["say 1 <eos>"]),
        suite=suite,
        renderer=WordRenderer(fakes.FakeSuite()),
        sandboxes=None,
        limits=RolloutSection(reset_timeout_s=0.2, tool_timeout_s=0.2, grade_timeout_s=0.2),
        sampling=SamplingSection(),
        run_seed=0,
        max_context=64,
    )
    world = World(tmp_path, runner.run, groups_per_step=len(tasks))

    async def body(coordinator: Coordinator) -> StepResult:
        return await coordinator.run_step(0, tasks, [(0,)] * len(tasks))

    result = world.run(body)
    assert [r.verdict.reward for r in result.records] == [2.0] * 4 + [None] * 4 * len(faults)
    for record in result.records[4:]:
        assert str(record.key) in record.verdict.failure
    assert len(suite.closed) == len(suite.attempts) == 4 * len(faults)
    assert result.report.num_failed == 4 * len(faults)
