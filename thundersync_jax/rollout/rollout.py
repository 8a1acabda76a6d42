"""One attempt from reset to verdict.

Invariants:
  * `run` returns exactly one verdict, or is cancelled. What breaks in the environment, the sandbox
    or the serving side is a failure that names it, never a reward of zero and never an exception of
    the run.
  * `on_content` is called at most once, when the content is final and before the verifier starts.
  * The session is released when the content is final, so that a verifier holds no row. The
    environment is closed before `run` returns, whatever happened and also when cancelled.

Who calls it: the coordinator through its attempt port, one asyncio task an attempt; evaluation
likewise.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.envs.base import Attempt, Environment, EnvironmentSuite
from thundersync_jax.rollout.agent import Agent, derive_seed
from thundersync_jax.rollout.phases import AttemptError, contained, run_phase, to_completion
from thundersync_jax.rollout.renderer import Renderer
from thundersync_jax.rollout.scoring import TurnListener, TurnScoring, TurnSink, UnscoredTurns
from thundersync_jax.trajectory import Rollout, Task, TrajectoryKey, Verdict, check_reward
from thundersync_jax.transport.client import PolicyClient, ScoreClient, ServingError

if TYPE_CHECKING:
    from thundersync_jax.envs.base import SandboxPool

_log = logging.getLogger(__name__)


class RolloutRunner:
    """Runs attempts; holds what all attempts of a run share.

    Args:
      limits: budgets, and a deadline for each phase of the environment.
      run_seed: with the key it determines every draw and the environment's seed.
      max_context: the most tokens of prompt and trajectory together.
      clock: seconds on the run's clock.
      scorer: a frozen policy, which scores every turn while its tool runs.
      on_turn: hears of each turn: with a scorer, which is a teacher, once it is scored. A scorer
        without it is the reference: its scores are the trajectory's reference_logprobs.
    """

    def __init__(
        self,
        *,
        client: PolicyClient,
        suite: EnvironmentSuite,
        renderer: Renderer,
        sandboxes: SandboxPool,
        limits: RolloutSection,
        sampling: SamplingSection,
        run_seed: int,
        max_context: int,
        clock: Callable[[], float] = time.monotonic,
        scorer: ScoreClient | None = None,
        on_turn: TurnListener | None = None,
    ) -> None:
        self._client = client
        self._suite = suite
        self._renderer = renderer
        self._sandboxes = sandboxes
        self._limits = limits
        self._sampling = sampling
        self._run_seed = run_seed
        self._max_context = max_context
        self._clock = clock
        self._scorer = scorer
        self._on_turn = on_turn

    async def run(
        self,
        key: TrajectoryKey,
        task: Task,
        prompt_ids: tuple[int, ...],
        on_content: Callable[[Rollout], None],
    ) -> Verdict:
        """Attempts `task` once."""
        attempt = Attempt(
            key=key,
            task=task,
            seed=derive_seed(self._run_seed, key.step, key.group, key.index),
            sandboxes=self._sandboxes,
        )
        try:
            with contained("make", key):
                environment = self._suite.make(attempt)
        except AttemptError as error:
            return Verdict(failure=str(error))
        try:
            await run_phase("reset", key, self._limits.reset_timeout_s, lambda: environment.reset())
            on_content(await self._content(key, task, prompt_ids, environment))
            return Verdict(reward=await self._grade(key, environment))
        except AttemptError as error:
            return Verdict(failure=str(error))
        except ServingError as error:
            return Verdict(failure=f"sampling {key} failed: {error}")
        finally:
            await to_completion(self._free("close", key, lambda: environment.close()))

    async def _content(
        self,
        key: TrajectoryKey,
        task: Task,
        prompt_ids: tuple[int, ...],
        environment: Environment,
    ) -> Rollout:
        with contained("render", key):
            conversation = self._renderer.begin(task)
        async with self._turn_sink(key, prompt_ids) as turn_sink:
            agent = Agent(
                client=self._client,
                environment=environment,
                renderer=self._renderer,
                conversation=conversation,
                key=key,
                task_id=task.task_id,
                prompt_ids=prompt_ids,
                limits=self._limits,
                sampling=self._sampling,
                run_seed=self._run_seed,
                max_context=self._max_context,
                clock=self._clock,
                turn_sink=turn_sink,
            )
            try:
                rollout = await agent.run()
            finally:
                await to_completion(self._free("release", key, lambda: self._client.release(key)))
        return rollout if turn_sink is None else turn_sink.complete(rollout)

    @contextlib.asynccontextmanager
    async def _turn_sink(
        self, key: TrajectoryKey, prompt_ids: tuple[int, ...]
    ) -> AsyncIterator[TurnSink | None]:
        """Who takes the attempt's turns. With a scorer, at its end every turn is scored."""
        if self._scorer is None:
            yield None if self._on_turn is None else UnscoredTurns(key, self._on_turn)
            return
        scoring = TurnScoring(self._scorer, key, prompt_ids, self._on_turn)
        scoring.start()
        try:
            yield scoring
            await scoring.finish()
        finally:
            await to_completion(self._free("end the scoring", key, scoring.close))

    async def _grade(self, key: TrajectoryKey, environment: Environment) -> float:
        async def grade() -> float:
            return check_reward(await environment.grade())

        return await run_phase("grade", key, self._limits.grade_timeout_s, grade)

    async def _free(
        self, phase: str, key: TrajectoryKey, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Gives something back. The verdict stands even if that fails, which is logged."""
        try:
            await run_phase(phase, key, self._limits.reset_timeout_s, work)
        except AttemptError as error:
            _log.error("%s", error)
