"""What a trajectory of `Learner` becomes as its tokens arrive: turns to run ahead, then an example.

Invariants:
  * What is refused changes nothing.
  * Turns come before their content, and the content is exactly their tokens: what ran of them is
    part of the trajectory's gradient.
  * A turn's weights are final with it: without the length normaliser, which scales the trajectory's
    held gradient once its length is known.

No jax. `Learner` calls it with the tokens as they come.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.learner.buckets import bucket_of, make_example
from thundersync_jax.learner.groups import Group, LearnerError, Member, Stage
from thundersync_jax.learner.token_checks import check_ids, check_length
from thundersync_jax.learner.turns import TurnSequence
from thundersync_jax.losses.objective import (
    Objective,
    ObjectiveError,
    length_scale,
    unscaled_weights,
)
from thundersync_jax.losses.objective_check import check_final_weights
from thundersync_jax.trajectory import ScoredTurn, TrajectoryTokens


class Contents:
    """Checks and prepares; owns nothing.

    Args:
      grow: hears of the first turn of every trajectory.
    """

    def __init__(
        self,
        objective: Objective,
        config: LearnerSection,
        vocab_size: int,
        grow: Callable[[Group, Member], None],
    ) -> None:
        self._objective = objective
        self._config = config
        self._vocab_size = vocab_size
        self._grow = grow

    def add_turn(self, group: Group, member: Member, turn: ScoredTurn) -> None:
        """Gives a growing trajectory its next turn. Raises LearnerError."""
        name = group.name(member)
        if turn.teacher_logprobs is not None or self._config.stream_turns == "never":
            what = "a turn" if turn.teacher_logprobs is None else "a scored turn"
            raise LearnerError(
                f"{name}: {what} came, and no teacher is configured: set opd.teacher, or, for "
                "turns without scores, learner.stream_turns = 'idle'"
            )
        if member.stage is not Stage.EXPECTED:
            raise LearnerError(f"{name} is {member.stage.value}: no turn can follow")
        check_ids(name, turn.tokens.token_ids, self._vocab_size)
        sequence = member.turns or TurnSequence(name, group.prompt_ids, self._weigh)
        num_positions = sequence.num_tokens + turn.tokens.num_tokens - 1
        check_length(name, num_positions, self._config.buckets[-1])
        try:
            sequence.add(turn)
        except ValueError as error:
            raise LearnerError(f"{name}: {error}") from None
        if member.turns is None:
            member.turns = sequence
            self._grow(group, member)

    def add_trajectory(self, group: Group, member: Member, tokens: TrajectoryTokens) -> None:
        """Gives a trajectory its final content. Raises LearnerError."""
        name, turns = group.name(member), member.turns
        check_ids(name, tokens.token_ids, self._vocab_size)
        if turns is not None and not np.array_equal(turns.token_ids, tokens.token_ids):
            raise LearnerError(
                f"{name}: its turns hold {len(turns.token_ids)} tokens and its content "
                f"{tokens.num_tokens}, expected the same ones: give every turn to add_turn first, "
                "or none"
            )
        is_shared = bool(group.prefix_bucket)
        try:
            example = make_example(group.prompt_ids, tokens, self._objective, is_shared=is_shared)
            if turns is not None:
                whole = unscaled_weights(self._objective, tokens.action_mask)
                check_final_weights(self._objective, turns.weights, whole)
        except ObjectiveError as error:
            raise ObjectiveError(f"{name}: {error}") from error
        except ValueError as error:
            raise LearnerError(f"{name}: {error}") from None
        length = example.prefix_length + example.num_positions
        check_length(name, length, self._config.buckets[-1])
        member.advance(Stage.CONTENT, name)
        member.example = example
        member.num_action_tokens = tokens.num_action_tokens
        member.length_scale = float(length_scale(self._objective, tokens.action_mask))
        if example.num_positions:
            member.bucket = bucket_of(example.num_positions, self._config.buckets)
            member.owes_terms = bool(self._objective.term_sums)

    def _weigh(self, turn: ScoredTurn, mask_before: np.ndarray) -> np.ndarray:
        """The objective's token weights of a turn, without its length normaliser."""
        mask = np.concatenate([mask_before, turn.tokens.action_mask])
        return unscaled_weights(self._objective, mask)[mask_before.size :]
