"""`Learner`: every gradient as soon as its inputs are fixed, and the batch-synchronous update.

Owns the train state, the batch accumulator and the pool of group buffers; all are donated to the
programs and replaced by their results. One thread owns a learner: no method may be called from two
threads at a time.

    open_group, add_trajectory, set_reward, set_failed     only enqueue
    work(max_steps)     runs what is ready, each call to its completion
    update()            refuses open groups by name

The update equals that of `reference.py` to rounding for every arrival order, path mix and pool
size: the coefficients come from rewards in index order, and the sums are linear:

    sum_i A_i g_i = (G1 - (mean - c) G2) / (std + eps),  G1 = sum_i (r_i - c) g_i,  G2 = sum_i g_i

Which work is released when (stream or barrier) is the caller's decision: in barrier mode it calls
`work` only after the last reward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from thundersync_jax.config_sections import LearnerSection, OptimizerSection
from thundersync_jax.learner.buckets import bucket_of, make_example, pad_lanes
from thundersync_jax.learner.groups import (
    CloseWork,
    FoldWork,
    GroupLedger,
    LearnerError,
    Path,
    Stage,
)
from thundersync_jax.learner.optimizer import learning_rate_schedule, make_optimizer
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.streaming import LaneStats, Params, ScoreSettings
from thundersync_jax.learner.train_state import TrainState
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.trajectory import TrajectoryError, TrajectoryTokens, check_reward
from thundersync_jax.transport.messages import UpdateReport, WorkItem


class OpenGroupsError(LearnerError):
    """`update` was called while trajectories have no verdict or no gradient yet; names them."""


class NonFiniteGradientError(ArithmeticError):
    """A gradient with inf or NaN; names its trajectories. Parameters and moments are as before the
    step.
    """


class LogprobGapError(ArithmeticError):
    """Sampler and learner disagree by more than `learner.max_logprob_gap`; nothing was updated."""


class Learner:
    """See the module's docstring."""

    def __init__(
        self,
        config: LearnerSection,
        optimizer: OptimizerSection,
        model: TransformerConfig,
        params: Params,
        *,
        temperature: float = 1.0,
        logprob_chunk: int = 16384,
    ) -> None:
        """Takes `params` over: they are donated to the first update, so the caller keeps no
        reference.
        """
        self._config = config
        self._vocab_size = model.vocab_size
        self._schedule = learning_rate_schedule(optimizer)
        transformation = make_optimizer(optimizer)
        settings = ScoreSettings(
            model=model,
            temperature=temperature,
            tis_cap=config.tis_cap,
            logprob_chunk=logprob_chunk,
        )
        self._programs = Programs(settings, transformation, params, num_lanes=config.lanes)
        self.state = TrainState(params=params, opt_state=jax.jit(transformation.init)(params))
        self._batch = self._programs.zeros(params)
        self._pool = [
            (self._programs.zeros(params), self._programs.zeros(params))
            for _ in range(config.pool_size)
        ]
        self._ledger = GroupLedger(config.pool_size, config.lanes, config.advantage)
        self._next_group_id = 0
        self._log: list[WorkItem] = []
        self._begin_step()

    # -- what the caller enqueues ---------------------------------------------------------------

    def open_group(self, task_id: str, prompt_ids: Sequence[int], group_size: int) -> int:
        """Opens a group of `group_size` trajectories of one task; returns its id.

        Raises:
          LearnerError: empty or over-long prompt, ids outside the vocabulary, or a size that has no
            advantage.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        if prompt.ndim != 1 or prompt.size == 0:
            raise LearnerError(
                f"task {task_id!r}: a prompt needs at least one token, got {prompt_ids!r}"
            )
        if group_size < (2 if self._config.advantage == "grpo" else 1):
            raise LearnerError(
                f"task {task_id!r}: group_size {group_size} has no standard deviation; use at "
                "least 2, or "
                "learner.advantage = 'dr_grpo'"
            )
        self._check_ids(f"task {task_id!r}", prompt)
        if prompt.size > self._config.buckets[-1]:
            raise LearnerError(
                f"task {task_id!r}: a prompt of {prompt.size} tokens exceeds the longest bucket "
                f"{self._config.buckets[-1]}; shorten it or extend learner.buckets"
            )
        group_id = self._next_group_id
        self._next_group_id += 1
        self._ledger.open(group_id, task_id, prompt, group_size)
        return group_id

    def add_trajectory(self, group: int, index: int, tokens: TrajectoryTokens) -> None:
        """Gives a trajectory its final content. Raises LearnerError; then nothing has changed."""
        found, member = self._ledger.find(group, index)
        self._check_ids(found.name(member), tokens.token_ids)
        example = make_example(found.prompt_ids, tokens, self._config.normalizer)
        longest = self._config.buckets[-1]
        if example.num_positions > longest:
            raise LearnerError(
                f"{found.name(member)}: {example.num_positions + 1} tokens exceed the longest "
                f"bucket {longest} + 1; "
                "lower rollout.max_tokens or extend learner.buckets"
            )
        self._ledger.advance(found, member, Stage.CONTENT)
        member.example = example
        member.num_action_tokens = tokens.num_action_tokens
        if example.num_positions:
            member.bucket = bucket_of(example.num_positions, self._config.buckets)

    def set_reward(self, group: int, index: int, reward: float) -> None:
        """Gives a trajectory its verdict. Raises LearnerError or TrajectoryError; then nothing has
        changed.
        """
        found, member = self._ledger.find(group, index)
        try:
            value = check_reward(reward)
        except TrajectoryError as error:
            raise TrajectoryError(f"{found.name(member)}: {error}") from None
        self._ledger.advance(found, member, Stage.READY)
        member.reward = value

    def set_failed(self, group: int, index: int, reason: str) -> None:
        """Ends a trajectory without a reward: it leaves the group's moments too."""
        found, member = self._ledger.find(group, index)
        self._ledger.advance(found, member, Stage.FAILED)
        member.failure = reason

    # -- what the learner runs ------------------------------------------------------------------

    def warm_up(self) -> int:
        """Compiles every program ahead of time; returns how many there are."""
        self._schedule(0)
        self._programs.warm_up(self._config.buckets, has_pool=self._config.pool_size > 0)
        return self._programs.num_programs

    def work(self, max_steps: int | None = None) -> int:
        """Runs up to `max_steps` ready program calls, each to completion; returns how many ran."""
        done = 0
        while max_steps is None or done < max_steps:
            work = self._ledger.next_work()
            if work is None:
                break
            started_s = time.monotonic()
            if isinstance(work, CloseWork):
                path, bucket, num_trajectories = "close", 0, 0
                self._close(work)
            else:
                path, bucket, num_trajectories = work.path.value, work.bucket, len(work.members)
                self._fold(work)
            self._ledger.mark_done(work)
            self._record(path, bucket, num_trajectories, started_s)
            done += 1
        return done

    def gradient(self) -> Params:
        """A copy of the normalised descent gradient, before the clip, that `update` would now step
        along.
        """
        self._finish()
        denominator = max(self._denominator(), 1.0)
        return jax.tree.map(lambda g: -np.asarray(g) / denominator, self._batch)

    def update(self) -> UpdateReport:
        """Runs what is left, then normalises, clips and steps once; the next step starts empty.

        A step without any gradient changes no parameter, moment, schedule or version.

        Raises:
          OpenGroupsError: a trajectory has no content or no verdict.
          NonFiniteGradientError, LogprobGapError: nothing was updated; `abandon` starts the step
            again.
        """
        self._finish()
        self._check_gap()
        rewards = [m.reward for g in self._ledger.groups for m in g.members if m.reward is not None]
        denominator = self._denominator()
        is_empty = not self._has_gradient or denominator == 0
        norm = 0.0 if is_empty else self._step(denominator)
        report = self._report(is_empty, norm, rewards)
        if rewards:
            self.state.reward_center = float(np.mean(np.asarray(rewards, np.float64)))
        self._ledger.clear()
        self._begin_step()
        return report

    def abandon(self) -> None:
        """Drops the step: every group and partial sum is gone, the train state is as before it."""
        self._ledger.clear()
        self._batch = self._programs.zeros(self.state.params)
        self._pool = [
            (self._programs.zeros(self.state.params), self._programs.zeros(self.state.params))
            for _ in self._pool
        ]
        self._begin_step()

    def take_work_log(self) -> list[WorkItem]:
        """The program calls that completed since the last take."""
        log = list(self._log)
        self._log.clear()
        return log

    # -- internals ------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._non_finite: list[str] = []
        self._gap_sum, self._gap_max, self._gap_tokens = 0.0, -math.inf, 0
        self._gap_name = ""
        self._has_gradient = False

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if outside.size:
            raise LearnerError(
                f"{name}: token ids {outside[:4].tolist()} are outside the vocabulary of "
                f"{self._vocab_size}"
            )

    def _fold(self, work: FoldWork) -> None:
        lanes = pad_lanes(
            [m.example for _, m in work.members if m.example is not None],
            self._config.lanes,
            work.bucket,
        )
        rows = 1 if work.path is Path.DIRECT else 2
        coefficients = np.zeros((rows, self._config.lanes))
        for lane, (group, member) in enumerate(work.members):
            assert member.reward is not None
            if work.path is Path.DIRECT:
                coefficients[0, lane] = group.moments(self._config.advantage).advantage(
                    member.reward
                )
            else:
                coefficients[:, lane] = member.reward - self.state.reward_center, 1.0
        if work.path is Path.DIRECT:
            (self._batch,), stats = self._programs.fold(
                work.path, self.state.params, (self._batch,), coefficients, lanes
            )
            self._has_gradient = True
        else:
            buffer = work.members[0][0].buffer
            assert buffer is not None
            pair, stats = self._programs.fold(
                work.path, self.state.params, self._pool[buffer], coefficients, lanes
            )
            self._pool[buffer] = (pair[0], pair[1])
        self._note(work, jax.device_get(stats))

    def _close(self, work: CloseWork) -> None:
        group, buffer = work.group, work.group.buffer
        assert buffer is not None
        moments = group.moments(self._config.advantage)
        coefficients = moments.closing_coefficients(self.state.reward_center)
        self._batch, self._pool[buffer] = self._programs.close(
            self._batch, self._pool[buffer], coefficients
        )
        jax.block_until_ready(self._batch)
        self._has_gradient |= not moments.is_zero_variance

    def _note(self, work: FoldWork, stats: LaneStats) -> None:
        for lane, (group, member) in enumerate(work.members):
            self._gap_sum += float(stats.gap_sum[lane])
            self._gap_tokens += member.num_action_tokens
            if float(stats.gap_max[lane]) > self._gap_max:
                self._gap_max, self._gap_name = float(stats.gap_max[lane]), group.name(member)
            if not stats.is_finite[lane]:
                self._non_finite.append(group.name(member))

    def _check_gap(self) -> None:
        if self._config.tis_cap == 0 and self._gap_max > self._config.max_logprob_gap:
            raise LogprobGapError(
                f"{self._gap_name}: sampler and learner differ by {self._gap_max:.3g} nats at one "
                "token, more than "
                f"learner.max_logprob_gap = {self._config.max_logprob_gap}. Check that both use "
                "the same weights, "
                "temperature and dtype, or set learner.tis_cap to weight the difference"
            )

    def _denominator(self) -> float:
        """Action tokens, or trajectories, that arrived with a reward. Groups of equal rewards
        count.
        """
        members = [m for g in self._ledger.groups for m in g.members if m.reward is not None]
        if self._config.normalizer == "token_mean":
            return float(sum(m.num_action_tokens for m in members))
        return float(len(members))

    def _record(self, path: str, bucket: int, num_trajectories: int, started_s: float) -> None:
        item = WorkItem(
            path=path,
            bucket=bucket,
            num_trajectories=num_trajectories,
            started_s=started_s,
            ended_s=time.monotonic(),
        )
        self._log.append(item)

    def _finish(self) -> None:
        """Runs what is left of the step; raises unless its gradient is complete and finite."""
        self.work()
        unfinished = self._ledger.unfinished()
        if unfinished:
            raise OpenGroupsError(
                f"the update needs a verdict for every trajectory, {len(unfinished)} are missing: "
                + "; ".join(unfinished[:8])
            )
        if self._non_finite:
            raise NonFiniteGradientError(
                "the score gradient is not finite for " + "; ".join(self._non_finite[:8])
            )

    def _step(self, denominator: float) -> float:
        started_s = time.monotonic()
        self.state.params, self.state.opt_state, self._batch, norm = self._programs.update(
            self.state.params, self.state.opt_state, self._batch, denominator
        )
        value = float(norm)  # blocks until the update is complete
        if not math.isfinite(value):
            raise NonFiniteGradientError(
                f"the batch gradient has norm {value} although every trajectory's is finite: a sum "
                "overflowed"
            )
        self._record("update", 0, 0, started_s)
        self.state.policy_version += 1
        return value

    def _report(self, is_empty: bool, grad_norm: float, rewards: Sequence[float]) -> UpdateReport:
        groups = self._ledger.groups
        members = [m for g in groups for m in g.members]
        paths: Mapping[str, int] = {
            path.value: sum(m.path is path for m in members) for path in Path
        }
        applied = self.state.policy_version - (0 if is_empty else 1)
        return UpdateReport(
            policy_version=self.state.policy_version,
            is_empty=is_empty,
            reward_mean=float(np.mean(rewards)) if rewards else math.nan,
            num_groups=len(groups),
            num_trajectories=len(members),
            num_failed=sum(m.stage is Stage.FAILED for m in members),
            zero_variance_groups=sum(
                g.moments(self._config.advantage).is_zero_variance for g in groups
            ),
            action_tokens=sum(m.num_action_tokens for m in members if m.reward is not None),
            grad_norm=grad_norm,
            logprob_gap_mean=self._gap_sum / self._gap_tokens if self._gap_tokens else math.nan,
            logprob_gap_max=self._gap_max if self._gap_tokens else math.nan,
            learning_rate=0.0 if is_empty else float(self._schedule(applied)),
            paths=paths,
            num_held=sum(m.was_held for m in members),
        )
