"""What `learner.reduction` decides: how sums are kept, and which freedom the schedule has.

ordered   float32 sums, whose last bits depend on the order in which trajectories arrive
exact     `exact_sum.py`. The updated weights have the same bits for every arrival order, mix of
          paths, pool size and mode, and after a restart: every path folds the same integers
          q((r_i - c) g_i) and q(g_i) into a pair (q(g_i) alone where g_i contains its
          advantage), terms fold q(k_i), and which program computes them depends on content alone.
          For one mesh, back-end and version; what streams by BATCH also opens its groups in one
          order, for that is the order of its rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thundersync_jax.learner.exact_sum import MAX_ADDENDS, ExactSum
from thundersync_jax.learner.groups import LearnerError, Path
from thundersync_jax.learner.sums import OrderedSum, Sum
from thundersync_jax.losses.objective import Objective, Streams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """One way to sum.

    Attributes:
      sum_type: of the batch sum, term sums, pairs and adjoints.
      paired: the paths that go through their cohort's pair; others go straight to the batch sum.
      is_local: a group stays on one replica, where it waits for its prompt's slot rather than do
        without.
      has_center: c of sum (r_i - c) g_i is the train state's; otherwise the cohort's first reward.
      max_addends: of any sum; None for as many as there are.
    """

    sum_type: type[Sum]
    paired: frozenset[Path]
    is_local: bool
    has_center: bool
    max_addends: int | None

    def check_group(self, name: str, sizes: Sequence[int], objective: Objective) -> None:
        """Raises LearnerError for more addends than a sum holds.

        Args:
          sizes: of the groups of the step; the last is the one that opens.
        """
        num_groups, num_trajectories = len(sizes), sum(sizes)
        is_batch = objective.streams is Streams.BATCH
        addends = {
            "the batch sum": 2 * num_groups,  # a pair's and a prompt's of each
            "a pair": num_trajectories if is_batch else sizes[-1],
            "a sum of terms": num_trajectories + num_groups if objective.term_sums else 0,
        }
        fullest = max(addends, key=lambda found: addends[found])
        if self.max_addends is not None and addends[fullest] > self.max_addends:
            raise LearnerError(
                f"{name}: with group_size {sizes[-1]} {fullest} of this step has "
                f"{addends[fullest]} addends, and an exact sum holds at most {self.max_addends}. "
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
