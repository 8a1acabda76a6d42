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

NOT_THINKING = {"enable_thinking": False}
CASES = [(name, {}) for name in TEMPLATES]  # an option that a template does not read is refused
CASES += [(name, NOT_THINKING) for name, text in TEMPLATES.items() if "enable_thinking" in text]
SAID = ("<think>\nhm\n</think>\n\nIs it 3?", "Grüße, 🙂!", "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_every_context_is_what_transformers_renders(
    family: str, options: dict[str, Any], is_file: bool, tmp_path: Path
):
    """Turns said in the tokenizer's own ids; kept or rewritten, with tools and without."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, family, as_file=is_file)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    section = ChatSection(tokenizer=str(tmp_path), template_options=options)
    ours = make_renderer(GuessSuite(system="Be brief."), section)
    assert isinstance(ours, ChatRenderer)
    messages = ours.messages(TASK)
    tools = [tool.schema for tool in ours.tools] if ours.traits.shows_tools else None
    conversation = ours.begin(TASK)
    prompt = ours.prompt_ids(TASK)
    context = prompt + conversation.opening_ids
    for said in SAID:
        want = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **options
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
