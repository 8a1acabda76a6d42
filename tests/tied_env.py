"""An environment whose graders see no difference: every reward is 1."""

from __future__ import annotations

from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.trajectory import Task


class Indifferent:
    """One attempt of one turn."""

    async def reset(self) -> None:
        pass

    async def step(self, action: Action) -> Observation:
        return Observation(text="", is_done=True)

    async def grade(self) -> float:
        return 1.0

    async def close(self) -> None:
        pass


class IndifferentSuite:
    vocabulary = ("<bos>", "<eos>", "yes", "no")
    solved_reward = 1.0

    def tasks(self, split: str) -> list[Task]:
        return [Task(task_id=f"{split} {number}", instruction="") for number in range(3)]

    def prompt(self, task: Task) -> str:
        return "<bos>"

    def make(self, attempt: Attempt) -> Indifferent:
        return Indifferent()
