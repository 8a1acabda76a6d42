"""Random batches and arrival orders of them, and the reference gradient to compare with.

A batch has groups of every kind: unequal lengths, mixed rewards, failures, equal rewards, failures
only. Used by `benchmark exactness` and by the tests.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.reference import Attempt, objective_gradient
from thundersync_jax.learner.score import Params, ScoreSettings
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.trajectory import (
    TOKEN_ARRAYS,
    ScoredTurn,
    TrajectoryBuilder,
    TrajectoryTokens,
)

VOCAB_SIZE = 13


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One group: its prompt, trajectories, and a reward or None (failed) for each."""

    prompt: tuple[int, ...]
    trajectories: tuple[TrajectoryTokens, ...]
    rewards: tuple[float | None, ...]


def random_tokens(rng: np.random.Generator, num_turns: int) -> TrajectoryTokens:
    builder = TrajectoryBuilder()
    for _ in range(num_turns):
        count = int(rng.integers(1, 4))
        builder.append_action(
            rng.integers(0, VOCAB_SIZE, count).tolist(),
            (-rng.uniform(1, 3, count)).tolist(),
            [0] * count,
        )
        builder.append_observation(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 3))).tolist())
    return builder.build()


def random_batch(seed: int, *, num_groups: int = 4, size: int = 5) -> list[Case]:
    """Groups of every kind: mixed rewards, some failures, equal rewards, all failed."""
    rng, others = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    cases = []
    for group in range(num_groups):
        rewards: list[float | None] = rng.normal(1.0, 1.0, size).round(3).tolist()
        if group % 4 == 1:
            rewards[0] = None
            rewards[-1] = None
        if group % 4 == 2:
            rewards = [0.7] * size
        if group % 4 == 3:
            rewards = [None] * size
        cases.append(
            Case(
                prompt=tuple(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 5))).tolist()),
                trajectories=tuple(
                    _with_reference(random_tokens(rng, int(rng.integers(1, 7))), others)
                    for _ in range(size)
                ),
                rewards=tuple(rewards),
            )
        )
    return cases


def _with_reference(tokens: TrajectoryTokens, rng: np.random.Generator) -> TrajectoryTokens:
    scores = np.where(tokens.action_mask, -rng.uniform(1, 3, tokens.num_tokens), 0.0)
    return dataclasses.replace(tokens, reference_logprobs=scores)


def enqueue(learner: Learner, cases: list[Case]) -> None:
    """Everything at once, in order: what barrier mode sees."""
    for number, case in enumerate(cases):
        group = learner.open_group(f"task-{number}", case.prompt, len(case.rewards))
        for index, (tokens, reward) in enumerate(zip(case.trajectories, case.rewards, strict=True)):
            learner.add_trajectory(group, index, tokens)
            if reward is None:
                learner.set_failed(group, index, "sandbox died")
            else:
                learner.set_reward(group, index, reward)


def run_events(learner: Learner, cases: list[Case], rng: np.random.Generator) -> None:
    """Feeds contents and verdicts in a random legal order, with work in between at random."""
    groups = [
        learner.open_group(f"task-{i}", c.prompt, len(c.rewards)) for i, c in enumerate(cases)
    ]
    events: list[tuple[float, str, int, int]] = []
    for g, case in enumerate(cases):
        for i in range(len(case.rewards)):
            content, verdict = np.sort(rng.uniform(size=2))
            events += [(content, "content", g, i), (verdict, "verdict", g, i)]
    for _, kind, g, i in sorted(events):
        reward = cases[g].rewards[i]
        if kind == "content":
            learner.add_trajectory(groups[g], i, cases[g].trajectories[i])
        elif reward is None:
            learner.set_failed(groups[g], i, "sandbox died")
        else:
            learner.set_reward(groups[g], i, reward)
        if rng.uniform() < 0.5:
            learner.work(max_steps=int(rng.integers(1, 3)))


def turns_of(tokens: TrajectoryTokens) -> list[ScoredTurn]:
    """A trajectory as it arrives while it grows: every turn reads, and then samples; what follows
    the last sampled token belongs to the last.
    """
    mask = tokens.action_mask
    ends = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1
    is_tail = not mask[-1]
    cuts = [0, *(ends[:-1] if is_tail else ends).tolist(), tokens.num_tokens]
    arrays: dict[str, Any] = {name: getattr(tokens, name) for name in TOKEN_ARRAYS}
    given = {name: array for name, array in arrays.items() if array is not None}
    return [
        ScoredTurn(
            tokens=TrajectoryTokens(**{name: array[begin:end] for name, array in given.items()}),
            teacher_logprobs=None,
        )
        for begin, end in itertools.pairwise(cuts)
    ]


def run_turn_events(
    learner: Learner, cases: list[Case], rng: np.random.Generator, *, idle: float = 0.7
) -> None:
    """As `run_events`, with turns before contents; some trajectories have none, and some attempts
    fail while they grow.

    Args:
      idle: how often the learner has time after an event.
    """
    groups = [
        learner.open_group(f"task-{i}", c.prompt, len(c.rewards)) for i, c in enumerate(cases)
    ]
    events: list[tuple[float, int, int, Any]] = []
    for g, case in enumerate(cases):
        for i, (tokens, reward) in enumerate(zip(case.trajectories, case.rewards, strict=True)):
            turns: list[Any] = turns_of(tokens) if rng.uniform() < 0.8 else []
            if reward is None and rng.uniform() < 0.5:
                parts = [*turns[: int(rng.integers(0, len(turns) + 1))], None]
            else:
                parts = [*turns, tokens, reward]
            events += [
                (at, g, i, part)
                for at, part in zip(np.sort(rng.uniform(size=len(parts))), parts, strict=True)
            ]
    for _, g, i, part in sorted(events, key=lambda event: event[0]):
        match part:
            case ScoredTurn():
                learner.add_turn(groups[g], i, part)
            case TrajectoryTokens():
                learner.add_trajectory(groups[g], i, part)
            case None:
                learner.set_failed(groups[g], i, "sandbox died")
            case reward:
                learner.set_reward(groups[g], i, reward)
        if rng.uniform() < idle:
            learner.work(max_steps=int(rng.integers(1, 4)))


def reference(
    model: TransformerConfig, params: Params, cases: list[Case], config: LearnerSection
) -> Params:
    """The descent gradient of the batch from the oracle."""
    groups = [
        [
            Attempt(prompt_ids=np.asarray(case.prompt, np.int32), tokens=tokens, reward=reward)
            for tokens, reward in zip(case.trajectories, case.rewards, strict=True)
        ]
        for case in cases
    ]
    objective = make_objective(config.objective, config.objective_options)
    settings = ScoreSettings(model=model, objective=objective)
    return objective_gradient(settings, params, groups)


def rel_l2(got: Any, want: Any) -> float:
    """Relative L2 distance of two pytrees, computed in float64."""
    pairs = [
        (np.asarray(g, np.float64), np.asarray(w, np.float64))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    distance = sum(np.sum((g - w) ** 2) for g, w in pairs)
    return float(np.sqrt(distance / sum(np.sum(w**2) for _, w in pairs)))
