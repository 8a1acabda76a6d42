"""`paced_tool`: agents whose turns, lengths and tool waits are chosen, whatever the policy says.

For benchmarks: a policy with random weights makes the same number of turns and tokens in every
trajectory. Every emission is a call of one tool in the attempt's sandbox, with the number of its
first word as the argument. The tool logs the number, sleeps there for a lognormal time and prints
words; they fill the turn up to `turn_tokens` when the emission was shorter. After `num_turns` calls
the attempt is over. So a trajectory has num_turns - 1 turns of exactly `turn_tokens` tokens, and a
last emission.

The waits are drawn from (seed, key, turn) alone: runs of different modes meet the same ones. The
reward is the mean of the logged numbers over `num_words`, read from the sandbox: it differs between
the members of a group, so that every step has a gradient, and teaches nothing of use.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from thundersync_jax.envs.base import Action, Attempt, Environment, Observation
from thundersync_jax.envs.options import Delay, check_least
from thundersync_jax.envs.sandboxed import SandboxedEnvironment
from thundersync_jax.sandbox.base import SandboxError
from thundersync_jax.trajectory import Task, TrajectoryKey

_COMMAND_TIMEOUT_S = 20.0  # beyond the wait
_LOG = "calls"
# One write of the whole answer: a write a word would wake the reader as often.
_TOOL = f"""tool() {{
  echo "$1" >> ~/{_LOG}
  [[ $2 == 0.000000 ]] || sleep "$2"
  local answer='' i
  for (( i = 0; i < $3; i++ )); do answer+="w$(( ($1 + i) % $4 ))"$'\\n'; done
  printf %s "$answer"
}}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacedToolSuite:
    """See `paced_tool`."""

    num_words: int
    prompt_tokens: int
    num_turns: int
    turn_tokens: int
    tool_delay: Delay
    num_tasks: int
    seed: int
    solved_reward: float = 1.0

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return ("<bos>", "<eos>", *(f"w{number}" for number in range(self.num_words)))

    def tasks(self, split: str) -> Sequence[Task]:
        names = (f"{split}-{number}" for number in range(self.num_tasks))
        return [Task(task_id=name, instruction="Say anything.") for name in names]

    def prompt(self, task: Task) -> str:
        draw = random.Random(repr((self.seed, task.task_id)))
        words = (f"w{draw.randrange(self.num_words)}" for _ in range(self.prompt_tokens - 1))
        return "\n".join(("<bos>", *words))

    def make(self, attempt: Attempt) -> Environment:
        return PacedTool(self, attempt)

    def wait_s(self, key: TrajectoryKey, turn: int) -> float:
        """How long the tool sleeps in that turn."""
        return self.tool_delay.seconds(self.seed, key.step, key.group, key.index, turn)

    def tool_path_s(self, key: TrajectoryKey) -> float:
        """All waits of a trajectory, one after the other: no rollout of it is shorter."""
        return sum(self.wait_s(key, turn) for turn in range(self.num_turns))


def paced_tool(
    num_words: int = 510,
    prompt_tokens: int = 16,
    num_turns: int = 6,
    turn_tokens: int = 48,
    tool_delay_s: float = 0.5,
    tool_delay_sigma: float = 1.0,
    num_tasks: int = 4,
    seed: int = 0,
) -> PacedToolSuite:
    """The suite factory, for `env.factory`.

    Args:
      num_words: of the vocabulary, beside "<bos>" and "<eos>".
      turn_tokens: of an emission and its observation together; at least `rollout.max_turn_tokens`.
      tool_delay_s: mean seconds of a tool call; 0 for none. tool_delay_sigma: of the logarithm.
    """
    check_least(
        "paced_tool",
        num_words=(num_words, 2),
        prompt_tokens=(prompt_tokens, 1),
        num_turns=(num_turns, 1),
        turn_tokens=(turn_tokens, 1),
        tool_delay_s=(tool_delay_s, 0),
        tool_delay_sigma=(tool_delay_sigma, 0),
        num_tasks=(num_tasks, 1),
    )
    return PacedToolSuite(
        num_words=num_words,
        prompt_tokens=prompt_tokens,
        num_turns=num_turns,
        turn_tokens=turn_tokens,
        tool_delay=Delay(mean_s=tool_delay_s, sigma=tool_delay_sigma),
        num_tasks=num_tasks,
        seed=seed,
    )


class PacedTool(SandboxedEnvironment):
    """One attempt."""

    def __init__(self, suite: PacedToolSuite, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._suite = suite
        self._turn = 0

    async def reset(self) -> None:
        await super().reset()
        await self.sandbox.run(_TOOL, _COMMAND_TIMEOUT_S)

    async def step(self, action: Action) -> Observation:
        suite, turn = self._suite, self._turn
        self._turn += 1
        words = action.text.split("\n")
        number = int(words[0][1:]) if words[0].startswith("w") else 0
        num_answer = max(0, suite.turn_tokens - len(words))
        wait_s = suite.wait_s(self.attempt.key, turn)
        call = f"tool {number} {wait_s:.6f} {num_answer} {suite.num_words}"
        result = await self.sandbox.run(call, wait_s + _COMMAND_TIMEOUT_S)
        answer = result.output.strip()
        if result.exit_code != 0 or len(answer.split()) != num_answer:
            raise SandboxError(f"{self.attempt.key}: the tool answered {result!r}")
        return Observation(text=answer, is_done=self._turn == suite.num_turns)

    async def grade(self) -> float:
        numbers = [int(line) for line in (await self.sandbox.read_file(_LOG)).split()]
        if len(numbers) != self._turn:
            raise SandboxError(
                f"{self.attempt.key}: the log holds {len(numbers)} calls, expected {self._turn}"
            )
        return sum(numbers) / len(numbers) / self._suite.num_words
