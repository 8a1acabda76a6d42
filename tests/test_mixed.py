"""Rewards and a teacher in one update: distillation as a term, which no reward changes."""

from __future__ import annotations

import dataclasses
import math

import jax
import learner_cases as lc
import numpy as np
import pytest
from test_objectives import HAND_COMPUTED, LOGPROBS, R1, R2, gradient

from thundersync_jax.benchmarks import turn_arrivals as ta
from thundersync_jax.errors import ConfigError
from thundersync_jax.losses.objective import Objective, Streams
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.trajectory import TrajectoryTokens

CAP = 1.2


def made(**options: object) -> Objective:
    return make_objective("grpo", options)


# log q - log b of the three tokens: 0.3, -0.5 and -0.4; the ratios p / b: R1, R2 and 1.
SLOPES = {
    0.0: [[0.3, -0.5], [-0.4]],
    CAP: [[CAP * 0.3, R2 * -0.5], [-0.4]],
    2.0: [[R1 * 0.3, R2 * -0.5], [-0.4]],
}


@pytest.mark.parametrize("cap", SLOPES)
@pytest.mark.parametrize("scope", ["content", "group"])
def test_distillation_of_a_hand_computed_group(cap: float, scope: str):
    """+ 0.3 of it, over the same three tokens as the score, on top of GRPO's gradient."""
    options = {"distillation_coefficient": 0.3, "distillation_ratio_cap": cap}
    with jax.enable_x64(True):
        objective = made(**options, terms_scope=scope)
        assert objective.streams is (Streams.GROUP if scope == "group" else Streams.TRAJECTORY)
        found = gradient(objective)
    for got, base, slope in zip(found, HAND_COMPUTED["grpo", ()], SLOPES[cap], strict=True):
        np.testing.assert_allclose(got, np.asarray(base) + 0.1 * np.asarray(slope), rtol=1e-7)


def test_on_policy_it_is_the_kl_by_k2():
    """With b = p: (log q - log p) grad log p is the gradient of - (log p - log q)^2 / 2."""
    with jax.enable_x64(True):
        taught = gradient(made(distillation_coefficient=0.3), behavior=LOGPROBS)
        pulled = gradient(made(kl_coefficient=0.3, kl_estimator="k2"), behavior=LOGPROBS)
    for got, want in zip(taught, pulled, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def taught_group(num_turns: tuple[int, ...]) -> list[ta.TurnCase]:
    """Trajectories of one prompt; every action token has a score."""
    rng = np.random.default_rng(4)
    return [
        ta.TurnCase(prompt=(3, 1, 4), turns=tuple(ta.turn(rng, 1, 2, 1) for _ in range(count)))
        for count in num_turns
    ]


def with_reference(case: ta.TurnCase) -> TrajectoryTokens:
    scores = np.concatenate([turn.teacher_logprobs for turn in case.turns])
    return dataclasses.replace(case.tokens, reference_logprobs=scores)


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (None, None, None)])
def test_without_an_advantage_it_is_the_distillers_gradient(rewards: tuple[float | None, ...]):
    """Equal rewards and failed verdicts leave the teacher's part alone, over the same tokens."""
    cases, model = taught_group((1, 3, 2)), lc.tiny()
    distiller = ta.make_distiller(model, stream_turns="never", num_caches=0, ratio_cap=CAP)
    ta.run_events(distiller, cases, np.random.default_rng(0))
    want = distiller.gradient()
    options = {"distillation_coefficient": 1.0, "distillation_ratio_cap": CAP}
    learner = lc.make_learner(
        model,
        buckets=(ta.LENGTH,),
        tokens_per_step=80,
        pool_size=1,
        held_gradients=0,
        objective_options=options,
    )
    group = lc.Case(
        prompt=cases[0].prompt, trajectories=tuple(map(with_reference, cases)), rewards=rewards
    )
    lc.run_events(learner, [group], np.random.default_rng(1))
    assert lc.rel_l2(learner.gradient(), want) <= 1e-5
    report = learner.update()
    gains = np.concatenate([ta.targets(case)[2] for case in cases])  # log q - log b
    k3 = float(np.mean(np.exp(gains) - 1 - gains))
    assert report.reference_kl_k3_mean == pytest.approx(k3, rel=1e-5) and not report.is_empty


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_coefficient": -1.0}, r"distillation_coefficient = -1.0: expected a finite"),
        ({"distillation_coefficient": math.nan}, "distillation_coefficient = nan"),
        ({"distillation_ratio_cap": -1.0}, r"distillation_ratio_cap = -1.0: expected a finite"),
        ({"distilation_coefficient": 1.0}, "Did you mean 'distillation_coefficient'"),
        (
            {"distillation_coefficient": 1.0, "kl_coefficient": 0.1},
            r"kl_coefficient = 0.1: expected 0 beside .* one reference policy",
        ),
    ],
)
def test_options_of_no_distillation_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        made(**options)
