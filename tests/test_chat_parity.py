"""Conversations have the ids of `transformers`' apply_chat_template (the `parity` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATES, write_tokenizer
from test_chat import TASK, GuessSuite

from thundersync_jax.config_chat import ChatSection
from thundersync_jax.envs.base import Observation
from thundersync_jax.rollout.chat_renderer import ChatRenderer, make_renderer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "not thinking": {"enable_thinking": False}}
SAID = ("<think>\nhm\n</think>\n\nIs it 3?", "Grüße, 🙂!", "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_every_context_is_what_transformers_renders(
    family: str, options: str, is_file: bool, tmp_path: Path
):
    """Turns said in the tokenizer's own ids; kept or rewritten, with tools and without."""
    transformers = pytest.importorskip("transformers")
    if options == "not thinking" and "enable_thinking" not in TEMPLATES[family]:
        return  # refused here; there a variable that nothing reads changes nothing
    write_tokenizer(tmp_path, family, as_file=is_file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    section = ChatSection(tokenizer=str(tmp_path), template_options=OPTIONS[options])
    ours = make_renderer(GuessSuite(system="Be brief."), section)
    assert isinstance(ours, ChatRenderer)
    messages = ours.messages(TASK)
    tools = [tool.schema for tool in ours.tools] if ours.traits.shows_tools else None
    conversation = ours.begin(TASK)
    prompt = ours.prompt_ids(TASK)
    context = prompt + conversation.opening_ids
    for said in SAID:
        want = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **OPTIONS[options]
        )
        assert list(context) == list(want)
        ids = (*ours.tokenizer.encode(said), ours.traits.end_id)
        conversation.hear(ids)
        reply = conversation.answer(Observation(text="lower, ü"), 1000)
        context = (prompt if reply.is_rewritten else context + ids) + reply.token_ids
        opened = ours.opened_by(ours.render(messages))
        messages += [
            {"role": "assistant", "content": opened + said},
            {"role": "user", "content": "lower, ü"},
        ]
