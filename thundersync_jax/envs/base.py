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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """What the policy said in one turn: its stripped text, and the tool call in it if it parsed."""

    text: str
    tool_call: ToolCall | None


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
        exception.

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
        """The text that every attempt at `task` starts from."""
        ...

    def make(self, attempt: Attempt) -> Environment:
        """One environment for one attempt. Cheap: the work belongs in `reset`."""
        ...
