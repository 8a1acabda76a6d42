"""What a run refuses, before it starts, of a chat template and of a suite that speaks by one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATES, write_tokenizer
from test_chat import PROBE, TASK, GuessSuite, renderer_of
from tokenizers import normalizers

from thundersync_jax.config import RunConfig, default_config, resolve
from thundersync_jax.config_chat import ChatSection
from thundersync_jax.envs.base import Message
from thundersync_jax.envs.tools import Tool
from thundersync_jax.errors import ConfigError
from thundersync_jax.model.presets import preset
from thundersync_jax.rollout.chat import TokenizerError
from thundersync_jax.rollout.chat_renderer import ChatRenderer, make_renderer
from thundersync_jax.rollout.chat_template import ChatTemplateError
from thundersync_jax.rollout.control_tokens import ControlTokens
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files
from thundersync_jax.runtime import check_history, check_learning, check_prompt
from thundersync_jax.workdir import WorkDirectory


def streaming(**sections: Any) -> RunConfig:
    config = default_config()
    config.chat.tokenizer = "DIR"
    for name, value in sections.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return resolve(config)


BY_TURNS = [{"learner__stream_turns": "idle"}, {"opd__teacher": "runs/teacher"}]


@pytest.mark.parametrize("section", BY_TURNS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_that_rewrites_is_refused_where_turns_are_learned_as_they_come(
    family: str, section: dict[str, Any], tmp_path: Path
):
    rewrites = family in ("qwen3", "reasoner")
    kept = renderer_of(tmp_path, family, history="append")
    check_history(streaming(chat__history="append", **section), kept)
    renderer = renderer_of(tmp_path, family)
    check_history(streaming(), renderer)
    check_history(streaming(rollout__max_turns=1, **section), renderer)
    config = streaming(**section)
    if not rewrites:
        return check_history(config, renderer)
    (name,) = section
    message = (
        rf"chat.history = 'template': expected 'append' with {name.replace('__', '.')} = .*DIR"
    )
    remedy = " rewrites .*" + (
        "" if config.opd.teacher else "Or set learner.stream_turns = 'never'"
    )
    with pytest.raises(ConfigError, match=message + remedy):
        check_history(config, renderer)


def test_a_run_is_not_resumed_with_another_template(tmp_path: Path):
    config, model = streaming(), preset("micro", vocab_size=500)
    workdir = WorkDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    before, after = (renderer_of(tmp_path, family) for family in ("qwen2.5", "qwen3"))
    fingerprint = after.tokenizer.fingerprint
    before_it = before.template_fingerprint
    workdir.claim(config, model=model, tokenizer=fingerprint, template=before_it)
    with pytest.raises(ConfigError, match=r"holds a run with a chat template of fingerprint"):
        check_learning(config, model, after, workdir)
    template = after.template_fingerprint
    workdir.claim(config, model=model, tokenizer=fingerprint, template=template)
    assert check_learning(config, model, after, workdir) is None


def test_a_template_without_thinking_rewrites_what_it_opened_itself(tmp_path: Path):
    thinks = renderer_of(tmp_path, "qwen3", template_options={"enable_thinking": False})
    assert thinks.rewrites_history


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (None, r"are None: expected a sequence of .*Tool, \(\) for none"),
        (PROBE, r"are Tool\(name='probe'.*: expected a sequence"),
        ([PROBE.schema], r"are \[{'type': 'function'.*: expected a sequence"),
        ([PROBE, PROBE], r"several tools named \['probe'\]: expected one of each name"),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, message: str, tmp_path: Path):
    suite = GuessSuite()
    suite.tools = tools
    with pytest.raises(ConfigError, match=message):
        renderer_of(tmp_path, "qwen3", suite)


@pytest.mark.parametrize("given", [None, [], "hello", [{"role": "user", "content": "hello"}]])
def test_messages_that_are_none_are_refused(given: Any, tmp_path: Path):
    suite = GuessSuite()
    suite.messages = lambda task: given
    renderer = renderer_of(tmp_path, "qwen3", suite)
    with pytest.raises(
        ConfigError, match=r"task 'secret': messages.* gave .*expected a sequence of"
    ):
        check_prompt(TASK, renderer, 1000)


def test_blocks_of_bash_need_the_tool_that_they_call(tmp_path: Path):
    suite, command = GuessSuite(), {"command": {"type": "string"}}
    bash = Tool(name="bash", description="Runs a command.", parameters=command)
    suite.tools = (PROBE, bash)
    renderer_of(tmp_path, "qwen2.5", suite, tool_format="bash")
    for tools, names in (
        ((PROBE,), r"\['probe'\]"),
        ((dataclasses.replace(bash, name="shell"),), r"\['shell'\]"),
        ((dataclasses.replace(bash, parameters={"line": {}}),), r"\['bash'\]"),
    ):
        suite.tools = tools
        with pytest.raises(ConfigError, match=f"'bash': a block .* tools are {names}. Give it"):
            renderer_of(tmp_path, "qwen2.5", suite, tool_format="bash")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2.5", {"decoder": None}, r"its ids of '.*' say '.*Ġ"),
        ("qwen2.5", {"pre_tokenizer": None}, "its ids of ' a.b Grüße' say 'a.b"),
        ("qwen2.5", {"model": {"type": "BPE", "vocab": {}, "merges": []}}, "its .*say.* say ''"),
        ("gemma", {"decoder": {"type": "Fuse"}}, "its ids of .* say "),
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    directory = write_tokenizer(tmp_path / "model", family)
    files = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(files | changes))
    tokenizer = read_tokenizer_files(directory).tokenizer
    control = ControlTokens(tokenizer, TEMPLATES[family])
    with pytest.raises(TokenizerError, match=f"the tokenizer loses text: {message}"):
        control.check_readable("  say a.b Grüße")


@pytest.mark.parametrize(
    "normalizer", [None, normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend("▁")]
)
def test_what_a_tokenizer_normalizes_is_not_lost(normalizer: Any, tmp_path: Path):
    for family in ("qwen2.5", "gemma"):
        tokenizer = read_tokenizer_files(write_tokenizer(tmp_path / family, family)).tokenizer
        if normalizer is not None:
            both = [normalizer, *filter(None, [tokenizer.backend.normalizer])]
            tokenizer.backend.normalizer = normalizers.Sequence(both)
        if family == "gemma" or not isinstance(normalizer, normalizers.Prepend):
            control = ControlTokens(tokenizer, TEMPLATES[family])
            control.check_readable(" I say\n\n  a.b: Gru\u0308ße, 你好 <think>\nx</think>🙂 \n")


def test_all_attempts_at_a_task_start_from_its_prompt(tmp_path: Path):
    suite, times = GuessSuite(), itertools.count()
    suite.messages = lambda task: [Message(role="user", content=f"It is {next(times)} o'clock.")]
    renderer = renderer_of(tmp_path, "smollm2", suite)
    prompts = {renderer.prompt_ids(TASK) for _ in range(2)}
    prompts |= {renderer.control.encode(renderer.begin(TASK)._prompt) for _ in range(2)}
    assert len(prompts) == 1
    assert renderer.prompt_ids(dataclasses.replace(TASK, task_id="other")) not in prompts


def test_half_a_surrogate_pair_is_no_message(tmp_path: Path):
    task = dataclasses.replace(TASK, instruction="Find \ud83d.")
    renderer = renderer_of(tmp_path, "qwen2.5")
    with pytest.raises(ConfigError, match=r"'secret': .*'Find \\ud83d.': half a surrogate pair"):
        check_prompt(task, renderer, 1000)


def test_messages_that_change_from_call_to_call_are_refused(tmp_path: Path):
    suite, numbers = GuessSuite(), itertools.count()
    suite.messages = lambda task: [Message(role="user", content=f"Find {next(numbers)}.")]
    renderer = renderer_of(tmp_path, "qwen2.5", suite)
    message = r"task 'secret': .* changes from call to call: .*Find 1\..*, then .*Find 2\..*by its"
    with pytest.raises(ConfigError, match=message):
        check_prompt(TASK, renderer, 1000)


_SAID = ("system", "user", "assistant", "tool")


def told(root: Path, template: str, *roles: str, tools: Any = ()) -> ChatRenderer:
    """A renderer whose suite says a message of each role."""
    suite = GuessSuite()
    suite.messages = lambda task: [Message(role=role, content=f" I {role}. ") for role in roles]
    suite.tools = tools
    directory = write_tokenizer(root / "model", "smollm2", template=template)
    made = make_renderer(suite, ChatSection(tokenizer=str(directory)))
    assert isinstance(made, ChatRenderer)
    return made


def showing(*roles: str) -> str:
    """A template that shows messages of these roles alone."""
    ask = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    return (
        f"{{% for m in messages %}}{{% if m.role in {roles} %}}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}" + ask
    )


@pytest.mark.parametrize("lost", [(), ("system",), ("tool",), ("system", "tool")])
def test_a_message_that_a_template_does_not_show_is_refused(lost: tuple[str, ...], tmp_path: Path):
    renderer = told(tmp_path, showing(*(role for role in _SAID if role not in lost)), *_SAID)
    if not lost:
        return check_prompt(TASK, renderer, 1000)
    found = ", ".join(rf"the message ' I {role}. ' of the role '{role}'" for role in lost)
    with pytest.raises(ConfigError, match=f"task 'secret': .* does not show {found}, so the"):
        check_prompt(TASK, renderer, 1000)


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_family_shows_what_is_said(family: str, tmp_path: Path):
    suite = GuessSuite(system="You guess <|im_end|> well.")
    check_prompt(TASK, renderer_of(tmp_path, family, suite), 2000)


def test_tools_that_a_template_does_not_show_are_refused(tmp_path: Path):
    """It describes them to a user who asks nothing of a system, and knows how calls are written."""
    template = (
        "{% if tools and messages[0].role != 'system' %}{{ tools[0] | tojson }}"
        "<tool_call>{% endif %}" + showing(*_SAID)
    )
    check_prompt(TASK, told(tmp_path, template, "user", tools=(PROBE,)), 1000)
    with pytest.raises(ConfigError, match=r"does not show the tool 'probe', so"):
        check_prompt(TASK, told(tmp_path, template, "system", "user", tools=(PROBE,)), 1000)


def test_tools_are_not_described_by_the_assistant(tmp_path: Path):
    template = showing("user", "assistant")
    renderer = told(tmp_path, template, "assistant", "user", tools=(PROBE,))
    assert [PROBE.description in m["content"] for m in renderer.messages(TASK)] == [False, True]
    renderer = told(tmp_path, template, "assistant", tools=(PROBE,))
    with pytest.raises(ConfigError, match="gave none of a system or user for 'secret': expected"):
        check_prompt(TASK, renderer, 1000)


@pytest.mark.parametrize("name", ["enable_thinkin", "messages"])
def test_an_option_that_a_template_does_not_read_is_refused(name: str, tmp_path: Path):
    message = (
        rf"template_options has \['{name}'\], which .*jinja does not read: .*'enable_thinking'"
    )
    with pytest.raises(ChatTemplateError, match=message):
        renderer_of(tmp_path, "qwen3", template_options={name: False})
