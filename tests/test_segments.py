"""A trajectory of several segments: each sees the prompt and itself, and all are one trajectory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.buckets import LaneItem, make_example, pad_lanes
from thundersync_jax.learner.score import ScoreSettings, score
from thundersync_jax.losses.objectives import grpo
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.trajectory import TrajectoryBuilder, TrajectoryError, TrajectoryTokens

PROMPT = np.asarray([3, 1, 4, 1, 5], np.int32)


def small(dtype: str = "float32") -> TransformerConfig:
    return dataclasses.replace(lc.tiny(dtype), num_layers=1)


def segmented(rng: np.random.Generator, num_segments: int) -> TrajectoryTokens:
    builder = TrajectoryBuilder()
    for number in range(num_segments):
        if number:
            builder.begin_segment()
        for _ in range(int(rng.integers(1, 3))):
            read, said = (rng.integers(0, lc.VOCAB_SIZE, rng.integers(1, 4)) for _ in range(2))
            builder.append_observation(read.tolist())
            logprobs = -rng.uniform(1, 3, said.size)
            builder.append_action(said.tolist(), logprobs.tolist(), [0] * said.size)
    return builder.build()


def segments_of(tokens: TrajectoryTokens) -> list[TrajectoryTokens]:
    """Each alone."""
    bounds = (0, *tokens.segment_starts, tokens.num_tokens)
    names = ("token_ids", "action_mask", "behavior_logprobs", "policy_versions")
    return [
        TrajectoryTokens(**{name: getattr(tokens, name)[begin:end] for name in names})
        for begin, end in itertools.pairwise(bounds)
    ]


@functools.cache
def gradient_program(settings: ScoreSettings) -> Any:
    """Of the summed log-probability of a lane's action tokens."""
    return jax.jit(jax.grad(lambda params, lane: score(settings, params, None, lane)[0][0]))


def gradient_of(tokens: TrajectoryTokens) -> list[np.ndarray]:
    settings = ScoreSettings(model=small("float64"))
    lanes = pad_lanes(
        [[LaneItem(examples=(make_example(PROMPT, tokens, grpo()),))]], 1, 64, np.float64
    )
    lane = jax.tree.map(lambda x: x[0, 0], lanes.replace(num_lanes=None))
    params = lc.init_params(settings.model, 0)
    return jax.tree.leaves(gradient_program(settings)(params, lane))


def test_the_gradient_is_the_sum_of_those_of_the_segments_alone():
    with jax.enable_x64(True):
        tokens = segmented(np.random.default_rng(0), 3)
        alone = [gradient_of(segment) for segment in segments_of(tokens)]
        for whole, *parts in zip(gradient_of(tokens), *alone, strict=True):
            np.testing.assert_allclose(whole, sum(parts), rtol=0, atol=1e-12)


def test_inputs_of_every_segment_are_the_prompt_and_its_own_tokens():
    tokens = segmented(np.random.default_rng(1), 3)
    example = make_example(PROMPT, tokens, grpo())
    bounds = (0, *example.segment_starts, example.num_positions)
    for (begin, end), segment in zip(itertools.pairwise(bounds), segments_of(tokens), strict=True):
        whole = np.concatenate([PROMPT, segment.token_ids])
        np.testing.assert_array_equal(example.tokens[begin:end], whole[:-1])
        np.testing.assert_array_equal(example.targets[begin:end], whole[1:])
        np.testing.assert_array_equal(example.positions[begin:end], np.arange(end - begin))
        assert np.count_nonzero(example.weights[begin:end]) == segment.num_action_tokens


def test_streamed_segments_give_the_gradient_of_the_batch():
    """In any order of arrival, beside trajectories of one segment; prompts shared or not."""
    learner = lc.make_learner(
        small(),
        pool_size=2,
        tokens_per_step=256,
        buckets=(128,),
        prompt_buckets=(8,),
        prompt_slots=4,
        min_shared_tokens=2,
    )
    rng = np.random.default_rng(2)
    cases = [
        dataclasses.replace(
            case,
            prompt=tuple(PROMPT[: 5 if number % 2 else 2].tolist()),
            trajectories=tuple(segmented(rng, int(rng.integers(1, 4))) for _ in case.rewards),
        )
        for number, case in enumerate(lc.random_batch(0))
    ]
    want = lc.reference(small(), learner.state.params, cases, LearnerSection())
    for order in range(4):
        lc.run_events(learner, cases, np.random.default_rng(order))
        assert lc.rel_l2(learner.gradient(), want) <= 1e-5
        learner.abandon()


@pytest.mark.parametrize("starts", [(0,), (2, 2), (4,), (3, 1)])
def test_segments_begin_in_order_and_with_a_token(starts: tuple[int, ...]):
    with pytest.raises(TrajectoryError, match="expected places in order, each with a token"):
        dataclasses.replace(
            lc.random_tokens(np.random.default_rng(0), 1),
            **{
                name: np.zeros(4, dtype)
                for name, dtype in (
                    ("token_ids", np.int32),
                    ("action_mask", np.bool_),
                    ("behavior_logprobs", np.float32),
                    ("policy_versions", np.int32),
                )
            },
            segment_starts=starts,
        )
