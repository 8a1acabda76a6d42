"""The trajectories of one step on the host: what stage each is at, and where its group lives.

A `Cohort` is what is compared: the trajectories whose rewards give each other's advantages. It is
one group, or all groups of the step for an objective that streams by BATCH. What streams of it goes
into its pair (G1, G2), which closes with its advantages.

Invariants:
  * A member moves EXPECTED -> CONTENT -> READY -> DONE, or to FAILED from either of the first two;
    nothing else. `_TRANSITIONS` is the only table, and a second terminal event is refused by name.
  * A group closes once all members of its cohort are terminal and everything that has a gradient
    has been folded: the cohort's pairs and its own prompt, each on every replica that holds one.
  * Reward-free terms are owed from the content on, whatever the verdict, and paid when the member
    runs.
  * No terminal event depends on anything here: this module never waits.

No jax: `schedule.py` picks the next call from these records, the learner runs it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from thundersync_jax.learner.buckets import Example
from thundersync_jax.learner.turns import TurnSequence
from thundersync_jax.losses.normalizers import Counts
from thundersync_jax.losses.objective import Objective, ObjectiveError
from thundersync_jax.losses.objective_check import advantages_of, scale_of


class LearnerError(ValueError):
    """A call that the learner cannot accept: who, what was expected, and what to do."""


class Stage(enum.Enum):
    EXPECTED = "waiting for content"
    CONTENT = "waiting for a reward"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


_TRANSITIONS = {
    Stage.EXPECTED: {Stage.CONTENT, Stage.FAILED},
    Stage.CONTENT: {Stage.READY, Stage.FAILED},
    Stage.READY: {Stage.DONE},
    Stage.DONE: set(),
    Stage.FAILED: set(),
}


class Path(enum.Enum):
    """How a trajectory's gradient reached the batch sum. The result is the same."""

    DIRECT = "direct"  # the group's rewards were all known: straight to the batch accumulator
    STREAM = "stream"  # the group was open: into its pair (G1, G2)
    AHEAD = "ahead"  # its verdict was open: computed, held, and folded when the verdict came
    TERMS = "terms"  # of a lane alone: reward-free terms, and nothing of the score


