"""An environment for a chat model that cannot speak yet: whatever it says, its rewards differ."""

from __future__ import annotations

from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.trajectory import Task


class Letters:
    """One attempt; the reward is a number made of all that was said."""

    def __init__(self) -> None:
        self.said = ""

    async def reset(self) -> None: ...

    async def step(self, action: Action) -> Observation:
        self.said += action.text
        return Observation(text="go on")

    async def grade(self) -> float:
        return sum(map(ord, self.said)) % 17 / 17

    async def close(self) -> None: ...


class LettersSuite:
    vocabulary = ()
    solved_reward = 0.5

    def tasks(self, split: str) -> list[Task]:
        return [Task(task_id=f"{split} {n}", instruction=f"say {n}") for n in range(3)]

    def prompt(self, task: Task) -> str:
        raise AssertionError("only policies with the vocabulary ask for it")

    def make(self, attempt: Attempt) -> Letters:
        return Letters()
