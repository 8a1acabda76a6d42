"""The names of the learner's programs, and what they are compiled for.

Fold(prefix_bucket, bucket)     streaming.accumulate
PromptForward(bucket), PromptBackward(bucket)
Turn(part, prefix_bucket, bucket)    turn_replay's; WHOLE is score_segment without caches
Caches.ZERO, READ, WRITE             the pool of trajectory caches, and one of every replica
Whole.BIND, CLOSE, UPDATE, GATHER, ACCUMULATOR, HELD, SLOTS    what no bucket changes
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.buckets import lanes_per_call


@dataclasses.dataclass(frozen=True)
class Fold:
    """Names an accumulate program."""

    prefix_bucket: int
    bucket: int


@dataclasses.dataclass(frozen=True)
class PromptForward:
    bucket: int


@dataclasses.dataclass(frozen=True)
class PromptBackward:
    bucket: int


class Whole(enum.Enum):
    """The programs that do not depend on a bucket."""

    BIND = "bind"
    CLOSE = "close"
    UPDATE = "update"
    GATHER = "gather"
    ACCUMULATOR = "zero accumulator"
    HELD = "zero held gradient"
    SLOTS = "zero prompt slots"


class Part(enum.Enum):
    """What a program of turn replay does with its segments."""

    FORWARD = "forward"
    SCORE = "score"
    REPLAY = "replay"
    REPLAY_KEPT = "replay of kept residuals"
    WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class Turn:
    """Names a program of turn replay."""

    part: Part
    prefix_bucket: int
    bucket: int


class Caches(enum.Enum):
    ZERO = "zero trajectory caches"
    READ = "read one trajectory cache"
    WRITE = "write one trajectory cache"


Name = Fold | PromptForward | PromptBackward | Whole | Turn | Caches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the programs are compiled for.

    Attributes:
      lanes_per_call: K by bucket T: how many lanes one call scans on every replica.
      num_pairs: pairs (G1, G2) that a call reaches.
      num_held: buffers for gradients ahead of their verdicts.
      num_slots, slot_length: shared prompts a replica can hold, and their padded length.
      reduction: how sums are kept.
    """

    lanes_per_call: Callable[[int], int]
    num_pairs: int
    num_held: int
    num_slots: int
    slot_length: int
    reduction: str = "ordered"


def shapes_of(config: LearnerSection) -> Shapes:
    """The shapes of a configuration. Every held gradient has a slot for its prompt's share."""
    num_slots = config.prompt_slots + config.held_gradients if config.prompt_buckets else 0
    return Shapes(
        lanes_per_call=functools.partial(lanes_per_call, config.tokens_per_step),
        num_pairs=min(config.pairs_per_call, config.pool_size),
        num_held=config.held_gradients,
        num_slots=num_slots,
        slot_length=max(config.prompt_buckets, default=0),
        reduction=config.reduction,
    )


def most_lanes(config: LearnerSection) -> int:
    """The most trajectories that one call scans on a replica."""
    return max(lanes_per_call(config.tokens_per_step, bucket) for bucket in config.buckets)


def program_names(config: LearnerSection) -> list[Name]:
    """Every program that a run with this configuration can need."""
    names: list[Name] = [Whole.UPDATE, Whole.GATHER, Whole.ACCUMULATOR]
    names += [Fold(p, b) for p in (0, *config.prompt_buckets) for b in config.buckets]
    for bucket in config.prompt_buckets:
        names += [PromptForward(bucket), PromptBackward(bucket)]
    if config.prompt_buckets:
        names.append(Whole.SLOTS)
    if config.held_gradients:
        names += [Whole.BIND, Whole.HELD]
    if config.has_turns:
        names += turn_program_names(config.buckets, config.buckets[-1:])
    return [*names, Whole.CLOSE] if config.pool_size else names


def distillation_program_names(
    buckets: tuple[int, ...],
    prefix_buckets: tuple[int, ...],
    *,
    has_caches: bool,
    has_residuals: bool = False,
    has_pages: bool = False,
) -> list[Name]:
    """Every program that a distillation can need."""
    names: list[Name] = [Whole.UPDATE, Whole.GATHER, Whole.ACCUMULATOR]
    names += [Turn(Part.WHOLE, 0, bucket) for bucket in buckets]
    if has_caches:
        names += turn_program_names(buckets, prefix_buckets)
    if has_pages:
        names += [Caches.READ, Caches.WRITE]
    if has_residuals:
        names += [Turn(Part.REPLAY_KEPT, *shape) for shape in turn_shapes(buckets, prefix_buckets)]
    return names


def turn_program_names(buckets: tuple[int, ...], prefix_buckets: tuple[int, ...]) -> list[Name]:
    """Every program that trajectories with caches can need."""
    parts = (Part.FORWARD, Part.SCORE, Part.REPLAY)
    shapes = turn_shapes(buckets, prefix_buckets)
    return [Caches.ZERO, *(Turn(part, *shape) for part in parts for shape in shapes)]


def turn_shapes(
    buckets: tuple[int, ...], prefix_buckets: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(prefix bucket, bucket) of every segment of a trajectory with a cache."""
    return tuple((p, b) for p in (0, *prefix_buckets) for b in buckets)
