"""Trains on a committed step again from its file: gradients, no rollouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.learner.learner import Learner
from thundersync_jax.trajectory import TrajectoryRecord
from thundersync_jax.transport.messages import UpdateReport


def replay_step(
    learner: Learner | Distiller, trajectories: Sequence[TrajectoryRecord]
) -> UpdateReport:
    """Gives the learner what the file holds, in the order of the keys, and updates.

    Args:
      trajectories: of one step, sorted by key.
    """
    for _, members in itertools.groupby(trajectories, key=lambda t: t.key.group):
        group = list(members)
        group_id = learner.open_group(group[0].task_id, group[0].prompt_ids, len(group))
        for trajectory in group:
            index = trajectory.key.index
            for turn in trajectory.scored_turns:
                learner.add_turn(group_id, index, turn)
            if trajectory.rollout is not None:
                learner.add_trajectory(group_id, index, trajectory.rollout.tokens)
            if trajectory.verdict.reward is not None:
                learner.set_reward(group_id, index, trajectory.verdict.reward)
            else:
                learner.set_failed(group_id, index, str(trajectory.verdict.failure))
    return learner.update()
