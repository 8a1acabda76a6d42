"""A parked row, one in the host's memory and one prefilled again give the same tokens."""

from __future__ import annotations

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_cases import (
    CONFIG,
    ROW_LENGTH,
    SERVING,
    fresh_engine,
    key,
    learner_logprobs,
    play,
    request,
    run,
    warm_engine,
)

from thundersync_jax.serving.memory import token_bytes
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.transport.messages import FinishReason, SampleResult, ServingStatistics
from thundersync_jax.transport.text_stream import TextStream

pytestmark = pytest.mark.optimized

NUM_SESSIONS, NUM_TURNS = 12, 4
ROW_BYTES = ROW_LENGTH * 2 * 2 * 2 * 8 * 4  # keys and values, layers, kv heads, head dim
Played = list[tuple[tuple[int, ...], list[SampleResult]]]


@functools.cache
def played(parked_rows: int, host_rows: int) -> tuple[Played, ServingStatistics]:
    """Twelve sessions of four turns on four slots, in lockstep: eight rows of them are parked."""
    worker = ServingWorker(
        fresh_engine(parked_bytes=parked_rows * ROW_BYTES, host_bytes=host_rows * ROW_BYTES)
    )
    worker.start()
    contexts = [(1, 2, i % 13) for i in range(NUM_SESSIONS)]
    results: list[list[SampleResult]] = [[] for _ in range(NUM_SESSIONS)]

    async def main() -> None:
        for turn in range(NUM_TURNS):
            asked = (request(i, context, max_tokens=3) for i, context in enumerate(contexts))
            for i, result in enumerate(await asyncio.gather(*map(worker.sample, asked))):
                results[i].append(result)
                contexts[i] += result.token_ids
                if turn + 1 < NUM_TURNS:
                    contexts[i] += (5, turn)
        await asyncio.gather(*(worker.release(key(i)) for i in range(NUM_SESSIONS)))

    run(main())
    worker.close()
    return list(zip(contexts, results, strict=True)), worker.statistics()


@functools.cache
def never_parked() -> Played:
    """One session at a time: each keeps its slot."""
    worker = ServingWorker(fresh_engine())
    worker.start()
    trajectories: Played = []

    async def main() -> None:
        for i in range(NUM_SESSIONS):
            trajectories.append(await play(worker, i, NUM_TURNS, max_tokens=3))

    run(main())
    worker.close()
    assert worker.statistics().rows_parked == 0
    return trajectories


@pytest.mark.parametrize(("parked_rows", "host_rows"), [(99, 0), (2, 99), (0, 99), (3, 2), (0, 0)])
def test_tokens_do_not_depend_on_where_rows_were_kept(parked_rows: int, host_rows: int) -> None:
    trajectories, counts = played(parked_rows, host_rows)
    for (context, results), (want_context, want) in zip(trajectories, never_parked(), strict=True):
        assert context == want_context
        for result, wanted in zip(results, want, strict=True):
            np.testing.assert_allclose(result.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
        logprobs = learner_logprobs(context)
        np.testing.assert_allclose(results[0].logprobs, logprobs[3:6], rtol=0, atol=1e-5)
    capacity = parked_rows + host_rows
    assert (counts.rows_resumed > 0) == (capacity > 0)
    assert (counts.rows_to_host > 0) == (host_rows > 0)
    assert (counts.rows_dropped > 0) == (capacity < NUM_SESSIONS - SERVING.num_slots)
    assert counts.turns_ended == NUM_SESSIONS * NUM_TURNS
    assert counts.tokens_sampled == 3 * counts.turns_ended


def test_what_is_not_lost_is_not_prefilled_again() -> None:
    """A turn runs its observation and the token that was sampled last, and nothing else."""
    _, counts = played(99, 0)
    assert counts.tokens_appended == NUM_SESSIONS * (3 + 2 * (NUM_TURNS - 1))
    assert counts.tokens_prefilled == counts.tokens_appended + NUM_SESSIONS * (NUM_TURNS - 1)


def test_a_stored_row_is_bit_for_bit_the_slots() -> None:
    engine = warm_engine()
    state = engine.init_decode_state()
    tokens = tuple(i % 13 for i in range(9))
    for piece in engine.cut(1, 0, tokens, request(0, tokens).sampling):
        state = engine.extend(engine.weights, state, [piece])
    row = engine.take_row(state, 1)
    before = jax.tree.map(np.asarray, row)
    on_host = engine.row_to_host(row, len(tokens))
    for at, stored in ((3, row), (0, on_host)):
        state = engine.put_row(state, stored, at)
        again = engine.row_to_host(engine.take_row(state, at), len(tokens))
        for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(got, want[:, :, : len(tokens)])
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(on_host))
    assert num_bytes == token_bytes(CONFIG) * len(tokens)


