"""The decode loop against the engine that it drives, and with tools against without.

  * One turn: 8 x 32 requests of 32 to 64 tokens through the loop, and through a bare loop over the
    same compiled programs, with the same rule for when a call ends. Its ratio is what queues,
    sessions, futures and the event loop cost.
  * Turns with tools: 128 clients on 32 slots run 256 trajectories, in groups of 8 with one prompt
    each; between two turns is a tool of 0.3 s. The same work runs with tools of 0 s. The rates are
    those until the last trajectory begins, so that 128 are live at all times; the ratio of the
    whole runs, which end with fewer than slots, is given beside it.
Every figure is the median of paired repetitions in one process, in alternating order.
`logprob_gap_max` is over all sampled tokens of a run with tools, whose rows were parked, moved and
extended: the sampler against one full forward of the model.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.benchmarks.report import Report
from thundersync_jax.config_serving import ServingSection
from thundersync_jax.learner.compilation import compile_apart, temporary_cache
from thundersync_jax.model import transformer
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.serving.decode_state import Piece
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.slots import until_ended
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.trajectory import TrajectoryKey
from thundersync_jax.transport.messages import SampleRequest, SamplingParams, ServingStatistics

NUM_SLOTS, LIVE_PER_SLOT, REQUESTS_PER_SLOT, GROUP_SIZE = 32, 4, 8, 8
PROMPT_TOKENS, OBSERVATION_TOKENS, MIN_OUTPUT, MAX_OUTPUT = 24, 15, 32, 64
NUM_TURNS, TRAJECTORIES_PER_CLIENT = 3, 2
TOOL_S = 0.3
NUM_PAIRED = 5
VOCAB_SIZE = 512
NUM_LIVE, NUM_REQUESTS = NUM_SLOTS * LIVE_PER_SLOT, NUM_SLOTS * REQUESTS_PER_SLOT
ROW_LENGTH = PROMPT_TOKENS + NUM_TURNS * (MAX_OUTPUT + OBSERVATION_TOKENS)


def model() -> TransformerConfig:
    small = preset("tiny", vocab_size=VOCAB_SIZE)
    return dataclasses.replace(
        small, num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384
    )


def section() -> ServingSection:
    return ServingSection(
        num_slots=NUM_SLOTS, steps_per_sync=8, extend_rows=4, extend_buckets=(16, 32)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What one client got: all its tokens, and which of them were sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # NaN where the token was given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One piece of work through the loop.

    Attributes:
      counts: until all was done.
      full_s, full_tokens: until the last trajectory began, and what had been sampled by then.
    """

    elapsed_s: float
    counts: ServingStatistics
    full_s: float
    full_tokens: int
    trajectories: tuple[Trajectory, ...]

    @property
    def full_tokens_per_s(self) -> float:
        return self.full_tokens / self.full_s


def make_engine() -> PolicyEngine:
    engine = PolicyEngine(model(), section(), ROW_LENGTH)
    engine.warm_up()
    return engine


def run() -> Report:
    """Medians over paired repetitions."""
    with temporary_cache():
        compile_apart(make_engine)
        engine = make_engine()
    params = transformer.init_params(model(), 0)
    engine.weights.publish(params, 0)
    worker = ServingWorker(engine)
    worker.start()
    try:
        results = _measure(engine, worker)
    finally:
        worker.close()
    config = {"model": dataclasses.asdict(model()), "serving": dataclasses.asdict(section())} | {
        "live_trajectories": NUM_LIVE,
        "turns": NUM_TURNS,
        "tool_s": TOOL_S,
        "repetitions": NUM_PAIRED,
    }
    return Report(benchmark="serving", config=config, results=results)


def _measure(engine: PolicyEngine, worker: ServingWorker) -> dict[str, float]:
    bare(engine, seed=-1)
    through(worker, seed=-1, num_turns=1)
    engine_s, loops, waits, tools = [], [], [], []
    for pair in range(NUM_PAIRED):
        runs = [
            lambda seed: engine_s.append(bare(engine, seed=seed)),
            lambda seed: loops.append(through(worker, seed=seed, num_turns=1)),
            lambda seed: waits.append(through(worker, seed=seed, num_turns=NUM_TURNS)),
            lambda seed: tools.append(
                through(worker, seed=seed, num_turns=NUM_TURNS, tool_s=TOOL_S)
            ),
        ]
        for measure in runs if pair % 2 else reversed(runs):
            measure(pair)
    over_engine = [s / loop.elapsed_s for s, loop in zip(engine_s, loops, strict=True)]
    pairs = list(zip(tools, waits, strict=True))
    with_tools = [t.full_tokens_per_s / w.full_tokens_per_s for t, w in pairs]
    counts = tools[-1].counts
    return {
        "loop_tokens_over_engine_tokens": statistics.median(over_engine),
        "slot_utilization": statistics.median(loop.counts.slot_utilization for loop in loops),
        "tokens_per_s": statistics.median(x.counts.tokens_sampled / x.elapsed_s for x in loops),
        "logprob_gap_max": logprob_gap(engine, tools[-1].trajectories),
        "prefill_tokens_per_new_token": counts.tokens_prefilled / counts.tokens_appended,
        "parked_over_slots": counts.max_rows_stored / NUM_SLOTS,
        "tools_tokens_over_no_tools_tokens": statistics.median(with_tools),
        "tools_whole_run": statistics.median(w.elapsed_s / t.elapsed_s for t, w in pairs),
        "tools_tokens_per_s": statistics.median(t.full_tokens_per_s for t in tools),
        "tools_slot_utilization": statistics.median(t.counts.slot_utilization for t in tools),
        "loop_tokens_over_engine_tokens_min": min(over_engine),
        "tools_tokens_over_no_tools_tokens_min": min(with_tools),
    }


