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
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.errors import check
from thundersync_jax.learner.base import BaseLearner
from thundersync_jax.learner.distillation_statistics import DistillationStatistics
from thundersync_jax.learner.groups import Cohort, Group, LearnerError, Member, Stage
from thundersync_jax.learner.memory import plan_memory, room_of
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.program_names import (
    Name,
    distillation_program_names,
    most_lanes,
    turn_shapes,
)
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.statistics import note_of
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.token_checks import (
    check_ids,
    check_length,
    check_prompt,
)
from thundersync_jax.learner.turn_buffers import TurnBuffers
from thundersync_jax.learner.turn_programs import CacheShapes, TurnPrograms
from thundersync_jax.learner.turn_schedule import (
    SegmentWork,
    StreamTurns,
    TurnSchedule,
)
from thundersync_jax.learner.turns import TurnSequence
from thundersync_jax.losses.opd import distillation
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.sharding import DATA, MeshShape, make_mesh
from thundersync_jax.trajectory import (
    ScoredTurn,
    TrajectoryTokens,
)
from thundersync_jax.transport.messages import UpdateReport


class GrowingTrajectoriesError(LearnerError):
    """`update` was called while trajectories may still get turns; names them."""


class Distiller(BaseLearner[SegmentWork]):
    """See the module's docstring."""

    _schedule: TurnSchedule
    _programs: TurnPrograms
    _buffers: TurnBuffers
    _statistics: DistillationStatistics

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
        self._model = model
        self._opd = opd
        settings = ScoreSettings(
            model=model,
            temperature=temperature,
            objective=distillation(ratio_cap=opd.ratio_cap),
            logprob_chunk=logprob_chunk,
        )
        mesh = mesh or make_mesh(MeshShape(), jax.devices()[:1])
        self._config = LearnerSection(
            mesh=config.mesh,
            buckets=config.buckets,
            tokens_per_step=config.tokens_per_step,
            max_logprob_gap=config.max_logprob_gap,
            pool_size=0,
            held_gradients=0,
        )
        stream_turns = StreamTurns(opd.stream_turns)
        self._prefix_buckets = opd.prefix_buckets or config.buckets[-1:]
        caches = _cache_shapes(config, opd, self._prefix_buckets)
        if caches.num_residuals:
            settings = _keeping(settings, caches.num_residuals, mesh)
        make = functools.partial(TurnPrograms, settings, make_optimizer(optimizer), mesh, caches)
        room = room_of(mesh.local_devices[0], reserved_bytes)
        memory, programs = plan_memory(self._config, room, make)
        assert isinstance(programs, TurnPrograms)
        super().__init__(programs, memory, optimizer, params)
        self._schedule = TurnSchedule(
            num_replicas=programs.num_replicas,
            num_caches=caches.num_caches,
            buckets=config.buckets,
            prefix_buckets=self._prefix_buckets,
            lanes_per_call=programs.lanes_per_call,
            stream_turns=stream_turns,
            num_residuals=caches.num_residuals,
        )
        self._buffers = TurnBuffers(programs)
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
            task_id, prompt_ids, vocab_size=self._model.vocab_size, longest=self._config.buckets[-1]
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
        self._open.append(group)
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
        check_ids(name, turn.tokens.token_ids, self._model.vocab_size)
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

    def set_failed(self, group: int, index: int, reason: str) -> None:
        """Ends a trajectory; the turns that were scored are trained on."""
        super().set_failed(group, index, reason)
        _, member = self._find(group, index)
        self._sequences[member].is_closed = True

    # -- internals ------------------------------------------------------------------------------

    def _program_names(self) -> list[Name]:
        return distillation_program_names(
            self._config.buckets,
            self._prefix_buckets,
            has_caches=self._programs.caches is not None,
            has_residuals=bool(self._programs.num_residuals),
            has_pages=self._programs.host_caches is not None,
        )

    def _groups(self) -> list[Group]:
        return self._open

    def _begin_step(self) -> None:
        super()._begin_step()
        self._schedule.clear()
        self._open: list[Group] = []
        self._sequences: dict[Member, TurnSequence] = {}
        is_weighted = self._opd.ratio_cap > 0
        self._statistics = DistillationStatistics(
            math.inf if is_weighted else self._config.max_logprob_gap, self._model
        )

    def _clear_buffers(self) -> None:
        self._buffers.clear()

    def _run(self, work: SegmentWork) -> tuple[str, int, int]:
        stats = self._buffers.run(self.params, work)
        for replica, filled in enumerate(work.replicas):
            for at, lane in enumerate(filled):
                note = None if stats is None else note_of(stats, replica, at)
                self._statistics.add(work.kind, lane, note)
        return work.kind.value, work.bucket, len(work.lanes)

    def _denominators(self) -> list[float]:
        """The scored action tokens that arrived, or 1."""
        if self._opd.normalizer == "sum":
            return [1.0]
        return [float(sum(s.num_scored_tokens for s in self._sequences.values()) or 1)]

    def _check_ended(self) -> None:
        growing = [s.name for s in self._sequences.values() if not s.is_closed]
        if growing:
            raise GrowingTrajectoriesError(
                f"the update needs every trajectory's end, {len(growing)} still grow: "
                + "; ".join(growing[:8])
                + ". Give each an add_trajectory or a set_failed, or drop the step with abandon()"
            )

    def _left(self) -> list[str]:
        return [sequence.name for sequence in self._sequences.values() if not sequence.is_done]

    def _report(self, *, is_empty: bool, grad_norm: float, learning_rate: float) -> UpdateReport:
        return self._statistics.report(
            self._groups(),
            list(self._sequences.values()),
            policy_version=self.state.policy_version,
            is_empty=is_empty,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
        )


def _cache_shapes(
    config: LearnerSection, opd: OpdSection, prefix_buckets: tuple[int, ...]
) -> CacheShapes:
    """With caches in the host, the device has places for those that one call can reach."""
    num_caches = opd.num_caches if opd.has_caches else 0
    is_paged = opd.cache_memory == "pinned_host"
    return CacheShapes(
        num_caches=num_caches,
        num_places=min(num_caches, most_lanes(config)) if is_paged else num_caches,
        length=config.buckets[-1],
        num_residuals=opd.num_residuals,
        shapes=turn_shapes(config.buckets, prefix_buckets) if opd.num_residuals else (),
    )


def _keeping(settings: ScoreSettings, num_residuals: int, mesh: Mesh) -> ScoreSettings:
    """The settings with which residuals are kept: the outputs of projections, or what
    `model.remat` keeps if that is less. Raises ConfigError on a mesh that cannot.
    """
    is_whole = mesh.size == mesh.shape[DATA]
    expected = "0 where a replica is more than one device (fsdp or tensor above 1 in learner.mesh)"
    check(is_whole, "opd.num_residuals", num_residuals, expected)
    if settings.model.remat != "none":
        return settings
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, remat="dots"))