def test_a_groups_prompt_is_prefilled_once_and_its_members_differ() -> None:
    worker = ServingWorker(fresh_engine())
    worker.start()
    prompt = tuple(i % 13 for i in range(17))
    num_members = 10

    async def main() -> None:
        results = await asyncio.gather(
            *(worker.sample(request(i, prompt, max_tokens=6)) for i in range(num_members))
        )
        assert len({result.token_ids for result in results}) > 1
        for i, result in enumerate(results):
            want = learner_logprobs(prompt + result.token_ids)[len(prompt) :]
            np.testing.assert_allclose(result.logprobs, want, rtol=0, atol=1e-5)
            await worker.release(key(i))

    run(main())
    worker.close()
    counts = worker.statistics()
    assert counts.prompts_shared == num_members - 1
    assert counts.tokens_prefilled == len(prompt) + num_members - 1


def test_a_long_context_delays_others_by_few_calls_only() -> None:
    """Turns that are under way end while a context of many pieces is still being prefilled."""
    worker = ServingWorker(fresh_engine(extend_calls=1))
    worker.start()
    ended: list[int] = []

    async def sample(index: int, length: int, max_tokens: int) -> None:
        context = (index,) * length
        await worker.sample(request(index, context, max_tokens=max_tokens))
        ended.append(index)
        await worker.release(key(index))

    async def main() -> None:
        await asyncio.gather(sample(0, 1, 4), sample(1, ROW_LENGTH - 1, 1))

    run(main())
    worker.close()
    assert ended == [0, 1]


def test_a_stop_string_ends_the_turn_and_the_next_one_goes_on_from_there() -> None:
    """The tokens are those of an unstopped turn, and so is what follows them."""
    worker = ServingWorker(
        fresh_engine(), lambda: TextStream(lambda ids: "".join(chr(97 + i) for i in ids))
    )
    worker.start()

    async def main() -> None:
        free = await worker.sample(request(0, (1, 2), seed=4, max_tokens=9))
        text = "".join(chr(97 + i) for i in free.token_ids)
        for begin, end in ((0, 1), (1, 3), (2, 4), (3, 7)):
            stop = text[begin:end]
            kept = text.index(stop) + len(stop)
            asked = request(1, (1, 2), seed=4, max_tokens=9, stop_strings=("zz", stop))
            first = await worker.sample(asked)
            assert first.token_ids == free.token_ids[:kept]
            assert first.finish_reason is FinishReason.STOP
            context = (1, 2, *first.token_ids)
            rest = await worker.sample(request(1, context, seed=4, max_tokens=9 - kept))
            assert first.token_ids + rest.token_ids == free.token_ids
            joined = first.logprobs + rest.logprobs
            np.testing.assert_allclose(joined, free.logprobs, rtol=0, atol=1e-5)
            await worker.release(key(1))
        await worker.release(key(0))

    run(main())
    worker.close()


def test_nothing_compiles_while_rows_move_and_weights_change() -> None:
    """LESSONS 21 and 28, through the whole worker."""
    worker = ServingWorker(fresh_engine(parked_bytes=2 * ROW_BYTES, host_bytes=4 * ROW_BYTES))
    worker.start()
    params = jax.tree.map(jnp.copy, worker._engine.weights.current().params)
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    async def main() -> None:
        for version in (8, 9):
            await asyncio.gather(*(play(worker, i, 3) for i in range(11)))
            await asyncio.to_thread(worker.publish, params, version)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(main())
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    worker.close()
