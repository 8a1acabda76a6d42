"""`file_probe`: find the secret number in a file with a real tool.

Every attempt gets a sandbox with the secret in a file and a shell function `probe N`, which reads
that file, logs the guess and prints "higher", "lower" or "found". A policy trained from scratch
speaks whole words ("probe 3"), so that it learns within minutes; a chat model calls the tool
`probe` through its own template. Either way every turn is a real command in a real sandbox.

The reward is recomputed from the tool's log and the task, after the agent has stopped: 1 - 0.5 k /
max_turns for a secret found at turn k (from 0), else 0. Lognormal delays emulate slow tools and
graders; their draws depend on the attempt's seed and the turn only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence

from thundersync_jax.envs.base import (
    Action,
    Attempt,
    DemonstratedTurn,
    Environment,
    Message,
    Observation,
)
from thundersync_jax.envs.options import Delay, check_least
from thundersync_jax.envs.sandboxed import SandboxedEnvironment
from thundersync_jax.envs.tools import Tool
from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.trajectory import Task

MISTAKE_RATE = 0.35  # of demonstrated turns

_COMMAND_TIMEOUT_S = 20.0
_SECRET, _LOG = "secret", "probes"
_TOOL = f"""probe() {{
  local secret; read -r secret < ~/{_SECRET}; echo "$1" >> ~/{_LOG}
  if (( $1 < secret )); then echo higher
  elif (( $1 > secret )); then echo lower
  else echo found; fi
}}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileProbeSuite:
    """See `file_probe`."""

    num_values: int
    max_turns: int
    tool_delay: Delay
    grade_delay: Delay
    num_train_tasks: int
    num_test_tasks: int
    solved_reward: float = 0.5

    @property
    def vocabulary(self) -> tuple[str, ...]:
        probes = (f"probe {value}" for value in range(self.num_values))
        return ("<bos>", "<eos>", *probes, "higher", "lower", "error")

    def tasks(self, split: str) -> Sequence[Task]:
        counts = {"train": self.num_train_tasks, "test": self.num_test_tasks}
        if split not in counts:
            raise ValueError(f"file_probe has no split {split!r}: expected one of {tuple(counts)}")
        return [
            probe_task(f"{split}-{i}", i % self.num_values, self.num_values)
            for i in range(counts[split])
        ]

    def prompt(self, task: Task) -> str:
        return "<bos>"

    @property
    def tools(self) -> Sequence[Tool]:
        return (
            Tool(
                name="probe",
                description="Says whether the secret number is higher or lower, or found.",
                parameters={"value": {"type": "integer", "description": "The number to try."}},
            ),
        )

    def messages(self, task: Task) -> Sequence[Message]:
        asked = f"A file holds a secret number from 0 to {self.num_values - 1}."
        return (Message(role="user", content=f"{asked} Find it with the tool probe."),)

    def make(self, attempt: Attempt) -> Environment:
        return FileProbe(self, attempt)

    def demonstration(self, task: Task, seed: int) -> Sequence[DemonstratedTurn]:
        """Binary search, where every third turn or so is any word of the vocabulary instead."""
        draw, secret = random.Random(seed), int(task.metadata["secret"])
        low, high, observation = 0, self.num_values - 1, ""
        turns = []
        for _ in range(self.max_turns):
            is_taught = draw.random() >= MISTAKE_RATE
            guess = (low + high) // 2
            action = f"probe {guess}" if is_taught else draw.choice(self.vocabulary)
            turn = DemonstratedTurn(observation=observation, action=action, is_taught=is_taught)
            turns.append(turn)
            if action == f"probe {secret}":
                break
            observation = "error"
            if action.startswith("probe "):
                guess = int(action.removeprefix("probe "))
                observation = "higher" if guess < secret else "lower"
                low = max(low, guess + 1) if guess < secret else low
                high = min(high, guess - 1) if guess > secret else high
        return turns