def through(worker: ServingWorker, *, seed: int, num_turns: int, tool_s: float = 0.0) -> Measured:
    """Runs trajectories in clients. One turn: all requests at once, each with a prompt of its own,
    as in `bare`.
    """
    before = worker.statistics()
    is_single = num_turns == 1
    total = NUM_REQUESTS if is_single else NUM_LIVE * TRAJECTORIES_PER_CLIENT
    numbers = iter(range(total))
    trajectories: list[Trajectory] = []
    full: list[tuple[float, int]] = []
    began_s = time.perf_counter()

    async def client() -> None:
        for number in numbers:
            if number == total - 1:
                sampled = worker.statistics().tokens_sampled - before.tokens_sampled
                full.append((time.perf_counter() - began_s, sampled))
            played = _play(worker, number, seed=seed, num_turns=num_turns, tool_s=tool_s)
            trajectories.append(await played)

    async def main() -> None:
        await asyncio.gather(*(client() for _ in range(total if is_single else NUM_LIVE)))

    asyncio.run(main())
    [(full_s, full_tokens)] = full
    return Measured(
        elapsed_s=time.perf_counter() - began_s,
        counts=worker.statistics().since(before),
        full_s=full_s,
        full_tokens=full_tokens,
        trajectories=tuple(trajectories),
    )


async def _play(
    worker: ServingWorker, number: int, *, seed: int, num_turns: int, tool_s: float
) -> Trajectory:
    key = TrajectoryKey(step=0, group=number // GROUP_SIZE, index=number % GROUP_SIZE)
    rng = np.random.default_rng((seed + 1, 3, number))
    context = prompt_of(seed, number if num_turns == 1 else NUM_REQUESTS + key.group)
    logprobs = [float("nan")] * len(context)
    for turn in range(num_turns):
        sampling = sampling_of(seed, number, turn)
        request = SampleRequest(session=key, context_ids=context, sampling=sampling)
        result = await worker.sample(request)
        context += result.token_ids
        logprobs += result.logprobs
        if turn + 1 < num_turns:
            await asyncio.sleep(tool_s)
            context += tuple(rng.integers(0, VOCAB_SIZE, OBSERVATION_TOKENS).tolist())
            logprobs += [float("nan")] * OBSERVATION_TOKENS
    await worker.release(key)
    return Trajectory(token_ids=context, logprobs=tuple(logprobs))


def prompt_of(seed: int, number: int) -> tuple[int, ...]:
    rng = np.random.default_rng((seed + 1, 1, number))
    return tuple(rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS).tolist())


def sampling_of(seed: int, number: int, turn: int) -> SamplingParams:
    rng = np.random.default_rng((seed + 1, 2, number, turn))
    max_tokens = int(rng.integers(MIN_OUTPUT, MAX_OUTPUT + 1))
    return SamplingParams(max_tokens=max_tokens, seed=int(rng.integers(2**31)))


def bare(engine: PolicyEngine, *, seed: int) -> float:
    """Seconds for the single turns by the programs alone: no sessions, no results, no threads."""
    waiting = collections.deque(
        (prompt_of(seed, number), sampling_of(seed, number, 0)) for number in range(NUM_REQUESTS)
    )
    state, free = engine.init_decode_state(), list(range(NUM_SLOTS))
    live = np.zeros(NUM_SLOTS, bool)
    began_s = time.perf_counter()
    while waiting or live.any():
        pieces = [
            Piece(slot=slot, start=0, token_ids=prompt, is_last=True, sampling=sampling)
            for slot, (prompt, sampling) in zip(
                free, [waiting.popleft() for _ in range(min(len(free), len(waiting)))], strict=False
            )
        ]
        for begin in range(0, len(pieces), engine.serving.extend_rows):
            batch = pieces[begin : begin + engine.serving.extend_rows]
            state = engine.extend(engine.weights, state, batch)
        live[[piece.slot for piece in pieces]] = True
        ended = until_ended(NUM_SLOTS, is_waiting=bool(waiting))
        state, results = engine.generate(engine.weights, state, until_ended=ended)
        sampled = engine.unpack(results)
        has_ended = live & (sampled.is_sampled.sum(axis=1) > sampled.goes_on.sum(axis=1))
        live &= ~has_ended
        free = np.flatnonzero(~live).tolist()
    return time.perf_counter() - began_s


def logprob_gap(engine: PolicyEngine, trajectories: Sequence[Trajectory]) -> float:
    """The largest |sampler - one full forward| over the sampled tokens."""
    params, gaps = engine.weights.current().params, []
    for trajectory in trajectories:
        tokens = np.zeros(ROW_LENGTH, np.int32)
        tokens[: len(trajectory.token_ids)] = trajectory.token_ids
        want = np.asarray(_logprobs(engine.config, params, tokens))
        sampled = np.asarray(trajectory.logprobs[1:])
        gaps.append(np.nanmax(np.abs(want[: len(sampled)] - sampled)))
    return float(max(gaps))


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(
    config: TransformerConfig, params: transformer.Params, tokens: jax.Array
) -> jax.Array:
    """Of tokens[1:], each given those before it."""
    hidden = transformer.forward(config, params, tokens[None], jnp.arange(ROW_LENGTH)[None])
    logprobs = jax.nn.log_softmax(transformer.logits(config, params, hidden)[0, :-1])
    return jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]
