"""Small tokenizers and chat templates that behave like those of model families.

The templates are written for these tests. Each does what matters of its family: how it asks for a
turn, what it makes of tools, of their answers, and of the reasoning of earlier turns.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

TEXTS = (
    "A file holds a secret number from 0 to 7. Find it with the tool probe.",
    '{"name": "probe", "arguments": {"value": 3}} {"name": "probe", "parameters": {"value": 3}}',
    "higher lower found error user assistant system tool <think> </think> <tool_call>",
    "The secret is between 2 and 5, so I try 4. Grüße, 你好, 🙂!",
)

_CHATML_ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

# ChatML of any role; no tools, and a system message of its own (SmolLM2).
SMOLLM2 = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}" + _CHATML_ASK
)

_QWEN_HEAD = """
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else 'You are Q.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
"""

# Hermes tool calls; consecutive answers of tools share a message of the user (Qwen2.5).
QWEN25 = (
    _QWEN_HEAD
    + """
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (loop.first and has_system) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
    + _CHATML_ASK
)

# The same, and reasoning is shown only after the last thing that a user said (Qwen3).
QWEN3 = (
    _QWEN_HEAD
    + """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\\n' }}
    {%- elif not (loop.first and has_system) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)

# The template opens the reasoning itself, and drops that of every earlier turn.
REASONER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + "
    "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content) + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# Headers, trimmed contents, tools in the first message of the user (Llama 3.1).
LLAMA3 = """
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') %}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n' }}
{{- (messages[0].content | trim if has_system else '') + '<|eot_id|>' }}
{%- set ns = namespace(told=not tools) %}
{%- for m in messages %}
    {%- if not (loop.first and has_system) %}
        {%- set role = 'ipython' if m.role == 'tool' else m.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
        {%- if not ns.told and m.role == 'user' %}
            {%- set ns.told = true %}
            {{- 'Respond with {"name": function name, "parameters": its arguments}.\\n' }}
            {%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Turns of a user and a model only, one after the other; a system message joins the first (Gemma).
GEMMA = """
{{- bos_token }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if first else messages %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (first if loop.first else '') + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

TEMPLATES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "reasoner": REASONER,
    "llama3": LLAMA3,
    "gemma": GEMMA,
}

_SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
        "<|start_header_id|>", "<|end_header_id|>",
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}  # fmt: skip
_SETTINGS: dict[str, dict[str, object]] = {
    "chatml": {"eos_token": "<|im_end|>", "bos_token": None},
    "llama3": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>", "special": True},
    },
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
}
_PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # special: false, as in Qwen3


def kind_of(family: str) -> str:
    return family if family in _SPECIAL else "chatml"


def bpe(family: str) -> Tokenizer:
    """A byte-level BPE, or for "gemma" one of characters with bytes for those it lacks."""
    special = list(_SPECIAL[kind_of(family)])
    if family == "gemma":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = [chr(c) for c in range(33, 127)] + ["▁", "\n"]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 200,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    texts = [t for t in (*TEXTS, *TEMPLATES.values()) if family != "gemma" or t.isascii()]
    tokenizer.train_from_iterator(texts, trainer)
    if family == "gemma":
        tokenizer = _without_bytes_among_added(tokenizer)
    elif kind_of(family) == "chatml":
        tokenizer.add_tokens([AddedToken(name, special=False) for name in _PLAIN_ADDED])
    return tokenizer


def _without_bytes_among_added(tokenizer: Tokenizer) -> Tokenizer:
    """Bytes are ordinary tokens: text that spells "<0x41>" is no byte."""
    described = json.loads(tokenizer.to_str())
    added = described["added_tokens"]
    described["added_tokens"] = [t for t in added if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


def write_tokenizer(
    root: Path, family: str, *, template: str | None = None, as_file: bool = True
) -> Path:
    """A directory with the tokenizer and the template of `family`, as `save_pretrained` has it."""
    root.mkdir(parents=True, exist_ok=True)
    bpe(family).save(str(root / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_SETTINGS[kind_of(family)]}
    template = TEMPLATES[family] if template is None else template
    if as_file:
        (root / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        settings["chat_template"] = template
    (root / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return root
