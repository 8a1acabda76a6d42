"""The learner's schedule on many replicas, driven by simulated arrivals on a virtual clock.

The schedule is the learner's own; only the programs are replaced by their cost: a call takes as
long as the longest of its replicas, lanes x bucket tokens. Rewards arrive over a horizon of 1 with
lognormal spacing; every replica has the pairs that an 8B model leaves room for on 16 GB chips. The
cost of a token is set so that the learner's work after the last reward, in
barrier mode, takes `ratio` horizons. `barrier` is then 1 + ratio by definition.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from thundersync_jax.benchmarks.report import Report
from thundersync_jax.learner.buckets import Example, bucket_of
from thundersync_jax.learner.groups import Group, Member, Stage
from thundersync_jax.learner.schedule import Schedule
from thundersync_jax.learner.work import CloseWork, FoldWork
from thundersync_jax.losses.objectives import grpo

NUM_REPLICAS, NUM_GROUPS, GROUP_SIZE = 16, 32, 8
NUM_PAIRS = 2
BUCKETS = (128, 256, 512, 1024, 2048)
TOKENS_PER_STEP = 2048
RATIOS = (0.25, 0.5, 1.0)
NUM_SEEDS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When each trajectory is rewarded, as a share of the horizon, and how long it is in tokens."""

    times: np.ndarray
    lengths: np.ndarray


def run() -> Report:
    """Median step time in horizons over seeds, streamed, for each learner-to-rollout ratio."""
    steps = {ratio: [stream_step(seed, ratio) for seed in range(NUM_SEEDS)] for ratio in RATIOS}
    stream = {ratio: [step.horizons for step in found] for ratio, found in steps.items()}
    results = {f"stream_{ratio:g}": float(np.median(times)) for ratio, times in stream.items()}
    results |= {f"barrier_{ratio:g}": 1.0 + ratio for ratio in RATIOS}
    spread = {f"stream_{ratio:g}_max": float(max(times)) for ratio, times in stream.items()}
    spread["lane_fill"] = float(np.median([step.lane_fill for step in steps[1.0]]))
    config = {"replicas": NUM_REPLICAS, "groups": NUM_GROUPS, "group_size": GROUP_SIZE} | {
        "pairs": NUM_PAIRS
    }
    return Report(benchmark="schedule", config=config, results=results | spread)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a simulated step came to.

    Attributes:
      horizons: until everything is folded and closed.
      lane_fill: tokens over padded tokens of all replicas, lanes that wait for the longest counted.
    """

    horizons: float
    lane_fill: float


def stream_step(seed: int, ratio: float) -> Step:
    """A step whose work runs as rewards arrive."""
    arrivals = draw(seed)
    barrier = simulate(dataclasses.replace(arrivals, times=np.zeros_like(arrivals.times)), 1.0)
    return simulate(arrivals, ratio / barrier.horizons)


def draw(seed: int) -> Arrivals:
    rng = np.random.default_rng(seed)
    count = NUM_GROUPS * GROUP_SIZE
    times = rng.lognormal(0.0, 1.0, count)
    lengths = np.clip(rng.lognormal(0.0, 0.8, count), 0.25, 8.0) * BUCKETS[-1] / 8
    return Arrivals(times=times / times.max(), lengths=lengths.astype(int))


def simulate(arrivals: Arrivals, seconds_per_token: float) -> Step:
    """Runs the schedule until the last group is closed."""
    schedule = Schedule(
        num_replicas=NUM_REPLICAS,
        num_pairs=NUM_PAIRS,
        num_slots=0,
        num_held=0,
        pairs_per_call=NUM_PAIRS,
        lanes_per_call=lambda bucket: TOKENS_PER_STEP // bucket,
        objective=grpo(),
    )
    groups = [open_group(schedule, group) for group in range(NUM_GROUPS)]
    order = np.argsort(arrivals.times, kind="stable")
    now, arrived, padded = 0.0, 0, 0
    while True:
        while arrived < len(order) and arrivals.times[order[arrived]] <= now:
            group, index = divmod(int(order[arrived]), GROUP_SIZE)
            reward(groups[group], index, int(arrivals.lengths[order[arrived]]))
            arrived += 1
        work = schedule.next_work()
        if work is not None:
            if isinstance(work, FoldWork):
                lanes = max(len(filled) for filled in work.replicas)
                now += lanes * work.bucket * seconds_per_token
                padded += lanes * work.bucket * NUM_REPLICAS
            else:
                assert isinstance(work, CloseWork)  # elementwise: small beside a backward pass
            schedule.mark_done(work)
        elif arrived < len(order):
            now = float(arrivals.times[order[arrived]])
        else:
            return Step(horizons=now, lane_fill=float(arrivals.lengths.sum()) / padded)


def open_group(schedule: Schedule, group_id: int) -> Group:
    group = Group(
        group_id=group_id,
        task_id=str(group_id),
        prompt_ids=np.zeros(1, np.int32),
        members=[Member(index=i) for i in range(GROUP_SIZE)],
    )
    schedule.open(group)
    return group


def reward(group: Group, index: int, num_tokens: int) -> None:
    """Gives a member its content and its verdict."""
    member = group.members[index]
    member.advance(Stage.CONTENT, group.name(member))
    member.example = _example(num_tokens)
    member.bucket = bucket_of(num_tokens, BUCKETS)
    group.set_reward(member, float(index))


@functools.cache
def _example(num_tokens: int) -> Example:
    tokens, weights = np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.float32)
    return Example(tokens=tokens, targets=tokens, weights=weights, behavior_logprobs=weights)
