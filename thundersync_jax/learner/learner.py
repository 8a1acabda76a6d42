"""`Learner`: every gradient as soon as its inputs are fixed, and the batch-synchronous update.

Owns the train state, the batch accumulator and the pool of group buffers; all are donated to the
programs and replaced by their results. One thread owns a learner: no method may be called from two
threads at a time.

    open_group, add_trajectory, set_reward, set_failed     only enqueue
    work(max_steps)     runs what is ready, each call to its completion
    update()            refuses open groups by name

The update equals that of `reference.py` to rounding for every arrival order, path mix and pool
size: the advantages A(r) = a (r - c) + b that the `Objective` declares come from rewards in index
order, and the sums are linear:

    sum_i A_i g_i = a G1 + b G2,    G1 = sum_i (r_i - c) g_i,    G2 = sum_i g_i

Which work is released when (stream or barrier) is the caller's decision: in barrier mode it calls
`work` only after the last reward.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.config_sections import LearnerSection, OptimizerSection
from thundersync_jax.learner.accumulators import Accumulators
from thundersync_jax.learner.buckets import bucket_of
from thundersync_jax.learner.contents import Contents
from thundersync_jax.learner.groups import Group, LearnerError, Member, Stage, denominators
from thundersync_jax.learner.memory import check_programs, plan_memory, room_of
from thundersync_jax.learner.optimizer import learning_rate_schedule, make_optimizer
from thundersync_jax.learner.pairs import Pairs
from thundersync_jax.learner.program_names import Shapes, program_names
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.schedule import Schedule
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.statistics import NonFiniteGradientError, StepStatistics, note_of
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.token_checks import check_prompt
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.learner.turn_buffers import TurnBuffers
from thundersync_jax.learner.turn_programs import TurnPrograms, held_caches
from thundersync_jax.learner.turn_schedule import SegmentWork, StreamTurns, TurnSchedule
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, PromptWork, Work
from thundersync_jax.learner.work_log import WorkLog
from thundersync_jax.losses.objective_check import check_turns
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.sharding import MeshShape, make_mesh
from thundersync_jax.trajectory import ScoredTurn, TrajectoryError, TrajectoryTokens, check_reward
from thundersync_jax.transport.messages import UpdateReport, WorkItem


class OpenGroupsError(LearnerError):
    """`update` was called while trajectories have no verdict or no gradient yet; names them."""


class Learner:
    """See the module's docstring."""

    def __init__(
        self,
        config: LearnerSection,
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
          mesh: axes data, fsdp, tensor; the first device alone by default.
          reserved_bytes: of every device, for others.
        """
        self._vocab_size = model.vocab_size
        self._rates = learning_rate_schedule(optimizer)
        self._objective = make_objective(config.objective, config.objective_options)
        settings = ScoreSettings(
            model=model,
            objective=self._objective,
            temperature=temperature,
            logprob_chunk=logprob_chunk,
        )
        mesh = mesh or make_mesh(MeshShape(), jax.devices()[:1])
        room = room_of(mesh.local_devices[0], reserved_bytes)
        parts = (settings, make_optimizer(optimizer), mesh)
        make: Callable[[Shapes], Programs] = functools.partial(Programs, *parts)
        if config.stream_turns != "never":
            check_turns(self._objective)
        if config.has_turns:
            make = functools.partial(TurnPrograms, *parts, held_caches(config))
        self.memory, programs = plan_memory(config, room, make)
        config, shapes = self.memory.config, programs.shapes
        self._config, self._programs = config, programs
        self._reduction = REDUCTIONS[config.reduction]
        master = programs.place_master(params)
        self.state = TrainState(params=master, opt_state=programs.init_opt_state(master))
        self.params: Params = programs.gather(master)
        pairs = Pairs(
            programs.accumulator,
            size=config.pool_size,
            per_call=shapes.num_pairs,
            in_host_memory=config.pool_memory == "pinned_host",
        )
        self._buffers = Accumulators(
            programs,
            pairs,
            num_held=config.held_gradients,
            objective=self._objective,
            start=self.state.sums,
            turns=TurnBuffers(programs) if isinstance(programs, TurnPrograms) else None,
        )
        self._schedule = self._make_schedule()
        self._contents = Contents(
            self._objective, config, self._vocab_size, self._schedule.turns.grow
        )
        self._next_group_id = 0
        self._log = WorkLog()
        self._postponed: Work | None = None
        self._begin_step()

    # -- what the caller enqueues ---------------------------------------------------------------

    def open_group(self, task_id: str, prompt_ids: Sequence[int], group_size: int) -> int:
        """Opens a group of `group_size` trajectories of one task; returns its id.

        Raises:
          LearnerError: empty or over-long prompt, ids outside the vocabulary, or a size that has no
            advantage.
        """
        if group_size < 2 or group_size != int(group_size):
            expected = "expected at least 2, or no advantage"
            raise LearnerError(f"task {task_id!r}: group_size {group_size}: {expected}")
        prompt = check_prompt(
            task_id, prompt_ids, vocab_size=self._vocab_size, longest=self._config.buckets[-1]
        )
        sizes = [*(len(group.members) for group in self._schedule.groups), group_size]
        self._reduction.check_group(f"task {task_id!r}", sizes, self._objective)
        group_id = self._next_group_id
        self._next_group_id += 1
        self._schedule.open(
            Group(
                group_id=group_id,
                task_id=task_id,
                prompt_ids=prompt,
                members=[Member(index=i) for i in range(group_size)],
                prefix_bucket=self._prefix_bucket(prompt.size - 1),
            )
        )
        return group_id

    def add_turn(self, group: int, index: int, turn: ScoredTurn) -> None:
        """Gives a growing trajectory its next turn; with `learner.stream_turns` it may run before
        the content is final. Raises LearnerError; then nothing has changed.

        Args:
          turn: not scored by a teacher: `Distiller` takes those.
        """
        self._contents.add_turn(*self._find(group, index), turn)

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None:
        """Gives a trajectory its final content. Raises LearnerError; then nothing has changed."""
        found, member = self._find(group, index)
        self._contents.add_trajectory(found, member, tokens)
        self._schedule.turns.end(member)

    def set_reward(self, group: int, index: int, reward: float) -> None:
        """Gives a trajectory its verdict. Raises LearnerError or TrajectoryError; then nothing has
        changed.
        """
        found, member = self._find(group, index)
        try:
            value = check_reward(reward)
        except TrajectoryError as error:
            raise TrajectoryError(f"{found.name(member)}: {error}") from None
        found.set_reward(member, value)

    def set_failed(self, group: int, index: int, reason: str) -> None:
        """Ends a trajectory without a reward: it leaves the group's moments too."""
        found, member = self._find(group, index)
        member.advance(Stage.FAILED, found.name(member))
        member.failure = reason

    # -- what the learner runs ------------------------------------------------------------------

    def warm_up(self) -> int:
        """Compiles every program ahead of time; returns how many there are."""
        self._rates(0)
        self._programs.warm_up(program_names(self._config))
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
            ran = self._run(work)
            self._schedule.mark_done(work)
            self._log.add_work(work, *ran, started_s)
            done += 1
        return done

    def gradient(self) -> Params:
        """A copy of the normalised descent gradient, before the clip, that `update` would now step
        along.
        """
        self._finish()
        counts = self._denominators()

        def descent(*sums: np.ndarray) -> np.ndarray:
            parts = [g / count for g, count in zip(sums, counts, strict=True)]
            return -np.sum(parts, axis=0)

        return jax.tree.map(descent, *self._buffers.totals())

    def update(self) -> UpdateReport:
        """Runs what is left, then normalises, clips and steps once; the next step starts empty.

        A step without any gradient changes no parameter, moment, schedule or version.

        Raises:
          OpenGroupsError: a trajectory has no content or no verdict.
          NonFiniteGradientError, LogprobGapError: nothing was updated; `abandon` starts the step
            again.
        """
        self._finish()
        self._statistics.check_gap()
        groups = self._schedule.groups
        is_empty = not self._statistics.has_gradient
        rate = 0.0 if is_empty else float(self._rates(self.state.policy_version))
        norm = 0.0 if is_empty else self._step(self._denominators())
        report = self._statistics.report(
            groups,
            policy_version=self.state.policy_version,
            is_empty=is_empty,
            grad_norm=norm,
            learning_rate=rate,
            num_promotions=self._buffers.num_promotions,
        )
        self._buffers.begin(self.state.sums)
        self._begin_step()
        return report

    def load(self, state: TrainState) -> None:
        """Goes on from a restored state; the step in progress is dropped."""
        self.params, self.state = None, state
        self.abandon()
        self.params = self._programs.gather(state.params)

    def abandon(self) -> None:
        """Drops the step: every group and partial sum is gone, the train state is as before it."""
        self._buffers.clear(self.state.sums)
        self._log.take()
        self._begin_step()

    def take_work_log(self) -> list[WorkItem]:
        """The program calls that completed since the last take."""
        return self._log.take()

    # -- internals ------------------------------------------------------------------------------

    def _make_schedule(self) -> Schedule:
        config, programs = self._config, self._programs
        return Schedule(
            num_replicas=programs.num_replicas,
            num_pairs=config.pool_size,
            num_slots=config.prompt_slots if config.prompt_buckets else 0,
            num_held=config.held_gradients,
            pairs_per_call=programs.shapes.num_pairs,
            lanes_per_call=programs.shapes.lanes_per_call,
            objective=self._objective,
            pack_buckets=[b for b in config.buckets if b <= config.pack_tokens],
            paired=self._reduction.paired,
            is_local=self._reduction.is_local,
            turns=self._make_turn_schedule(),
        )

    def _make_turn_schedule(self) -> TurnSchedule | None:
        config, programs = self._config, self._programs
        if config.stream_turns == "never":
            return None
        return TurnSchedule(
            num_replicas=programs.num_replicas,
            num_caches=config.num_turn_caches if config.has_turns else 0,
            buckets=config.buckets,
            prefix_buckets=config.buckets[-1:],
            lanes_per_call=programs.lanes_per_call,
            stream_turns=StreamTurns.IDLE,
        )

    def _begin_step(self) -> None:
        self._schedule.begin(self.state.sums.center if self._reduction.has_center else None)
        self._statistics = StepStatistics(self._objective, self._config.max_logprob_gap)
        self._failure: NonFiniteGradientError | None = None
        self._postponed = None

    def _find(self, group_id: int, index: int) -> tuple[Group, Member]:
        group = self._schedule.get(group_id)
        if group is None:
            known = sorted(g.group_id for g in self._schedule.groups)
            raise LearnerError(f"group {group_id!r} is not open; open groups: {known}")
        if not 0 <= index < len(group.members):
            last = len(group.members) - 1
            raise LearnerError(f"{group.name()} has indices 0 to {last}, got {index}")
        return group, group.members[index]

    def _prefix_bucket(self, num_prefix: int) -> int:
        """The padded length of a prompt to share; 0 for one too short or too long for it."""
        buckets = self._config.prompt_buckets
        if not buckets or not self._config.min_shared_tokens <= num_prefix <= buckets[-1]:
            return 0
        return bucket_of(num_prefix, buckets)

    def _run(self, work: Work) -> tuple[str, int, int]:
        """Runs one call; returns (kind, bucket, trajectories) for the log."""
        params, buffers, statistics = self.params, self._buffers, self._statistics
        match work:
            case CloseWork(replicas=cohorts):
                buffers.close(work)
                statistics.has_gradient |= any(c is not None and not c.is_zero for c in cohorts)
                return "close", 0, 0
            case PromptWork(prefix_bucket=bucket, is_backward=is_backward):
                buffers.prompt(params, work)
                return ("prompt_backward" if is_backward else "prompt_forward"), bucket, 0
            case BindWork(replicas=bound):
                buffers.bind(work)
                for lane in filter(None, bound):
                    statistics.release(lane)
                return "bind", 0, len(bound) - bound.count(None)
            case SegmentWork(kind=kind):
                notes = buffers.run_turns(params, work)
                for replica, turns in enumerate(work.replicas):
                    for at, turn in enumerate(turns):
                        note = None if notes is None else note_of(notes, replica, at)
                        member = self._schedule.turns.member_of(turn.sequence)
                        statistics.add_turn(member, kind, turn, note)
                return kind.value, work.bucket, len(work.lanes)
            case FoldWork():
                stats = buffers.fold(params, work)
                for replica, filled in enumerate(work.replicas):
                    for at, lane in enumerate(filled):
                        statistics.add(lane, note_of(stats, replica, at))
                return work.kind, work.bucket, sum(len(lane.members) for lane in work.lanes)

    def _denominators(self) -> list[float]:
        """Of every sum; 1 where nothing arrived, for its sum is 0."""
        return [d or 1.0 for d in denominators(self._objective, self._schedule.groups)]

    def _finish(self) -> None:
        """Runs what is left of the step; raises unless its gradient is complete and finite."""
        if self._failure is not None:
            raise self._failure
        self.work()
        unfinished = self._schedule.unfinished()
        if unfinished:
            raise OpenGroupsError(
                f"the update needs a verdict for every trajectory, {len(unfinished)} are missing: "
                + "; ".join(unfinished[:8])
                + ". Give each a set_reward or a set_failed, or drop the step with abandon()"
            )
        self._schedule.seal()
        self.work()
        self._statistics.check_finite()

    def _step(self, denominators: Sequence[float]) -> float:
        started_s = time.monotonic()
        state = self.state
        members = [m for group in self._schedule.groups for m in group.members]
        rewards = [m.reward for m in members if m.reward is not None]
        value, sums = self._buffers.update(state, denominators, rewards)
        self.params = None  # freed before its successor is made
        self.params = self._programs.gather(state.params)
        if not math.isfinite(value):
            self._failure = NonFiniteGradientError(
                f"the batch gradient has norm {value} although every trajectory's is finite: a sum "
                "overflowed. Call abandon() to start the step again"
            )
            raise self._failure
        self._log.add("update", 0, 0, started_s)
        state.policy_version += 1
        state.sums = sums
        return value
