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
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.learner.accumulators import Accumulators
from thundersync_jax.learner.base import BaseLearner
from thundersync_jax.learner.buckets import bucket_of
from thundersync_jax.learner.contents import Contents
from thundersync_jax.learner.groups import Group, LearnerError, Member, denominators
from thundersync_jax.learner.memory import plan_memory, room_of
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.pairs import Pairs
from thundersync_jax.learner.program_names import Name, Shapes, program_names
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.schedule import Schedule
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.statistics import StepStatistics, note_of
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.token_checks import check_prompt
from thundersync_jax.learner.turn_buffers import TurnCaches
from thundersync_jax.learner.turn_programs import TurnPrograms, held_caches
from thundersync_jax.learner.turn_schedule import SegmentWork, StreamTurns, TurnSchedule
from thundersync_jax.learner.work import BindWork, CloseWork, FoldWork, PromptWork, Work
from thundersync_jax.losses.objective_check import check_turns
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.sharding import MeshShape, make_mesh
from thundersync_jax.trajectory import ScoredTurn, TrajectoryTokens
from thundersync_jax.transport.messages import UpdateReport


class OpenGroupsError(LearnerError):
    """`update` was called while trajectories have no verdict or no gradient yet; names them."""


class Learner(BaseLearner[Work]):
    """See the module's docstring."""

    _schedule: Schedule
    _buffers: Accumulators
    _statistics: StepStatistics

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
        self._model = model
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
        memory, programs = plan_memory(config, room, make)
        super().__init__(programs, memory, optimizer, params)
        config, shapes = memory.config, programs.shapes
        self._config = config
        self._reduction = REDUCTIONS[config.reduction]
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
            turns=TurnCaches(programs) if isinstance(programs, TurnPrograms) else None,
        )
        self._schedule = self._make_schedule()
        grow = self._schedule.turns.grow
        self._contents = Contents(self._objective, config, self._model.vocab_size, grow)
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
            task_id, prompt_ids, vocab_size=self._model.vocab_size, longest=self._config.buckets[-1]
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
        found, member = self._find(group, index)
        self._contents.add_turn(found, member, turn)

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None:
        """Gives a trajectory its final content. Raises LearnerError; then nothing has changed."""
        found, member = self._find(group, index)
        self._contents.add_trajectory(found, member, tokens)
        self._schedule.turns.end(member)

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

    def _program_names(self) -> list[Name]:
        return program_names(self._config)

    def _groups(self) -> list[Group]:
        return self._schedule.groups

    def _begin_step(self) -> None:
        super()._begin_step()
        self._buffers.begin(self.state.sums)
        self._schedule.begin(self.state.sums.center if self._reduction.has_center else None)
        self._statistics = StepStatistics(
            self._objective, self._config.max_logprob_gap, self._model
        )

    def _clear_buffers(self) -> None:
        self._buffers.clear(self.state.sums)

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

    def _check_ended(self) -> None:
        unfinished = self._schedule.unfinished()
        if unfinished:
            raise OpenGroupsError(
                f"the update needs a verdict for every trajectory, {len(unfinished)} are missing: "
                + "; ".join(unfinished[:8])
                + ". Give each a set_reward or a set_failed, or drop the step with abandon()"
            )
        self._schedule.seal()

    def _left(self) -> list[str]:
        return [group.name() for group in self._groups() if not group.is_closed]

    def _step(self) -> float:
        norm = super()._step()
        members = [m for group in self._groups() for m in group.members]
        rewards = [m.reward for m in members if m.reward is not None]
        self.state.sums = self._buffers.next_start(rewards)
        return norm

    def _report(self, *, is_empty: bool, grad_norm: float, learning_rate: float) -> UpdateReport:
        return self._statistics.report(
            self._groups(),
            policy_version=self.state.policy_version,
            is_empty=is_empty,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_promotions=self._buffers.num_promotions,
        )