FINAL_PATHS = (Path.DIRECT, Path.STREAM, Path.AHEAD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Where a gradient computed ahead of its verdict waits."""

    replica: int
    index: int


@dataclasses.dataclass(eq=False)
class Member:
    """One trajectory of a group.

    Attributes:
      bucket: of its lane; 0 when there is no gradient.
      graded: the reward as it came; `reward` is what counts, as the objective shapes it.
      owes_terms: it has reward-free terms that are in no sum yet.
      turns: its turns, while they may run ahead of its content.
      is_by_turns: they did: its held gradient has no shared prompt, and lacks `length_scale`.
      length_scale: the normaliser's factor of its token weights.
    """

    index: int
    stage: Stage = Stage.EXPECTED
    example: Example | None = None
    num_action_tokens: int = 0
    bucket: int = 0
    graded: float | None = None
    reward: float | None = None
    owes_terms: bool = False
    failure: str | None = None
    path: Path | None = None
    held: Held | None = None
    was_held: bool = False
    turns: TurnSequence | None = dataclasses.field(default=None, repr=False)
    is_by_turns: bool = False
    length_scale: float = 1.0

    @property
    def held_scale(self) -> float:
        """The factor of its gradient where it is folded: what its token weights lack."""
        return self.length_scale if self.is_by_turns else 1.0

    @property
    def is_terminal(self) -> bool:
        return self.stage in (Stage.READY, Stage.DONE, Stage.FAILED)

    def advance(self, stage: Stage, name: str) -> None:
        """Moves along `_TRANSITIONS`; LearnerError names the member otherwise."""
        if stage not in _TRANSITIONS[self.stage]:
            raise LearnerError(
                f"{name} is {self.stage.value}, so this call is out of order: a trajectory gets "
                "its content once (add_trajectory), and then exactly one of a reward (set_reward) "
                "and a failure (set_failed)"
            )
        self.stage = stage


@dataclasses.dataclass(eq=False)
class Cohort:
    """The trajectories whose rewards give each other's advantages.

    Attributes:
      is_sealed: no further group joins.
      pairs: replica -> index of the cohort's pair (G1, G2) there, while it streams.
      center: c of G1 = sum (r_i - c) g_i; where none is given, the first reward that arrives. The
        sum is the same for every c, but only one near the rewards leaves no large terms that
        cancel.
    """

    objective: Objective
    center: float | None = None
    groups: list[Group] = dataclasses.field(default_factory=list, repr=False)
    is_sealed: bool = False
    pairs: dict[int, int] = dataclasses.field(default_factory=dict)
    _closing: _Closing | None = dataclasses.field(default=None, init=False)

    def join(self, group: Group) -> None:
        """Raises LearnerError once the advantages are final."""
        if self.is_sealed:
            raise LearnerError(
                f"{group.name()}: the step's advantages are final (gradient or update was called), "
                "and this group's rewards would change them: open it before, or in the next step"
            )
        self.groups.append(group)
        group.cohort = self

    @property
    def is_complete(self) -> bool:
        """Every member is terminal: the advantages are final."""
        return self.is_sealed and all(m.is_terminal for m in self._members())

    @property
    def is_accumulated(self) -> bool:
        """Nothing is left but the close."""
        return self.is_sealed and all(group.is_accumulated for group in self.groups)

    @property
    def is_zero(self) -> bool:
        """Every advantage is exactly 0; only of a complete cohort, as all that follows."""
        return not any(self.closing.advantages.values())

    @property
    def closing(self) -> _Closing:
        if self._closing is None:
            self._closing = self._close()
        return self._closing

    def _close(self) -> _Closing:
        objective = self.objective
        rewarded = [m for m in self._members() if m.reward is not None]
        rewards = np.asarray([m.reward for m in rewarded], np.float64)
        values, line = advantages_of(objective, rewards)
        if not all(group.is_kept for group in self.groups):
            values = np.zeros_like(values)
        advantages = dict(zip(rewarded, values.tolist(), strict=True))
        scale = objective.normalizer.group_scale(sum(m.num_action_tokens for m in rewarded))
        cancellation = 0.0
        if not values.any():
            coefficients = (0.0, 0.0)
        elif line is None:
            coefficients = (0.0, 1.0)  # the gradients contain their advantages
        else:
            assert self.center is not None
            a, b = line.closing_coefficients(self.center)
            coefficients = (scale * a, scale * b)
            furthest = np.abs(rewards - self.center).max()
            cancellation = float(furthest * abs(a) / np.sqrt(np.mean(values**2)))
        return _Closing(
            advantages=advantages,
            scale=scale,
            coefficients=coefficients,
            cancellation=cancellation,
        )

    def _members(self) -> Iterator[Member]:
        """In index order of groups, and of members in them."""
        return (m for group in self.groups for m in group.members)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Closing:
    """What a complete cohort's rewards come to.

    Attributes:
      advantages: of every member with a reward.
      scale: factor of the cohort's normaliser.
      coefficients: the weights of (G1, G2), and of the prompts' adjoints.
      cancellation: how far the rewards lie from c, in units of their spread: so much larger than
        what the pair closes to its sums are.
    """

    advantages: dict[Member, float]
    scale: float
    coefficients: tuple[float, float]
    cancellation: float = 0.0

    def unit(self) -> tuple[float, float]:
        """Weights in (G1, G2) that close to 1: of a gradient that contains its advantages."""
        a, b = self.coefficients
        if abs(a) >= abs(b):
            return (1.0 / a, 0.0) if a else (0.0, 0.0)
        return 0.0, 1.0 / b


@dataclasses.dataclass(eq=False)
class Group:
    """The trajectories of one task.

    Attributes:
      prefix_bucket: padded length of the shared prompt; 0 when every member runs it itself.
      home: the replica that holds the shared prompt first, or the only one of a group that stays on
        one.
      slots: replica -> prompt slot reserved there.
      loaded: replicas whose slot holds the prompt's keys and values.
      cohort: given by the schedule when the group opens.
    """

    group_id: int
    task_id: str
    prompt_ids: np.ndarray
    members: list[Member]
    prefix_bucket: int = 0
    home: int = 0
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    loaded: set[int] = dataclasses.field(default_factory=set)
    is_closed: bool = False
    cohort: Cohort = dataclasses.field(init=False)

    @property
    def prefix_ids(self) -> np.ndarray:
        """What is shared: the prompt without its last token, which begins every branch."""
        return self.prompt_ids[:-1]

    @property
    def is_complete(self) -> bool:
        """Its advantages are final."""
        return self.cohort.is_complete

    @property
    def is_accumulated(self) -> bool:
        """Nothing is left but the close."""
        ended = (Stage.DONE, Stage.FAILED)
        return all(m.stage in ended and not m.owes_terms for m in self.members)

    @property
    def graded(self) -> np.ndarray:
        """The rewards as they came, in index order."""
        return np.asarray([m.graded for m in self.members if m.graded is not None], np.float64)

    @property
    def is_kept(self) -> bool:
        """Its rewards pass the objective's filter."""
        return self.cohort.objective.keeps_group(self.graded)

    @property
    def is_zero(self) -> bool:
        """Complete, and no advantage of its cohort is other than 0: what is in the pair does not
        count, and what is not does not run.
        """
        return self.cohort.is_zero

    @property
    def has_gradient(self) -> bool:
        """Complete, and something of it goes through its prompt, if that is shared."""
        if self.cohort.objective.term_sums:
            return any(m.bucket for m in self.members)
        counted = [m for m in self.members if m.bucket and m.reward is not None]
        return not self.is_zero and any(not m.is_by_turns for m in counted)

    def set_reward(self, member: Member, reward: float) -> None:
        """Gives a member its verdict. Raises LearnerError unless it waits for one, and
        ObjectiveError for a reward that cannot be shaped; then nothing has changed.
        """
        name, cohort = self.name(member), self.cohort
        try:
            shaped = cohort.objective.shape_reward(reward, member.num_action_tokens)
        except ObjectiveError as error:
            raise ObjectiveError(f"{name}: {error}") from error
        member.advance(Stage.READY, name)
        if cohort.center is None:
            cohort.center = shaped
        member.graded, member.reward = reward, shaped

    def name(self, member: Member | None = None) -> str:
        suffix = "" if member is None else f" index {member.index}"
        return f"group {self.group_id} (task {self.task_id!r}){suffix}"

    def waiting(self) -> list[str]:
        """The members without a verdict, by name."""
        return [f"{self.name(m)}: {m.stage.value}" for m in self.members if not m.is_terminal]


def denominators(objective: Objective, groups: Sequence[Group]) -> list[float]:
    """What each sum of the step is divided by: that of the scores counts the trajectories that have
    a reward, in groups that the objective keeps, and has the scale of their advantages; those of
    terms count final contents.
    """
    kept = [group for group in groups if group.is_kept]
    rewarded = _counts(kept, lambda member: member.reward is not None)
    final = _counts(groups, lambda member: member.example is not None)
    found = [objective.normalizer.denominator(rewarded)]
    if objective.advantage_scale is not None:
        advantages = [a for group in kept for a in group.cohort.closing.advantages.values()]
        found[0] *= scale_of(objective, np.asarray(advantages, np.float64))
    return found + [terms[0].normalizer.denominator(final) for terms in objective.term_sums]


def _counts(groups: Sequence[Group], counts: Callable[[Member], bool]) -> Counts:
    chosen = [[m for m in group.members if counts(m)] for group in groups]
    return Counts(
        num_tokens=sum(m.num_action_tokens for members in chosen for m in members),
        num_trajectories=sum(len(members) for members in chosen),
        num_groups=sum(bool(members) for members in chosen),
    )