def file_probe(
    num_values: int = 8,
    max_turns: int = 10,
    tool_delay_s: float = 0.0,
    tool_delay_sigma: float = 1.0,
    grade_delay_s: float = 0.0,
    grade_delay_sigma: float = 1.0,
    num_train_tasks: int = 128,
    num_test_tasks: int = 64,
) -> FileProbeSuite:
    """The suite factory, for `env.factory`.

    Args:
      num_values: secrets are 0 .. num_values - 1, equally often.
      max_turns: scales the reward; the agent's `rollout.max_turns` ends the attempt.
      tool_delay_s, grade_delay_s: mean extra seconds of a tool call and of the grader; 0 for none.
      tool_delay_sigma, grade_delay_sigma: of the logarithm: at 1, one call in a hundred takes six
        times the mean.
    """
    check_least(
        "file_probe",
        num_values=(num_values, 2),
        max_turns=(max_turns, 1),
        tool_delay_s=(tool_delay_s, 0),
        tool_delay_sigma=(tool_delay_sigma, 0),
        grade_delay_s=(grade_delay_s, 0),
        grade_delay_sigma=(grade_delay_sigma, 0),
        num_train_tasks=(num_train_tasks, 1),
        num_test_tasks=(num_test_tasks, 1),
    )
    return FileProbeSuite(
        num_values=num_values,
        max_turns=max_turns,
        tool_delay=Delay(mean_s=tool_delay_s, sigma=tool_delay_sigma),
        grade_delay=Delay(mean_s=grade_delay_s, sigma=grade_delay_sigma),
        num_train_tasks=num_train_tasks,
        num_test_tasks=num_test_tasks,
    )


def probe_task(task_id: str, secret: int, num_values: int) -> Task:
    """One task: the sandbox starts with the secret's file, and the grader knows the secret from the
    metadata.
    """
    return Task(
        task_id=task_id,
        instruction=f"Find the number from 0 to {num_values - 1}: say 'probe N'.",
        files={_SECRET: f"{secret}\n"},
        metadata={"secret": secret},
    )


class FileProbe(SandboxedEnvironment):
    """One attempt."""

    def __init__(self, suite: FileProbeSuite, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._suite = suite
        self._turn = 0
        self._probe_turns: list[int] = []  # the turn of each line of the tool's log

    async def reset(self) -> None:
        await super().reset()
        await self.sandbox.run(_TOOL, _COMMAND_TIMEOUT_S)

    async def step(self, action: Action) -> Observation:
        turn = self._turn
        self._turn += 1
        guess = self._guess(action)
        if guess is None:
            return Observation(text=action.error or "error")
        self._probe_turns.append(turn)
        result = await self.sandbox.run(f"probe {guess}", _COMMAND_TIMEOUT_S)
        await _wait(self._suite.tool_delay.seconds(self.attempt.seed, turn))
        answer = result.output.strip()
        if answer not in ("higher", "lower", "found"):
            raise SandboxError(f"{self.attempt.key}: probe {guess} answered {result!r}")
        return Observation(text=answer, is_done=answer == "found")

    async def grade(self) -> float:
        await _wait(self._suite.grade_delay.seconds(self.attempt.seed, -1))
        if not self._probe_turns:
            return 0.0
        guesses = (await self.sandbox.read_file(_LOG)).decode().split()
        if len(guesses) != len(self._probe_turns):
            raise SandboxError(
                f"{self.attempt.key}: the log holds {len(guesses)} probes, "
                f"expected {len(self._probe_turns)}"
            )
        secret = str(self.attempt.task.metadata["secret"])
        if secret not in guesses:
            return 0.0
        return 1.0 - 0.5 * self._probe_turns[guesses.index(secret)] / self._suite.max_turns

    def _guess(self, action: Action) -> int | None:
        """The value of a valid call, else None."""
        call = action.tool_call
        words = () if call is None else (*call.arguments, *map(str, call.keywords.values()))
        if call is None or call.name != "probe" or len(words) != 1:
            return None
        word = words[0]
        is_value = word.isascii() and word.isdigit() and int(word) < self._suite.num_values
        return int(word) if is_value else None


async def _wait(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)
