"""A user's own environment and its experiment, in one file: guess the word that a file hides.

    python -m thundersync_jax.train --config=configs/custom_env.py --workdir=runs/guess_word

Copy this file and change it. `env.factory` is imported by its name, from the directory in which the
command is started or from PYTHONPATH.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config
from thundersync_jax.envs.base import Action, Attempt, Observation
from thundersync_jax.envs.sandboxed import SandboxedEnvironment
from thundersync_jax.trajectory import Task

WORDS = ("apple", "bread", "cheese", "dates")


class GuessWord(SandboxedEnvironment):
    """One attempt, in a sandbox with the task's files: every turn looks for one word in one; each
    wrong guess costs reward.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.guesses: list[str] = []

    async def step(self, action: Action) -> Observation:
        self.guesses.append(action.text)
        if action.text not in WORDS:  # what the policy says must never reach a shell unchecked
            return Observation(text="what?")
        result = await self.sandbox.run(f"grep -qx {action.text} hidden", timeout_s=10.0)
        return Observation(text="no", is_done=result.exit_code == 0)

    async def grade(self) -> float:
        hidden = (await self.sandbox.read_file("hidden")).decode().strip()
        return 1.0 / (1 + self.guesses.index(hidden)) if hidden in self.guesses else 0.0


class GuessWordSuite:
    """All tasks; `env.factory` names it, and `env.options` would be its arguments."""

    vocabulary = ("<bos>", "<eos>", *WORDS, "no", "what?")
    solved_reward = 0.5

    def tasks(self, split: str) -> list[Task]:
        return [Task(task_id=f"{split}-{w}", instruction="", files={"hidden": w}) for w in WORDS]

    def prompt(self, task: Task) -> str:
        return "<bos>"

    def make(self, attempt: Attempt) -> GuessWord:
        return GuessWord(attempt)


def get_config() -> ConfigDict:
    config = default_config()
    config.env.factory = "configs.custom_env:GuessWordSuite"
    config.rollout.max_turns = 4
    config.rollout.max_turn_tokens = 1
    config.model.max_context = 16
    config.optimizer.learning_rate = 1e-3
    config.learner.buckets = (16,)
    return config
