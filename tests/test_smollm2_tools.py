"""The example of a chat model that calls a tool: its environment, and three updates of SmolLM2."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chat_models import write_tokenizer
from sandbox_cases import pool

from thundersync_jax.config import resolve
from thundersync_jax.config_chat import ChatSection
from thundersync_jax.envs.base import Attempt, Observation
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import read_jsonl
from thundersync_jax.model.smollm2 import packaged_file
from thundersync_jax.rollout.chat_renderer import ChatRenderer
from thundersync_jax.rollout.renderer import Conversation
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files
from thundersync_jax.rollout.tool_calls import TOOL_FORMATS
from thundersync_jax.sandbox.base import SandboxPool
from thundersync_jax.trajectory import Task, TrajectoryKey

ROOT = Path(__file__).parents[1]
ASK = "<|im_start|>assistant\n"
END = "<|im_end|>\n"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("configs.smollm2_tools")


@pytest.fixture
def renderer(example: ModuleType, tmp_path: Path) -> ChatRenderer:
    """With a template as SmolLM2's, which knows no tools."""
    files = read_tokenizer_files(write_tokenizer(tmp_path, "smollm2"))
    return ChatRenderer(files, example.CountStockSuite(), ChatSection(tool_format=example.FORMAT))


def call(command: str) -> str:
    return (
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
    )


def test_the_template_shows_tools_examples_and_the_question(
    example: ModuleType, renderer: ChatRenderer
):
    task = example.CountStockSuite().tasks("train")[0]
    shown = renderer.tokenizer.decode(renderer.prompt_ids(task))
    system, _, rest = shown.partition(END)
    assert system.startswith("<|im_start|>system\nYou may call these functions:\n")
    assert '"name": "shell"' in system and "<tool_call>" in system
    examples = "".join(
        f"<|im_start|>user\nHow many {item} are in stock?{END}"
        f"{ASK}{call(f'cat {item}.txt')}{END}"
        f"<|im_start|>tool\n{count}{END}"
        f"{ASK}There are {count} {item} in stock.{END}"
        for item, count in (("knives", 275), ("lamps", 914))
    )
    assert rest == f"{examples}<|im_start|>user\nHow many apples are in stock?{END}"
    assert resolve(example.get_config()).env.factory == "configs.smollm2_tools:CountStockSuite"


async def play(
    renderer: ChatRenderer, suite: Any, sandboxes: SandboxPool, task: Task, texts: Sequence[str]
) -> tuple[str, list[Observation], float]:
    """What the policy read after its first turn, what was observed, and the reward."""
    key = TrajectoryKey(step=0, group=0, index=0)
    environment = suite.make(Attempt(key=key, task=task, seed=0, sandboxes=sandboxes))
    conversation: Conversation = renderer.begin(task)
    (end,) = renderer.stop_ids
    read, observations = "", []
    await environment.reset()
    for text in texts:
        action = conversation.hear((*renderer.tokenizer.encode(text), end))
        observations.append(await environment.step(action))
        reply = conversation.answer(observations[-1], max_tokens=48)
        assert not reply.is_rewritten
        read += renderer.tokenizer.decode(reply.token_ids)
    reward = await environment.grade()
    await environment.close()
    return read, observations, reward


def test_every_reward_is_that_of_the_best_command_and_the_answer(
    example: ModuleType, renderer: ChatRenderer
):
    suite = example.CountStockSuite()
    task, other = suite.tasks("train")[:2]
    count, others = task.metadata["count"], other.metadata["count"]
    look, answer = call("cat apples.txt"), f"There are {count} apples."
    cases = [
        (0.0, answer),  # a guess
        (0.0, call("cat apples.txt").replace("shell", "bash"), answer),
        (0.2, call("cat pears.txt"), answer),
        (0.2, call("exit 3"), answer),
        (0.2, call(r"echo \u0000"), answer),
        (0.4, call("cat bottles.txt"), f"There are {others} apples."),
        (0.4, call("cat *"), answer),
        (0.7, look, "There are 7 apples."),
        (0.7, look, f"There are {count} lamps."),
        (0.7, look, f"There are {count} or {others} apples."),
        (1.0, look, answer),
        (1.0, call("cat pears.txt"), look, answer),
    ]

    async def body():
        async with pool("restricted", num_slots=1) as sandboxes:
            for want, *texts in cases:
                read, observations, reward = await play(renderer, suite, sandboxes, task, texts)
                assert reward == want, texts
                assert [seen.is_done for seen in observations] == [False] * len(texts[1:]) + [True]
            assert read.startswith(
                f"\n<|im_start|>tool\ncat: pears.txt: No such file or directory{END}{ASK}\n"
                f"<|im_start|>tool\n{count}{END}{ASK}\n"
            )

    asyncio.run(body())


# -- SmolLM2 itself ------------------------------------------------------------------------------


def run(main: str, *arguments: str, timeout_s: float) -> None:
    command = [sys.executable, "-m", f"thundersync_jax.{main}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_smollm2_is_updated_three_times_by_its_tool_calls_within_15_minutes(
    example: ModuleType, tmp_path: Path
):
    """Every step calls the tool and has a gradient; sampler and learner agree to rounding."""
    try:
        packaged_file()
    except ConfigError as error:
        pytest.skip(str(error))
    model, workdir = tmp_path / "model", tmp_path / "run"
    run("import_gguf", f"--to={model}", timeout_s=100)
    config = ("--config=configs/smollm2_tools.py", f"--config.model.checkpoint={model}")
    run("train", *config, f"--workdir={workdir}", timeout_s=900)

    lines = read_jsonl(workdir / "metrics.jsonl")
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    tokenizer = read_tokenizer_files(model).tokenizer
    for line in lines:
        assert line["num_failed"] == line["num_rewrites"] == line["compiles"] == 0
        assert line["grad_norm"] > 0 and line["learning_rate"] > 0
        assert line["logprob_gap_max"] <= 1e-4 and line["logprob_gap_mean"] <= 1e-5
        trajectories = read_jsonl(workdir / "trajectories" / f"step_{line['step']:06d}.jsonl")
        assert {trajectory["reward"] for trajectory in trajectories} <= set(example.REWARDS)
        num_called = 0
        for trajectory in trajectories:
            said = tokenizer.decode(tuple(trajectory["token_ids"]))
            assert said.startswith(ASK)
            for turn in trajectory["turns"]:
                is_call = bool(TOOL_FORMATS[example.FORMAT].parse(turn["action_text"]).calls)
                if is_call and not turn["error"]:
                    num_called += 1
                    assert turn["observation_text"]
            if trajectory["reward"] == 1.0:
                first, *_, last = trajectory["turns"]
                assert f"{first['action_text']}\n<|im_start|>tool\n" in said
                assert said.endswith(f"{END}{ASK}{last['action_text']}")
        assert num_called > 0
