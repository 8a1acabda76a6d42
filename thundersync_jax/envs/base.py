"""The environment protocol: what a task is to an agent.

A suite is made once a run by `env.factory = "package.module:function"`, with `env.options` as
keyword arguments; no registry. It makes one `Environment` per attempt. Each of reset, step and
grade has its own deadline (`rollout.*_timeout_s`), kept by the caller; an exception or a deadline
there makes the attempt a failure by name, never a zero. `close` is always called, once, and must
leave nothing alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from thundersync_jax.trajectory import Task, ToolCall, TrajectoryKey

if TYPE_CHECKING:
    from thundersync_jax.sandbox.base import SandboxPool


ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One entry of a conversation with a model that has a chat template."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES or not isinstance(self.content, str):
            raise ValueError(
                f"a message of role {self.role!r} with the content {self.content!r}: expected one "
                f"of {ROLES} and a str"
            )
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a message of role {self.role!r} with the content {self.content!r:.200}: half a "
                "surrogate pair is no text. Decode what it comes from with errors='replace'"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """What the policy said in one turn.

    Attributes:
      text: without surrounding whitespace; of a chat model also without its reasoning, its tool
        calls and control tokens.
      tool_calls: in order, those that parsed; of a chat model they fit the schemas of its tools.
      reasoning: what a chat model thought aloud before its text.
      error: why what looks like a tool call is none, for the policy to read; "" otherwise.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    error: str = ""

    @property
    def tool_call(self) -> ToolCall | None:
        """The first, for environments that answer one a turn."""
        return self.tool_calls[0] if self.tool_calls else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What the environment answers. When `is_done`, the agent stops and the text is not shown to
    the policy.
    """

    text: str
    is_done: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of an Observation must be a str, got {self.text!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstratedTurn:
    """One turn of a scripted attempt, for training by imitation. A suite that has a script offers
    `demonstration(task, seed) -> Sequence[DemonstratedTurn]`; it needs no sandbox.

    Attributes:
      observation: what was read before it; "" in the first turn.
      action: the text of it.
      is_taught: False for a mistake, which is only there to be mended by later turns.
    """

    observation: str
    action: str
    is_taught: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """What an environment may use for one attempt.

    Attributes:
      seed: derived from (run seed, step, group, index): the only source of randomness an
        environment needs.
      sandboxes: where tools run.
    """

    key: TrajectoryKey
    task: Task
    seed: int
    sandboxes: SandboxPool


class Environment(Protocol):
    """One attempt at one task."""

    async def reset(self) -> None:
        """Prepares the attempt, for instance by starting a sandbox with the task's files."""
        ...

    async def step(self, action: Action) -> Observation:
        """Runs one turn's action. A malformed action is an observation that says so, not an
        exception: `action.error` says why where it looked like a tool call.

        Every turn comes here, also one of nothing but the end-of-sequence token.
        """
        ...

    async def grade(self) -> float:
        """The reward, a finite number. The grader's files enter the sandbox here, not before."""
        ...

    async def close(self) -> None:
        """Frees everything; called once, also after a failed reset."""
        ...


class EnvironmentSuite(Protocol):
    """All tasks of one kind.

    A suite for chat models may have two more parts: `tools`, a sequence of `envs.tools.Tool`, and a
    method `messages(task)` that returns the `Message`s every attempt starts from. Without them
    there are no tools, and one message of the user: the task's instruction. Control tokens that
    either spells are letters for the policy, but for the tags of reasoning and calls.

    Attributes:
      vocabulary: the words of a policy trained from scratch, one token each, separated by newlines
        in text; empty when the model brings its own tokenizer. Its first two entries are "<bos>"
        and "<eos>".
      solved_reward: a reward of at least this counts as solved in the metrics.
    """

    @property
    def vocabulary(self) -> tuple[str, ...]: ...

    @property
    def solved_reward(self) -> float: ...

    def tasks(self, split: str) -> Sequence[Task]:
        """The suite's own tasks of "train" or "test"; used when `data.builder` is ""."""
        ...

    def prompt(self, task: Task) -> str:
        """The text that every attempt of a policy with this vocabulary starts from."""
        ...

    def make(self, attempt: Attempt) -> Environment:
        """One environment for one attempt. Cheap: the work belongs in `reset`."""
        ...
