"""A chat model that calls a tool: SmolLM2-135M-Instruct looks a number up with a shell and says it.

    bash launch/setup.sh --smollm2
    .venv/bin/python -m thundersync_jax.import_gguf --to=runs/smollm2
    .venv/bin/python -m thundersync_jax.train --config=configs/smollm2_tools.py --workdir=runs/tools

Three updates of LoRA adapters; seven minutes and 2.7 GB on two cores, two and a half of them to
compile. docs/checkpoints.md has what to expect. SmolLM2's template knows no tools: the package
describes them in the system's message, and two examples show how one is called. Copy this file and
change it.
"""

import random
import re

from ml_collections import ConfigDict

from thundersync_jax.config import default_config
from thundersync_jax.envs.base import Action, Attempt, Message, Observation
from thundersync_jax.envs.sandboxed import SandboxedEnvironment
from thundersync_jax.envs.tools import Tool
from thundersync_jax.rollout.tool_calls import TOOL_FORMATS
from thundersync_jax.trajectory import Task, ToolCall

ITEMS = ("apples", "bottles", "candles", "drums", "eggs", "forks", "grapes", "hats")
QUESTION = "How many {} are in stock?"
FORMAT = "hermes"  # how the examples call the tool, and chat.tool_format
# No command ran; one ran, succeeded, printed the count and nothing else; and the answer says it.
REWARDS = (0.0, 0.2, 0.4, 0.7, 1.0)


class CountStock(SandboxedEnvironment):
    """One attempt. A turn with a call runs it in the sandbox; one without is the answer."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.item, self.count = attempt.task.metadata["item"], attempt.task.metadata["count"]
        self.level = 0  # of the best command, in REWARDS
        self.answer = ""

    async def step(self, action: Action) -> Observation:
        if action.error:  # it looks like a call and is none: the policy may read why
            return Observation(text=action.error)
        if action.tool_call is None:
            self.answer = action.text
            return Observation(text="", is_done=True)
        result = await self.sandbox.run(action.tool_call.keywords["command"], timeout_s=5.0)
        output = result.output.strip()
        level = 3 if output == str(self.count) else 2 if result.exit_code == 0 else 1
        self.level = max(self.level, level)
        return Observation(text=output or f"exit code {result.exit_code}")

    async def grade(self) -> float:
        is_right = re.findall(r"\d+", self.answer) == [str(self.count)] and self.item in self.answer
        return REWARDS[4 if self.level == 3 and is_right else self.level]


class CountStockSuite:
    """All tasks: how many of an item are in stock, which a file with the item's name says."""

    vocabulary = ()  # the model brings its own tokenizer
    solved_reward = 1.0
    tools = (
        Tool(
            name="shell",
            description="Runs a command and returns what it prints.",
            parameters={"command": {"type": "string"}},
        ),
    )

    def tasks(self, split: str) -> list[Task]:
        draw = random.Random(split)
        counts = {item: draw.randrange(100, 1000) for item in ITEMS}
        files = {f"{item}.txt": f"{count}\n" for item, count in counts.items()}
        return [
            Task(
                task_id=f"{split}-{item}",
                instruction=QUESTION.format(item),
                files=files,
                metadata={"item": item, "count": count},
            )
            for item, count in counts.items()
        ]

    def messages(self, task: Task) -> list[Message]:
        """Two examples, and then the question."""
        said: list[tuple[str, str]] = []
        for item, count in (("knives", 275), ("lamps", 914)):
            call = ToolCall(name="shell", keywords={"command": f"cat {item}.txt"})
            said += [
                ("user", QUESTION.format(item)),
                ("assistant", TOOL_FORMATS[FORMAT].write(call)),
                ("tool", f"{count}"),
                ("assistant", f"There are {count} {item} in stock."),
            ]
        said.append(("user", task.instruction))
        return [Message(role=role, content=content) for role, content in said]

    def prompt(self, task: Task) -> str:
        return task.instruction

    def make(self, attempt: Attempt) -> CountStock:
        return CountStock(attempt)


def get_config() -> ConfigDict:
    config = default_config()
    config.run.num_steps = 3
    config.run.groups_per_step = 2
    config.run.group_size = 6

    config.model.checkpoint = "runs/smollm2"
    config.model.max_context = 416
    config.model.lora.rank = 8
    config.chat.tool_format = FORMAT
    config.optimizer.learning_rate = 2e-4
    config.learner.prompt_buckets = (288,)  # the tools, both examples and the question
    config.learner.buckets = (128, 416)  # of what follows; the last holds a whole row
    config.learner.tokens_per_step = 416
    config.learner.pool_size = 2
    config.learner.prompt_slots = 2

    config.env.factory = "configs.smollm2_tools:CountStockSuite"
    config.rollout.max_turns = 3
    config.rollout.max_turn_tokens = 40
    config.rollout.max_observation_tokens = 48
    config.sandbox.num_slots = 12

    config.serving.num_slots = 12
    config.serving.extend_rows = 4
    config.serving.extend_buckets = (64, 288)
    config.checkpoint.every_steps = 3
    return config
