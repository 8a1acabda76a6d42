"""What `learner.reduction` decides: how sums are kept, and which freedom the schedule has.

ordered   float32 sums, whose last bits depend on the order in which trajectories arrive
exact     `exact_sum.py`. The updated weights have the same bits for every arrival order, mix of
          paths, pool size and mode, and after a restart: every path folds the same integers
          q(fl32((r_i - c) g_i)) and q(g_i) into a pair, and which program computes g_i depends on
          content alone. For one mesh, back-end and version.
"""

from __future__ import annotations

import dataclasses

from thundersync_jax.learner.exact_sum import MAX_ADDENDS, ExactSum
from thundersync_jax.learner.groups import LearnerError, Path
from thundersync_jax.learner.sums import OrderedSum, Sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """One way to sum.

    Attributes:
      sum_type: of pairs, batch sum and adjoints.
      paired: the paths that go through their group's pair; others go straight to the batch sum.
      is_local: a group stays on one replica, where it waits for its prompt's slot rather than do
        without.
      has_center: c of sum (r_i - c) g_i is the train state's; otherwise the group's first reward.
      max_addends: of any sum; None for as many as there are.
    """

    sum_type: type[Sum]
    paired: frozenset[Path]
    is_local: bool
    has_center: bool
    max_addends: int | None

    def check_group(self, name: str, group_size: int, num_groups: int) -> None:
        """Raises LearnerError for more addends than a sum holds.

        Args:
          num_groups: of the step, this one included. The batch sum takes two addends of each: its
            pair's, and its prompt's.
        """
        most = self.max_addends
        if most is not None and max(group_size, 2 * num_groups) > most:
            raise LearnerError(
                f"{name}: group_size {group_size} in a step of {num_groups} groups or more: exact "
                f"sums hold at most {most} trajectories a group and {most // 2} groups a step. "
                "Use smaller groups, fewer of them, or learner.reduction = 'ordered'"
            )


REDUCTIONS = {
    "ordered": Reduction(
        sum_type=OrderedSum,
        paired=frozenset({Path.STREAM}),
        is_local=False,
        has_center=False,
        max_addends=None,
    ),
    "exact": Reduction(
        sum_type=ExactSum,
        paired=frozenset({Path.STREAM, Path.DIRECT}),
        is_local=True,
        has_center=True,
        max_addends=MAX_ADDENDS,
    ),
}
