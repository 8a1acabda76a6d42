"""The turn loop: token in, token out.

Invariants:
  * Sampled ids are stored as they came, together with their log-probabilities and versions; text is
    decoded from them for parsers and never encoded again.
  * The context of every request is the prompt and then exactly the ids of the trajectory, or of its
    last segment: where a chat template rewrites history, the trajectory goes on in a new one.
  * Every trajectory ends in an action token: an observation is appended with the turn that read it,
    because nothing after the last action token has a gradient.
  * A stop id ends a turn, and nothing else: every turn goes to the environment, which alone decides
    when the attempt is over, within the budgets.
  * Draws depend on (run seed, step, group, index, turn) and not on scheduling.

Who calls it: `rollout.RolloutRunner`, once an attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import RolloutSection
from thundersync_jax.envs.base import Action, Environment, Observation
from thundersync_jax.rollout.phases import AttemptError, contained, run_phase
from thundersync_jax.rollout.renderer import Conversation, Renderer
from thundersync_jax.rollout.scoring import TurnSink
from thundersync_jax.trajectory import Rollout, TrajectoryBuilder, TrajectoryKey, Turn
from thundersync_jax.transport.client import PolicyClient
from thundersync_jax.transport.messages import (
    FinishReason,
    SampleRequest,
    SampleResult,
    SamplingParams,
)


def derive_seed(run_seed: int, *path: int) -> int:
    """A seed in [0, 2**31) that differs between paths such as (step, group, index, turn)."""
    name = " ".join(f"{part:d}" for part in (run_seed, *path))
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


class Agent:
    """One trajectory while it grows.

    Args:
      renderer, conversation: what ids mean, and this attempt's words so far.
      key, task_id, prompt_ids: which trajectory, and the ids it starts from.
      max_context: the most tokens of prompt and trajectory together; every segment counts the
        prompt again, as the learner's row may.
      clock: seconds since the run's clock began, for the turns' time stamps.
      turn_sink: hears every turn as soon as it is sampled.
    """

    def __init__(
        self,
        *,
        client: PolicyClient,
        environment: Environment,
        renderer: Renderer,
        conversation: Conversation,
        key: TrajectoryKey,
        task_id: str,
        prompt_ids: tuple[int, ...],
        limits: RolloutSection,
        sampling: SamplingSection,
        run_seed: int,
        max_context: int,
        clock: Callable[[], float],
        turn_sink: TurnSink | None = None,
    ) -> None:
        self._client = client
        self._environment = environment
        self._renderer = renderer
        self._conversation = conversation
        self._key = key
        self._task_id = task_id
        self._prompt_ids = prompt_ids
        self._limits = limits
        self._sampling = sampling
        self._run_seed = run_seed
        self._max_context = max_context
        self._clock = clock
        self._turn_sink = turn_sink
        self._builder = TrajectoryBuilder()
        self._pending = conversation.opening_ids
        self._is_rewritten = False  # what is pending begins a segment
        self._turns: list[Turn] = []

    async def run(self) -> Rollout:
        """Runs turns until there is a reason to stop; raises AttemptError or ServingError."""
        stop_reason: str | None = None
        while stop_reason is None:
            stop_reason = self._exhausted_budget() or await self._run_turn()
        if not self._turns:
            raise AttemptError(
                f"no token could be sampled for {self._key}: its prompt has "
                f"{len(self._prompt_ids)} tokens and model.max_context is {self._max_context}; "
                "shorten the prompt or raise the limit"
            )
        with contained("build", self._key):
            tokens = self._builder.build()
        return Rollout(
            key=self._key,
            task_id=self._task_id,
            prompt_ids=self._prompt_ids,
            tokens=tokens,
            turns=tuple(self._turns),
            stop_reason=stop_reason,
        )

    async def _run_turn(self) -> str | None:
        """One emission and its observation. Returns why the agent stops, or None to go on."""
        started_s = self._clock()
        if self._is_rewritten:
            await self._client.release(self._key)  # a session's context only grows
        result = await self._client.sample(self._request())
        sampled_s = self._clock()
        if not result.token_ids:
            return "context"
        self._append(result)
        with contained("decode", self._key):
            text = self._renderer.tokenizer.decode(result.token_ids)
            action = self._conversation.hear(result.token_ids)
        observation = await self._step(action)
        self._turns.append(
            Turn(
                num_action_tokens=len(result.token_ids),
                action_text=text,
                observation_text=observation.text,
                started_s=started_s,
                sampled_s=sampled_s,
                ended_s=self._clock(),
                slot=result.slot,
                error=action.error,
            )
        )
        if observation.is_done:
            return "done"
        return "context" if result.finish_reason is FinishReason.CONTEXT else None

    def _append(self, result: SampleResult) -> None:
        """What this turn read, and what it sampled; the sink hears of it."""
        if self._is_rewritten:
            self._builder.begin_segment()
        turn = TrajectoryBuilder()
        for builder in (self._builder, turn):
            builder.append_observation(self._pending)
            builder.append_action(result.token_ids, result.logprobs, result.policy_versions)
        if self._turn_sink is not None:
            with contained("build", self._key):
                tokens = turn.build()
            self._turn_sink.submit(tokens, begins_segment=self._is_rewritten)
        self._pending, self._is_rewritten = (), False

    def _request(self) -> SampleRequest:
        key, past = self._key, self._builder
        return SampleRequest(
            session=key,
            context_ids=self._prompt_ids
            + (() if self._is_rewritten else past.segment_ids)
            + self._pending,
            sampling=SamplingParams(
                temperature=self._sampling.temperature,
                top_k=self._sampling.top_k,
                top_p=self._sampling.top_p,
                stop_ids=self._renderer.stop_ids,
                max_tokens=min(
                    self._limits.max_turn_tokens, self._room_in_total(), self._room_in_context()
                ),
                seed=derive_seed(self._run_seed, key.step, key.group, key.index, len(self._turns)),
            ),
            policy_version=past.policy_version if self._is_rewritten else None,
        )

    async def _step(self, action: Action) -> Observation:
        """The environment's answer; its ids wait in `_pending` for the turn that reads them."""

        async def step() -> Observation:
            observation = await self._environment.step(action)
            if not isinstance(observation, Observation):
                raise TypeError(f"step must return an Observation, got {observation!r}")
            if not observation.is_done:
                most = self._limits.max_observation_tokens
                reply = self._conversation.answer(observation, most)
                self._pending, self._is_rewritten = reply.token_ids, reply.is_rewritten
            return observation

        phase = f"step {len(self._turns)}"
        return await run_phase(phase, self._key, self._limits.tool_timeout_s, step)

    def _exhausted_budget(self) -> str | None:
        """Which limit leaves the next turn no token, or None."""
        if len(self._turns) >= self._limits.max_turns:
            return "max_turns"
        if self._room_in_total() <= 0:
            return "max_tokens"
        return "context" if self._room_in_context() <= 0 else None

    def _room_in_total(self) -> int:
        return self._limits.max_tokens - len(self._builder) - len(self._pending)

    def _room_in_context(self) -> int:
        num_prompts = self._builder.num_segments + self._is_rewritten
        used = num_prompts * len(self._prompt_ids) + len(self._builder) + len(self._pending)
        return self._max_context - used
