"""What turns that run ahead of their content leave for its end: the tail of one long trajectory.

A group of two: a short trajectory that is done, and one of NUM_TURNS turns whose tools leave the
learner idle. The tail is from its last content, with its reward, to its gradient in the group's
sums. With turns streamed it is the last segment and the replays, which see no output head; without,
the whole trajectory. A replay also passes over all parameters, to fold what it found: turns must be
long against that. Every ratio is the median of paired repetitions in one process.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from thundersync_jax.benchmarks.learner import medians, ratio
from thundersync_jax.benchmarks.report import Report
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.compilation import compile_apart, temporary_cache
from thundersync_jax.learner.learner import Learner
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import init_params
from thundersync_jax.trajectory import (
    TOKEN_ARRAYS,
    ScoredTurn,
    TrajectoryBuilder,
    TrajectoryTokens,
)

NUM_TURNS, TURN_TOKENS, READ_TOKENS, PROMPT_TOKENS = 6, 192, 64, 1
NUM_PAIRED = 15
VOCAB_SIZE = 32768
BUCKETS = (256, 1536)


def model() -> TransformerConfig:
    """Nine tenths of a token's arithmetic are the output head, which replays leave out."""
    small = preset("tiny", vocab_size=VOCAB_SIZE)
    return dataclasses.replace(
        small,
        num_layers=2,
        embed_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=384,
    )


def make_learner(stream_turns: str) -> Learner:
    config = LearnerSection(
        buckets=BUCKETS,
        tokens_per_step=BUCKETS[-1],
        pool_size=1,
        pairs_per_call=1,
        held_gradients=1,
        num_turn_caches=1,
        stream_turns=stream_turns,
        max_logprob_gap=1e9,
    )
    learner = Learner(config, OptimizerSection(), model(), init_params(model(), 0))
    learner.warm_up()
    return learner


def make_learners() -> tuple[Learner, Learner]:
    """All that compiles: with turns streamed, and without."""
    return make_learner("idle"), make_learner("never")


def turns(num_turns: int) -> list[ScoredTurn]:
    """Each reads READ_TOKENS and samples TURN_TOKENS."""
    rng, found = np.random.default_rng(0), []
    for _ in range(num_turns):
        builder = TrajectoryBuilder()
        builder.append_observation(rng.integers(0, VOCAB_SIZE, READ_TOKENS).tolist())
        ids = rng.integers(0, VOCAB_SIZE, TURN_TOKENS).tolist()
        builder.append_action(ids, [-9.0] * TURN_TOKENS, [0] * TURN_TOKENS)
        found.append(ScoredTurn(tokens=builder.build(), teacher_logprobs=None))
    return found


def whole(parts: list[ScoredTurn]) -> TrajectoryTokens:
    names = [name for name in TOKEN_ARRAYS if name != "reference_logprobs"]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part.tokens, name) for part in parts]) for name in names
    }
    return TrajectoryTokens(**arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """One trajectory's end.

    Attributes:
      seconds: from its content and reward to its gradient in the sums.
      total_s: of all the learner's calls for it.
    """

    seconds: float
    total_s: float


def tail(learner: Learner, *, is_by_turns: bool) -> Tail:
    """Runs the group; the last turn comes with its content."""
    long, short = turns(NUM_TURNS), turns(1)
    group = learner.open_group("t", tuple(range(PROMPT_TOKENS)), 2)
    learner.add_trajectory(group, 0, whole(short))
    learner.set_reward(group, 0, 0.0)
    learner.work()
    learner.take_work_log()
    for turn in long[:-1] if is_by_turns else ():
        learner.add_turn(group, 1, turn)
        learner.work()
    if is_by_turns:
        learner.add_turn(group, 1, long[-1])
    began_s = time.perf_counter()
    learner.add_trajectory(group, 1, whole(long))
    learner.set_reward(group, 1, 1.0)
    learner.work()
    seconds = time.perf_counter() - began_s
    total_s = sum(item.ended_s - item.started_s for item in learner.take_work_log())
    learner.abandon()
    return Tail(seconds=seconds, total_s=total_s)


def head_positions() -> tuple[int, int]:
    """Positions that see the output head after the content is final: by turns, and as a whole."""
    per_turn = READ_TOKENS + TURN_TOKENS
    return per_turn, PROMPT_TOKENS + NUM_TURNS * per_turn - 1


def run() -> Report:
    """Medians over paired repetitions."""
    with temporary_cache():
        compile_apart(make_learners)
        by_turns, at_once = make_learners()
    totals: dict[str, list[float]] = {"by_turns": [], "at_once": []}

    def seconds(name: str, learner: Learner) -> float:
        found = tail(learner, is_by_turns=name == "by_turns")
        totals[name].append(found.total_s)
        return found.seconds

    times = medians(
        {
            "by_turns": lambda: seconds("by_turns", by_turns),
            "at_once": lambda: seconds("at_once", at_once),
        },
        NUM_PAIRED,
    )
    spread = sorted(a / b for a, b in zip(times["by_turns"], times["at_once"], strict=True))
    positions = head_positions()
    results = {
        "tail_by_turns_over_at_once": ratio(times, "by_turns", "at_once"),
        "tail_quartiles": [spread[len(spread) // 4], spread[-1 - len(spread) // 4]],
        "tail_by_turns_s": statistics.median(times["by_turns"]),
        "tail_at_once_s": statistics.median(times["at_once"]),
        "work_by_turns_over_at_once": ratio(totals, "by_turns", "at_once"),
        "head_positions_by_turns": positions[0],
        "head_positions_at_once": positions[1],
    }
    config = {
        "num_turns": NUM_TURNS,
        "read": READ_TOKENS,
        "sampled": TURN_TOKENS,
        "vocab_size": VOCAB_SIZE,
        "num_paired": NUM_PAIRED,
    }
    return Report(benchmark="turns", config=config, results=results)
