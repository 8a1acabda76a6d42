"""A session is a lease: new weights wait for it, for a stated time, and nobody mixes versions."""

from __future__ import annotations

import asyncio
import time

import pytest
from serving_cases import (
    CONFIG,
    ROW_LENGTH,
    SERVING,
    fresh_engine,
    key,
    play,
    policy,
    request,
    run,
)

from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.transport.client import ServingError

pytestmark = pytest.mark.optimized


def start(**serving: object) -> ServingWorker:
    worker = ServingWorker(fresh_engine(**serving))
    worker.start()
    return worker


async def publish(worker: ServingWorker, version: int) -> None:
    await asyncio.to_thread(worker.publish, policy(), version)


def test_requests_before_the_first_weights_are_refused() -> None:
    worker = ServingWorker(PolicyEngine(CONFIG, SERVING, ROW_LENGTH))
    worker._engine._programs = dict(fresh_engine()._programs)
    worker.start()

    async def main() -> None:
        with pytest.raises(ServingError, match="publish"):
            await worker.sample(request(0, (1,)))
        worker.publish(policy(), 3)
        assert set((await worker.sample(request(0, (1,)))).policy_versions) == {3}
        await worker.release(key(0))

    run(main())
    worker.close()


def test_twenty_swaps_under_load_mix_no_versions_and_no_wait_exceeds_its_deadline() -> None:
    worker = start()
    is_done = asyncio.Event()
    versions: list[int] = []

    async def attempt_for_ever(lane: int) -> None:
        number = 0
        while not is_done.is_set():
            index = lane + 100 * number
            _, results = await play(worker, index, 1 + (lane + number) % 4)
            [version] = {v for result in results for v in result.policy_versions}
            versions.append(version)
            number += 1

    async def main() -> None:
        lanes = [asyncio.create_task(attempt_for_ever(lane)) for lane in range(12)]
        for version in range(8, 28):
            await asyncio.sleep(0.01)
            began_s = time.monotonic()
            await publish(worker, version)
            assert time.monotonic() - began_s < SERVING.publish_timeout_s
        is_done.set()
        await asyncio.gather(*lanes)
        assert set(versions) >= set(range(8, 27))
        assert worker.statistics().num_publishes == 20

    run(main())
    worker.close()


def test_new_sessions_wait_for_new_weights_and_open_ones_go_on() -> None:
    worker = start()

    async def main() -> None:
        first = await worker.sample(request(0, (1, 2)))
        publishing = asyncio.create_task(publish(worker, 8))
        while worker._publishing is None:
            await asyncio.sleep(0.001)
        new = asyncio.create_task(worker.sample(request(1, (1, 2))))
        context = (1, 2, *first.token_ids)
        second = await worker.sample(request(0, context))
        assert set(second.policy_versions) == {7}
        assert not publishing.done() and not new.done()
        await worker.release(key(0))
        assert set((await new).policy_versions) == {8}
        await publishing
        await worker.release(key(1))

    run(main())
    worker.close()


def test_a_session_that_never_ends_keeps_the_old_weights_and_is_named() -> None:
    worker = start(publish_timeout_s=0.3)

    async def main() -> None:
        first = await worker.sample(request(5, (1, 2)))
        began_s = time.monotonic()
        publishing = asyncio.create_task(publish(worker, 8))
        while worker._publishing is None:
            await asyncio.sleep(0.001)
        new = asyncio.create_task(worker.sample(request(1, (1, 2))))
        with pytest.raises(ServingError, match=r"(?s)version 9.*version 8 waits.*one at a time"):
            await publish(worker, 9)
        with pytest.raises(ServingError, match=r"(?s)version 8.*0\.3 s.*step 0 group 0 index 5"):
            await publishing
        assert 0.3 <= time.monotonic() - began_s < 5
        assert set((await new).policy_versions) == {7}
        again = await worker.sample(request(5, (1, 2, *first.token_ids)))
        assert set(again.policy_versions) == {7}
        for index in (5, 1):
            await worker.release(key(index))
        await publish(worker, 8)
        assert set((await worker.sample(request(1, (1,)))).policy_versions) == {8}
        await worker.release(key(1))

    run(main())
    worker.close()


def test_a_held_turn_that_is_cancelled_or_closed_gets_its_answer() -> None:
    worker = start(publish_timeout_s=10.0)

    async def main() -> None:
        await worker.sample(request(0, (1,)))
        publishing = asyncio.create_task(publish(worker, 8))
        while worker._publishing is None:
            await asyncio.sleep(0.001)
        held = [asyncio.create_task(worker.sample(request(i, (1,)))) for i in (1, 2)]
        while len(worker._held) < 2:
            await asyncio.sleep(0.001)
        held[0].cancel()
        await asyncio.gather(held[0], return_exceptions=True)
        while len(worker._held) > 1:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(worker.close)
        for waiting in (held[1], publishing):
            with pytest.raises(ServingError, match="closed"):
                await waiting

    run(main())


def test_a_request_for_another_version_is_refused_by_name() -> None:
    worker = start()

    async def main() -> None:
        asked = request(3, (1,), policy_version=6)
        with pytest.raises(ServingError, match=r"(?s)index 3 asks for version 6.*of version 7"):
            await worker.sample(asked)
        assert worker._table.open_sessions == ()
        await worker.sample(request(3, (1,), policy_version=7))
        await worker.release(key(3))

    run(main())
    worker.close()


def test_stored_rows_die_with_their_version() -> None:
    """LESSONS 22: the same prompt is prefilled anew by the new weights."""
    worker = start()

    async def main() -> None:
        for version in (7, 8):
            turns = (worker.sample(request(index, (1, 2, 3, 4, 5))) for index in (0, 1))
            await asyncio.gather(*turns)
            await asyncio.gather(*(worker.release(key(index)) for index in (0, 1)))
            counts = worker.statistics()
            assert counts.prompts_shared == version - 6
            assert counts.tokens_prefilled == 6 * (version - 6)
            if version == 7:
                await publish(worker, 8)

    run(main())
    worker.close()
