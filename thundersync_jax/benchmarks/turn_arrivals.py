"""Random trajectories that arrive by turns, orders of arrival, and the gradient of their
distillation in plain terms. Used by `benchmark exactness` and by the tests.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.benchmarks.arrivals import VOCAB_SIZE, rel_l2
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.transformer import forward, init_params, logits
from thundersync_jax.trajectory import (
    TOKEN_ARRAYS,
    ScoredTurn,
    TrajectoryBuilder,
    TrajectoryTokens,
)

LENGTH = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnCase:
    """One trajectory."""

    prompt: tuple[int, ...]
    turns: tuple[ScoredTurn, ...]

    @property
    def tokens(self) -> TrajectoryTokens:
        return joined([turn.tokens for turn in self.turns])


def joined(turns: list[TrajectoryTokens]) -> TrajectoryTokens:
    """One trajectory of the turns; distillation has no reference."""
    names = [name for name in TOKEN_ARRAYS if name != "reference_logprobs"]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(turn, name) for turn in turns]) for name in names
    }
    return TrajectoryTokens(**arrays)


def turn(
    rng: np.random.Generator, before: int, sampled: int, after: int, *, is_scored: bool = True
) -> ScoredTurn:
    """So many tokens that were read, sampled, and read again."""
    builder = TrajectoryBuilder()
    builder.append_observation(rng.integers(0, VOCAB_SIZE, before).tolist())
    builder.append_action(
        rng.integers(0, VOCAB_SIZE, sampled).tolist(),
        (-rng.uniform(1, 3, sampled)).tolist(),
        [0] * sampled,
    )
    builder.append_observation(rng.integers(0, VOCAB_SIZE, after).tolist())
    teacher = -rng.uniform(0.5, 6, before + sampled + after) if is_scored else None
    return ScoredTurn(tokens=builder.build(), teacher_logprobs=teacher)


def random_case(seed: int, *, max_tokens: int = 38) -> TurnCase:
    """Turns of one token, long observations, observation-only tails, and turns without scores."""
    rng = np.random.default_rng(seed)
    prompt = tuple(rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 5))).tolist())
    turns: list[ScoredTurn] = []
    room = max_tokens - len(prompt)
    for number in range(int(rng.integers(1, 7))):
        before = int(rng.choice([0, 1, 2, 12], p=[0.3, 0.3, 0.3, 0.1]))
        sampled = int(rng.choice([1, 1, 2, 3, 7]))
        after = int(rng.choice([0, 0, 1, 3]))
        room -= before + sampled + after
        if room < 0 and turns:
            break
        is_scored = number == 0 or rng.uniform() < 0.75
        turns.append(turn(rng, before, sampled, after, is_scored=is_scored))
    return TurnCase(prompt=prompt, turns=tuple(turns))


def make_distiller(
    model: TransformerConfig,
    *,
    buckets: tuple[int, ...] = (LENGTH,),
    optimizer: OptimizerSection | None = None,
    **opd: Any,
) -> Distiller:
    config = LearnerSection(max_logprob_gap=100.0, buckets=buckets, tokens_per_step=80)
    section = OpdSection(**opd)
    params = init_params(model, 0)
    return Distiller(config, section, optimizer or OptimizerSection(), model, params)


def open_groups(distiller: Distiller, cases: list[TurnCase]) -> list[int]:
    return [distiller.open_group(f"task-{i}", case.prompt, 1) for i, case in enumerate(cases)]


def run_events(distiller: Distiller, cases: list[TurnCase], rng: np.random.Generator) -> None:
    """Turns and ends in a random order that keeps each trajectory's, with work in between."""
    groups = open_groups(distiller, cases)
    left = [list(case.turns) for case in cases]
    growing = list(range(len(cases)))
    while growing:
        at = int(rng.choice(growing))
        if left[at]:
            turn = left[at].pop(0)
            distiller.add_turn(groups[at], 0, turn)
        else:
            growing.remove(at)
            distiller.add_trajectory(groups[at], 0, cases[at].tokens)
            if rng.uniform() < 0.5:
                distiller.set_reward(groups[at], 0, float(rng.normal()))
        if rng.uniform() < 0.7:
            distiller.work(max_steps=int(rng.integers(1, 4)))


def plain_gradient(
    model: TransformerConfig, params: Any, cases: list[TurnCase], *, cap: float = 0.0
) -> Any:
    """The ascent direction sum_t w_t min(p/b, C) (log q - log b) grad log p_t: whole trajectories,
    one at a time, from the model's logits.
    """
    total = jax.tree.map(jnp.zeros_like, params)
    for case in cases:
        ids, behavior, gains = np.zeros(LENGTH + 1, np.int32), np.zeros(LENGTH), np.zeros(LENGTH)
        whole = (*case.prompt, *case.tokens.token_ids.tolist())
        ids[: len(whole)] = whole
        places, *columns = targets(case)
        behavior[places - 1], gains[places - 1] = columns
        gradient = _plain_gradient(model, params, ids, behavior, gains, cap)
        total = jax.tree.map(jnp.add, total, gradient)
    return total


@functools.partial(jax.jit, static_argnums=(0, 5))
def _plain_gradient(
    model: TransformerConfig,
    params: Any,
    ids: jax.Array,
    behavior: jax.Array,
    gains: jax.Array,
    cap: float,
) -> Any:
    def logprobs(params: Any) -> jax.Array:
        hidden = forward(model, params, ids[None, :-1], jnp.arange(LENGTH)[None])
        every = jax.nn.log_softmax(logits(model, params, hidden)[0])
        return jnp.take_along_axis(every, ids[1:, None], axis=1)[:, 0]

    policy, pull_back = jax.vjp(logprobs, params)
    ratio = jnp.minimum(jnp.exp(policy - behavior), cap) if cap else 1.0
    return pull_back((ratio * gains).astype(policy.dtype))[0]


def num_scored(cases: list[TurnCase]) -> int:
    return sum(targets(case)[0].size for case in cases)


def targets(case: TurnCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, behavior log-probabilities and gains of the tokens to train on."""
    places, behavior, gains, at = [], [], [], len(case.prompt)
    for one in case.turns:
        for offset in range(one.tokens.num_tokens):
            if one.teacher_logprobs is not None and one.tokens.action_mask[offset]:
                b = float(one.tokens.behavior_logprobs[offset])
                places.append(at + offset)
                behavior.append(b)
                gains.append(float(one.teacher_logprobs[offset]) - b)
        at += one.tokens.num_tokens
    return np.asarray(places, int), np.asarray(behavior), np.asarray(gains)


def worst_distance(model: TransformerConfig, *, num_orders: int = 8) -> float:
    """The worst relative L2 of the distiller's gradient over orders of arrival, with caches for
    some of the trajectories.
    """
    distiller = make_distiller(model, buckets=(8, LENGTH), num_caches=3)
    distances = []
    for order in range(num_orders):
        cases = [random_case(seed) for seed in range(5 * order, 5 * order + 5)]
        total = plain_gradient(model, distiller.state.params, cases)
        want = jax.tree.map(functools.partial(jnp.multiply, -1 / num_scored(cases)), total)
        run_events(distiller, cases, np.random.default_rng(order))
        distances.append(rel_l2(distiller.gradient(), want))
        distiller.abandon()
    return max(distances)
