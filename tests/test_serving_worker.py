"""`ServingWorker` keeps what `PolicyClient` promises: sessions, limits, cancellation, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from serving_cases import (
    ROW_LENGTH,
    SERVING,
    fresh_engine,
    key,
    learner_logprobs,
    play,
    policy,
    request,
    run,
)

from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.transport.client import ServingError
from thundersync_jax.transport.messages import FinishReason

pytestmark = pytest.mark.optimized


@pytest.fixture
def worker() -> Iterator[ServingWorker]:
    serving = ServingWorker(fresh_engine())
    serving.start()
    yield serving
    serving.close()


def test_many_sessions_on_few_slots_sample_what_the_learner_computes(worker: ServingWorker) -> None:
    """Eleven trajectories of four turns on four slots: log-probabilities within 1e-5."""

    async def main() -> None:
        played = await asyncio.gather(*(play(worker, i, 4, max_tokens=3) for i in range(11)))
        for context, results in played:
            want = learner_logprobs(context)
            at = 3
            for result in results:
                end = at + len(result.token_ids)
                assert context[at:end] == result.token_ids and len(result.token_ids) == 3
                np.testing.assert_allclose(result.logprobs, want[at:end], rtol=0, atol=1e-5)
                assert set(result.policy_versions) == {7}
                assert result.finish_reason is FinishReason.LENGTH
                at = end + 2
        intervals: dict[int, list[tuple[float, float]]] = {}
        for _, results in played:
            for result in results:
                intervals.setdefault(result.slot, []).append((result.started_s, result.ended_s))
        for busy in intervals.values():
            edges = [edge for interval in sorted(busy) for edge in interval]
            assert edges == sorted(edges)

    run(main())


def test_a_trajectory_does_not_depend_on_its_company(worker: ServingWorker) -> None:
    async def main() -> None:
        alone = await play(worker, 3, 3)
        crowd = await asyncio.gather(*(play(worker, i, 3) for i in range(8)))
        assert crowd[3][0] == alone[0]
        assert len({context[3:] for context, _ in crowd}) > 1

    run(main())


def test_cutting_a_turn_in_two_changes_no_token(worker: ServingWorker) -> None:
    """A draw follows from seed and absolute position: no turn repeats the draws of another."""

    async def main() -> None:
        whole = await worker.sample(request(0, (1, 2), seed=4, max_tokens=9))
        first = await worker.sample(request(1, (1, 2), seed=4, max_tokens=4))
        context = (1, 2, *first.token_ids)
        second = await worker.sample(request(1, context, seed=4, max_tokens=5))
        assert first.token_ids + second.token_ids == whole.token_ids
        joined = first.logprobs + second.logprobs
        np.testing.assert_allclose(joined, whole.logprobs, rtol=0, atol=1e-5)
        await asyncio.gather(*(worker.release(key(i)) for i in range(2)))

    run(main())


@pytest.mark.parametrize(
    ("length", "num_sampled"), [(ROW_LENGTH - 1, 1), (ROW_LENGTH, 0), (ROW_LENGTH + 1, None)]
)
def test_the_context_limit_has_three_defined_outcomes(
    worker: ServingWorker, length: int, num_sampled: int | None
) -> None:
    """LESSONS 17."""

    async def main() -> None:
        asked = request(0, (1,) * length, max_tokens=5)
        if num_sampled is None:
            with pytest.raises(ServingError, match=f"step 0 group 0 index 0.*{ROW_LENGTH + 1}"):
                await worker.sample(asked)
        else:
            result = await worker.sample(asked)
            assert len(result.token_ids) == num_sampled
            assert result.finish_reason is FinishReason.CONTEXT
        await worker.release(key(0))

    run(main())


def test_a_cancelled_turn_frees_its_slot_and_its_session(worker: ServingWorker) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(worker.sample(request(i, (1,), max_tokens=ROW_LENGTH)))
            for i in range(2 * SERVING.num_slots)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        played = await asyncio.gather(*(play(worker, i, 2) for i in range(SERVING.num_slots)))
        for context, results in played:
            first = results[0]
            want = learner_logprobs(context)[3 : 3 + len(first.token_ids)]
            np.testing.assert_allclose(first.logprobs, want, rtol=0, atol=1e-5)

    run(main())


def test_a_deadline_names_the_session_and_what_it_waited_for() -> None:
    engine = fresh_engine(StuckEngine, request_timeout_s=1.0)
    worker = ServingWorker(engine)
    worker.start()

    async def main() -> None:
        engine.may_go.clear()
        tasks = [asyncio.create_task(worker.sample(request(i, (1,)))) for i in range(9)]
        with pytest.raises(ServingError, match=r"index 8.*waiting for a slot.* 1\.0 s"):
            await tasks[8]
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.may_go.set()
        await worker.sample(request(10, (1,)))
        await worker.release(key(10))

    run(main())
    worker.close()


class StuckEngine(PolicyEngine):
    """Its `generate` waits until it may go on."""

    has_begun, may_go = threading.Event(), threading.Event()

    def generate(self, *args: object, **kwargs: object) -> object:
        self.has_begun.set()
        assert self.may_go.wait(60)
        return super().generate(*args, **kwargs)


class BrokenEngine(PolicyEngine):
    """Fails in `generate`, once it is told to."""

    is_broken = threading.Event()

    def generate(self, *args: object, **kwargs: object) -> object:
        if self.is_broken.is_set():
            raise RuntimeError("the device is gone")
        return super().generate(*args, **kwargs)


def test_an_exception_in_the_thread_reaches_every_waiter_and_the_owner() -> None:
    engine = fresh_engine(BrokenEngine)
    worker = ServingWorker(engine)
    worker.start()

    async def main() -> None:
        await worker.sample(request(0, (1,)))
        engine.is_broken.set()
        answers = await asyncio.gather(
            *(worker.sample(request(i, (1,))) for i in range(1, 7)), return_exceptions=True
        )
        assert all("the device is gone" in str(answer) for answer in answers), answers
        with pytest.raises(ServingError, match="the device is gone"):
            await worker.sample(request(8, (1,)))
        await worker.release(key(0))

    run(main())
    _raises_the_failure(lambda: worker.publish(policy(), 1))
    _raises_the_failure(worker.close)


def _raises_the_failure(call: Callable[[], None]) -> None:
    with pytest.raises(ServingError, match="the device is gone") as caught:
        call()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_closing_refuses_turns_in_flight_and_later_ones() -> None:
    engine = fresh_engine(StuckEngine)
    worker = ServingWorker(engine)
    with pytest.raises(ServingError, match=r"start\(\)"):
        worker.publish(policy(), 1)
    worker.start()

    async def main() -> None:
        engine.may_go.clear()
        engine.has_begun.clear()
        turns = [
            asyncio.create_task(worker.sample(request(i, (1,), max_tokens=ROW_LENGTH)))
            for i in range(SERVING.num_slots + 2)
        ]
        assert await asyncio.to_thread(engine.has_begun.wait, 60)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        while worker._thread._commands.empty():
            await asyncio.sleep(0.001)
        engine.may_go.set()
        await closing
        for turn in turns:
            with pytest.raises(ServingError, match="closed"):
                await turn
        with pytest.raises(ServingError, match="not running"):
            await worker.sample(request(0, (1,)))

    run(main())
    worker.close()
