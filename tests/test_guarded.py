"""What an objective's own functions raise or return where no check at the start has tried them: at
rewards above 20, or in trajectories of 7 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import learner_cases as lc
import numpy as np
import pytest

from thundersync_jax.learner.groups import Cohort, Group, Member, Stage
from thundersync_jax.losses.objective import ObjectiveError, Tokens, unscaled_weights
from thundersync_jax.losses.objective_check import advantages_of, scale_of
from thundersync_jax.losses.objectives import make_objective

REWARDS = np.array([30.0, 0.0])


def spoiled(part: str, kind: str) -> Any:
    """GRPO, of which one function raises, or returns None."""
    plain = make_objective("grpo", {})
    function_of = (lambda a: 1 + np.ptp(a)) if part == "advantage_scale" else getattr(plain, part)

    def function(*arguments: Any) -> Any:
        first = arguments[0]
        is_length = part in ("token_weights", "score")
        size = first.logprobs.shape[0] if isinstance(first, Tokens) else np.size(first)
        if not (size == 7 if is_length else np.max(first) > 20):
            return function_of(*arguments)
        if kind == "raises":
            raise RuntimeError("two\nlines")
        return None

    return dataclasses.replace(plain, name="mine", **{part: function})


def made(part: str, kind: str) -> Any:
    return make_objective("test_guarded:spoiled", {"part": part, "kind": kind})


PARTS = {
    "advantages": ("[30.0, 0.0]", lambda o: advantages_of(o, REWARDS)),
    "shape_reward": ("30.0, 5", lambda o: o.shape_reward(30.0, 5)),
    "keeps_group": ("[30.0, 0.0]", lambda o: o.keeps_group(REWARDS)),
    "advantage_scale": ("[30.0, 0.0]", lambda o: scale_of(o, REWARDS)),
    "token_weights": (
        "[True, True, True, True, True, True, ...]",
        lambda o: unscaled_weights(o, MASK),
    ),
}
MASK = np.ones(7, bool)


@pytest.mark.parametrize("part", PARTS)
def test_a_function_that_raises_or_has_no_value_is_named_with_what_it_was_given(part: str):
    given, call = PARTS[part]
    with pytest.raises(ObjectiveError) as raised:
        call(made(part, "raises"))
    start = f"objective 'mine': {part}({given}) raised RuntimeError: two lines ("
    assert str(raised.value).startswith(start) and "\n" not in str(raised.value)
    with pytest.raises(ObjectiveError) as raised:
        call(made(part, "is nothing"))
    message = str(raised.value)
    assert message.startswith("objective 'mine': ") and "xpected" in message
    assert (
        part in ("advantages", "token_weights") or f"{part}({given}) is None: expected" in message
    )


def test_a_score_that_raises_at_a_length_of_the_run_is_named():
    with pytest.raises(ObjectiveError, match=r"'mine': score\(7 tokens\) raised RuntimeError: two"):
        lc.make_learner(
            lc.tiny(),
            buckets=(7,),
            tokens_per_step=7,
            objective="test_guarded:spoiled",
            objective_options={"part": "score", "kind": "raises"},
        ).warm_up()


@pytest.mark.parametrize("kind", ["raises", "is nothing"])
def test_a_reward_that_cannot_be_shaped_changes_nothing(kind: str):
    member = Member(index=1, stage=Stage.CONTENT, num_action_tokens=5)
    group = Group(group_id=3, task_id="t", prompt_ids=np.arange(2), members=[member])
    Cohort(objective=made("shape_reward", kind)).join(group)
    with pytest.raises(ObjectiveError, match=r"group 3 \(task 't'\) index 1: .* shape_reward\(30"):
        group.set_reward(member, 30.0)
    assert member.stage is Stage.CONTENT and group.cohort.center is None
    group.set_reward(member, 2.0)
    assert member.stage is Stage.READY and member.reward == group.cohort.center == 2.0


def test_objectives_that_are_equal_are_one_static_argument():
    first, second = (make_objective("grpo", {"entropy_coefficient": 0.1}) for _ in range(2))
    assert first == second and hash(first) == hash(second)
