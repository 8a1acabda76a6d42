"""Admission: how many further groups of a step may open, and which are replaced.

Back-pressure only ever delays the *opening* of groups. A group that is open is dispatched whole and
its members never wait for the learner, so every open group finishes and makes room for the next: no
deadlock, whatever the learner's pool.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_groups_to_open(*, num_waiting: int, num_open: int, max_open_groups: int) -> int:
    """Groups to open now, so that at most `max_open_groups` have a trajectory without a verdict."""
    return min(num_waiting, max_open_groups - num_open)


def is_tied(rewards: Sequence[float]) -> bool:
    """No two rewards of a group differ, so it teaches nothing: dynamic sampling takes another one
    in its place (DAPO, arXiv 2503.14476). Failed attempts have no reward.
    """
    return len(set(rewards)) < 2
