"""`Distiller`: on-policy distillation by turns, behind the interface of `Learner`.

Owns the train state, the batch accumulator and the pool of trajectory caches; all are donated to
the programs and replaced by their results. One thread owns a distiller.

    open_group, add_turn, add_trajectory, set_reward, set_failed     only enqueue
    work(max_steps)     runs what is ready, each call to its completion
    update()            refuses trajectories that still grow by name

A turn is trained on once its teacher's scores are there; `add_trajectory` only says that no turn
follows. No reward is needed, and none changes the gradient. An attempt that failed is trained on up
to the last turn that was scored: those tokens are the policy's, and the teacher has judged them.

The update equals the gradient of whole trajectories to rounding for every order of arrival, number
of caches and `stream_turns`. Every trajectory runs its prompt itself, in its first segment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import LearnerSection, OptimizerSection
from thundersync_jax.learner.distillation_statistics import DistillationStatistics
from thundersync_jax.learner.groups import Cohort, Group, LearnerError, Member, Stage
from thundersync_jax.learner.memory import check_programs, plan_memory, room_of
from thundersync_jax.learner.optimizer import learning_rate_schedule, make_optimizer
from thundersync_jax.learner.program_names import distillation_program_names
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.statistics import NonFiniteGradientError, note_of
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.token_checks import (
    check_ids,
    check_length,
    check_prompt,
)
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_buffers import TurnBuffers
from thundersync_jax.learner.turn_programs import CacheShapes, TurnPrograms
from thundersync_jax.learner.turn_schedule import (
    SegmentWork,
    StreamTurns,
    TurnSchedule,
)
from thundersync_jax.learner.turns import TurnSequence
from thundersync_jax.learner.work_log import WorkLog
from thundersync_jax.losses.opd import distillation
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.sharding import MeshShape, make_mesh
from thundersync_jax.trajectory import (
    ScoredTurn,
    TrajectoryError,
    TrajectoryTokens,
    check_reward,
)
from thundersync_jax.transport.messages import UpdateReport, WorkItem


class GrowingTrajectoriesError(LearnerError):
    """`update` was called while trajectories may still get turns; names them."""


class Distiller:
    """See the module's docstring."""

    def __init__(
        self,
        config: LearnerSection,
        opd: OpdSection,
        optimizer: OptimizerSection,
        model: TransformerConfig,
        params: Params,
        *,
        mesh: Mesh | None = None,
        temperature: float = 1.0,
        logprob_chunk: int = 16384,
        reserved_bytes: int = 0,
    ) -> None:
        """Takes `params` over: they are donated to the first update, so the caller keeps none.

        Args:
          config: mesh, buckets, tokens_per_step and max_logprob_gap are read.
          mesh: axes data, fsdp, tensor; the first device alone by default.
          reserved_bytes: of every device, for others.
        """
        self._vocab_size = model.vocab_size
        self._opd = opd
        self._rates = learning_rate_schedule(optimizer)
        settings = ScoreSettings(
            model=model,
            temperature=temperature,
            objective=distillation(ratio_cap=opd.ratio_cap),
            logprob_chunk=logprob_chunk,
        )
        mesh = mesh or make_mesh(MeshShape(), jax.devices()[:1])
        self._config = dataclasses.replace(
            config, pool_size=0, held_gradients=0, prompt_buckets=(), pack_tokens=0
        )
        stream_turns = StreamTurns(opd.stream_turns)
        num_caches = 0 if stream_turns is StreamTurns.NEVER else opd.num_caches
        caches = CacheShapes(num_caches=num_caches, length=config.buckets[-1])
        make = functools.partial(TurnPrograms, settings, make_optimizer(optimizer), mesh, caches)
        room = room_of(mesh.local_devices[0], reserved_bytes)
        self.memory, programs = plan_memory(self._config, room, make)
        assert isinstance(programs, TurnPrograms)
        self._programs = programs
        master = programs.place_master(params)
        self.state = TrainState(params=master, opt_state=programs.init_opt_state(master))
        self.params: Params = programs.gather(master)
        self._prefix_buckets = opd.prefix_buckets or config.buckets[-1:]
        self._schedule = TurnSchedule(
            num_replicas=programs.num_replicas,
            num_caches=num_caches,
            buckets=config.buckets,
            prefix_buckets=self._prefix_buckets,
            lanes_per_call=programs.lanes_per_call,
            stream_turns=stream_turns,
        )
        self._next_group_id = 0
        self._log = WorkLog()
        self._postponed: SegmentWork | None = None
        self._buffers = TurnBuffers(programs)
        self._batch: Any = programs.accumulator()  # a Sum
        self._begin_step()

    # -- what the caller enqueues ---------------------------------------------------------------

    def open_group(self, task_id: str, prompt_ids: Sequence[int], group_size: int) -> int:
        """Opens a group of `group_size` trajectories of one task; returns its id.

        Raises:
          LearnerError: empty or over-long prompt, ids outside the vocabulary, or no trajectory.
        """
        if group_size < 1 or group_size != int(group_size):
            raise LearnerError(f"task {task_id!r}: group_size {group_size}: expected at least 1")
        prompt = check_prompt(
            task_id, prompt_ids, vocab_size=self._vocab_size, longest=self._config.buckets[-1]
        )
        group = Group(
            group_id=self._next_group_id,
            task_id=task_id,
            prompt_ids=prompt,
            members=[Member(index=i) for i in range(group_size)],
        )
        group.cohort = Cohort(
            objective=distillation(ratio_cap=self._opd.ratio_cap), groups=[group], is_sealed=True
        )
        self._next_group_id += 1
        self._groups[group.group_id] = group
        for member in group.members:
            sequence = TurnSequence(group.name(member), prompt)
            self._sequences[member] = sequence
            self._schedule.add(sequence)
        return group.group_id

    def add_turn(self, group: int, index: int, turn: ScoredTurn) -> None:
        """Gives a trajectory its next turn. Raises LearnerError; then nothing has changed."""
        found, member = self._find(group, index)
        sequence, name = self._sequences[member], found.name(member)
        if member.stage is not Stage.EXPECTED:
            raise LearnerError(f"{name} is {member.stage.value}: no turn can follow")
        check_ids(name, turn.tokens.token_ids, self._vocab_size)
        num_positions = sequence.num_tokens + turn.tokens.num_tokens - 1
        check_length(name, num_positions, self._config.buckets[-1])
        sequence.add(turn)

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None:
        """The content is final: no turn follows. Raises LearnerError unless `tokens` are its turns'
        tokens; then nothing has changed.
        """
        found, member = self._find(group, index)
        sequence = self._sequences[member]
        if not np.array_equal(sequence.token_ids, tokens.token_ids):
            raise LearnerError(
                f"{found.name(member)}: its turns hold {len(sequence.token_ids)} tokens and its "
                f"content {tokens.num_tokens}, expected the same ones: give every turn to add_turn "
                "first"
            )
        member.advance(Stage.CONTENT, found.name(member))
        sequence.is_closed = True

    def set_reward(self, group: int, index: int, reward: float) -> None:
        """Says what a trajectory got, for the report alone. Raises LearnerError or
        TrajectoryError.
        """
        found, member = self._find(group, index)
        try:
            value = check_reward(reward)
        except TrajectoryError as error:
            raise TrajectoryError(f"{found.name(member)}: {error}") from None
        found.set_reward(member, value)

    def set_failed(self, group: int, index: int, reason: str) -> None:
        """Ends a trajectory; the turns that were scored are trained on."""
        found, member = self._find(group, index)
        member.advance(Stage.FAILED, found.name(member))
        member.failure = reason
        self._sequences[member].is_closed = True

    # -- what the distiller runs ----------------------------------------------------------------

    def warm_up(self) -> int:
        """Compiles every program ahead of time; returns how many there are."""
        self._rates(0)
        names = distillation_program_names(
            self._config.buckets,
            self._prefix_buckets,
            has_caches=self._programs.caches is not None,
        )
        self._programs.warm_up(names)
        self.memory = check_programs(self.memory, self._programs.temporaries())
        return self._programs.num_programs

    @property
    def has_postponed(self) -> bool:
        """Whether the last `work` left a ready call because it would have taken too long."""
        return self._postponed is not None

    def work(self, max_steps: int | None = None, *, max_call_s: float = math.inf) -> int:
        """Runs up to `max_steps` ready program calls, each to completion; returns how many ran.

        Args:
          max_call_s: a call that would take longer, judged by those before it, is postponed: it
            comes first in the next `work`.
        """
        done = 0
        while max_steps is None or done < max_steps:
            work = self._postponed or self._schedule.next_work()
            self._postponed = None
            if work is None:
                break
            if self._log.predict_s(work) > max_call_s:
                self._postponed = work
                break
            started_s = time.monotonic()
            self._run(work)
            self._schedule.mark_done(work)
            self._log.add_work(work, work.kind.value, work.bucket, len(work.lanes), started_s)
            done += 1
        return done

    def gradient(self) -> Params:
        """A copy of the normalised descent gradient, before the clip, that `update` would now step
        along.
        """
        self._finish()
        denominator = max(self._denominator(), 1.0)
        return jax.tree.map(lambda g: -np.asarray(g) / denominator, self._batch.total())

    def update(self) -> UpdateReport:
        """Runs what is left, then normalises, clips and steps once; the next step starts empty.

        A step without any gradient changes no parameter, moment, schedule or version.

        Raises:
          GrowingTrajectoriesError: a trajectory has neither its content nor a failure.
          NonFiniteGradientError, LogprobGapError: nothing was updated; `abandon` starts the step
            again.
        """
        self._finish()
        self._statistics.check_gap()
        is_empty = not self._statistics.has_gradient
        rate = 0.0 if is_empty else float(self._rates(self.state.policy_version))
        norm = 0.0 if is_empty else self._step(self._denominator())
        report = self._statistics.report(
            list(self._groups.values()),
            list(self._sequences.values()),
            policy_version=self.state.policy_version,
            is_empty=is_empty,
            grad_norm=norm,
            learning_rate=rate,
        )
        self._begin_step()
        return report

    def load(self, state: TrainState) -> None:
        """Goes on from a restored state; the step in progress is dropped."""
        self.abandon()
        self.state, self.params = state, None
        self.params = self._programs.gather(state.params)

    def abandon(self) -> None:
        """Drops the step: every partial sum is gone, the train state is as before it."""
        self._log.take()
        self._batch = None  # freed before its successor is made
        self._batch = self._programs.accumulator()
        self._buffers.clear()
        self._begin_step()

    def take_work_log(self) -> list[WorkItem]:
        """The program calls that completed since the last take."""
        return self._log.take()

    # -- internals ------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._schedule.clear()
        self._groups: dict[int, Group] = {}
        self._sequences: dict[Member, TurnSequence] = {}
        is_weighted = self._opd.ratio_cap > 0
        self._statistics = DistillationStatistics(
            math.inf if is_weighted else self._config.max_logprob_gap
        )
        self._failure: NonFiniteGradientError | None = None
        self._postponed = None

    def _find(self, group_id: int, index: int) -> tuple[Group, Member]:
        group = self._groups.get(group_id)
        if group is None:
            raise LearnerError(
                f"group {group_id!r} is not open; open groups: {sorted(self._groups)}"
            )
        if not 0 <= index < len(group.members):
            last = len(group.members) - 1
            raise LearnerError(f"{group.name()} has indices 0 to {last}, got {index}")
        return group, group.members[index]

    def _run(self, work: SegmentWork) -> None:
        (self._batch,), stats = self._buffers.run(self.params, work, (self._batch,))
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                note = None if stats is None else note_of(stats, replica, at)
                self._statistics.add(work.kind, lane, note)

    def _denominator(self) -> float:
        """The scored action tokens that arrived, or 1."""
        if self._opd.normalizer == "sum":
            return 1.0
        return float(sum(s.num_scored_tokens for s in self._sequences.values()))

    def _finish(self) -> None:
        """Runs what is left of the step; raises unless its gradient is complete and finite."""
        if self._failure is not None:
            raise self._failure
        self.work()
        growing = [s.name for s in self._sequences.values() if not s.is_closed]
        if growing:
            raise GrowingTrajectoriesError(
                f"the update needs every trajectory's end, {len(growing)} still grow: "
                + "; ".join(growing[:8])
                + ". Give each an add_trajectory or a set_failed, or drop the step with abandon()"
            )
        self._statistics.check_finite()

    def _step(self, denominator: float) -> float:
        started_s = time.monotonic()
        state = self.state
        state.params, state.opt_state, (self._batch,), norm = self._programs.update(
            state.params, state.opt_state, (self._batch,), [denominator]
        )
        self.params = None  # freed before its successor is made
        self.params = self._programs.gather(state.params)
        value = float(norm)  # blocks until the update is complete
        if not math.isfinite(value):
            self._failure = NonFiniteGradientError(
                f"the batch gradient has norm {value} although every turn's is finite: a sum "
                "overflowed. Call abandon() to start the step again"
            )
            raise self._failure
        self._log.add("update", 0, 0, started_s)
        state.policy_version += 1
        return value
