"""A GGUF file becomes the Hugging Face directory that it was made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hugging_face import everywhere

from thundersync_jax.errors import ConfigError
from thundersync_jax.model import transformer
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.presets import ModelError
from thundersync_jax.model.smollm2 import packaged_file
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files

gguf = pytest.importorskip("gguf", reason="the extra smollm2")

from thundersync_jax.model.import_gguf import convert_gguf  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, EMBED, MLP, LAYERS = 4, 2, 8, 32, 64, 2
BYTES = sorted({*"abcdefghijklmnopqrstuvwxyz0123456789.", "Ġ"})
TOKENS = ["<|end|>", "<|start|>", *BYTES, "ab", "Ġab", "12"]
MERGES = ["a b", "Ġ ab", "1 2"]
METADATA = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": EMBED,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "llama.rope.freq_base": 1e5,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.scaling.type": "none",
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SHAPES = {
    "attn_norm": (EMBED,),
    "ffn_norm": (EMBED,),
    "attn_q": (HEADS * HEAD_DIM, EMBED),
    "attn_k": (KV_HEADS * HEAD_DIM, EMBED),
    "attn_v": (KV_HEADS * HEAD_DIM, EMBED),
    "attn_output": (EMBED, HEADS * HEAD_DIM),
    "ffn_gate": (MLP, EMBED),
    "ffn_up": (MLP, EMBED),
    "ffn_down": (EMBED, MLP),
}


def written(path: Path, *, kind: str = "F32", **changes: Any) -> dict[str, np.ndarray]:
    """A small GGUF file with random tensors; returns these, as Hugging Face has them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    for key, value in (METADATA | changes.get("metadata", {})).items():
        _add(writer, key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types(changes.get("kinds", [3, 3] + [1] * (len(TOKENS) - 2)))
    writer.add_token_merges(changes.get("merges", MERGES))
    writer.add_chat_template(TEMPLATE)
    arrays = {"token_embd": rng.standard_normal((len(TOKENS), EMBED), np.float32)}
    arrays["output_norm"] = rng.standard_normal(EMBED, np.float32)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            arrays[f"blk.{layer}.{name}"] = rng.standard_normal(shape, np.float32)
    arrays |= changes.get("arrays", {})
    arrays = {name: array for name, array in arrays.items() if array is not None}
    for name, array in arrays.items():
        stored = array
        for heads, which in ((HEADS, "attn_q"), (KV_HEADS, "attn_k")):
            if name.endswith(which) and array.shape == SHAPES[which]:
                stored = _alternating(array, heads)
        if kind != "F32" and array.ndim == 2:
            numbers = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quantize(stored, numbers), raw_dtype=numbers)
        else:
            writer.add_tensor(f"{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _alternating(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Row 2 i of a head is its row i, row 2 i + 1 that half a head further."""
    result = np.empty_like(kernel)
    for head in range(heads):
        for i in range(HEAD_DIM // 2):
            for half in range(2):
                row = head * HEAD_DIM + half * HEAD_DIM // 2 + i
                result[head * HEAD_DIM + 2 * i + half] = kernel[row]
    return result


@pytest.mark.parametrize(("kind", "steps"), [("F32", 0), ("Q8_0", 127), ("Q4_1", 7.5)])
def test_tensors_and_shapes_are_those_that_were_stored(kind: str, steps: float, tmp_path: Path):
    """To half of a step of the widest block."""
    arrays = written(tmp_path / "model.gguf", kind=kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "made")
    with HuggingFaceDirectory(tmp_path / "made") as directory:
        config = directory.config
        params = directory.load(config, everywhere(config))
        assert directory.max_context == 128
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (1e5, 1e-5, True)
    blocks = params["blocks"]
    for layer in range(LAYERS):
        for name, found in {
            "attn_q": blocks["attention"]["query"]["kernel"][layer].reshape(EMBED, -1).T,
            "attn_k": blocks["attention"]["key"]["kernel"][layer].reshape(EMBED, -1).T,
            "attn_output": blocks["attention"]["output"]["kernel"][layer].reshape(-1, EMBED).T,
            "ffn_down": blocks["mlp"]["down"]["kernel"][layer].T,
            "ffn_norm": blocks["mlp_norm"]["scale"][layer],
        }.items():
            want = arrays[f"blk.{layer}.{name}"]
            most = 0.51 * np.abs(want).max() / steps if steps and want.ndim == 2 else 0.0
            assert np.abs(found - want).max() <= most, name


def test_its_tokenizer_and_template_come_along(tmp_path: Path):
    written(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "made")
    files = read_tokenizer_files(tmp_path / "made")
    tokenizer = files.tokenizer
    text = "<|start|>ab ab 12.<|end|>"
    ids = tokenizer.encode(text)
    assert [TOKENS[i] for i in ids] == ["<|start|>", "ab", "Ġab", "Ġ", "1", "2", ".", "<|end|>"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 0, len(TOKENS))
    assert files.template == TEMPLATE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, r"architecture = 'mamba': expected one of \['llama'\]"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre = 'tekken': expected one of \['smollm'\]"),
        ({"arrays": {"rope_freqs": np.ones(4, np.float32)}}, r"rope_freqs\.weight is not known"),
        ({"arrays": {"blk.9.ffn_up": np.ones((MLP, EMBED))}}, r"blk\.9\.ffn_up\.weight is not kn"),
        ({"arrays": {"blk.1.ffn_up": None}}, r"1 tensors.*\n.*blk\.1\.ffn_up\.weight is missing"),
        (
            {"arrays": {"blk.0.attn_q": np.ones((30, EMBED), np.float32)}},
            r"attn_q\.weight has shape \[30, 32\], its metadata asks for \[32, 32\]",
        ),
        ({"kinds": [3, 3]}, r"token_type = \[3, 3\]: expected a list of"),
        ({"merges": ["abc", "z q"]}, r"merges of what is no token: \[\('abc',\), \('z', 'q'\)\]"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    written(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.rope.scaling.type", "linear", "'none'"),
        ("llama.rope.scale_linear", 4.0, "1.0"),
        ("llama.rope.dimension_count", 4, "8"),
        ("llama.attention.key_length", 16, "8"),
        ("llama.attention.sliding_window", 4, "no such entry: it may change every logit"),
        ("llama.expert_count", 8, "0"),
        ("llama.logit_scale", 0.5, "no such entry"),
        ("llama.attention.head_count", 0, "an integer from 1 on"),
        ("llama.attention.head_count", [4, 4], "an integer from 1 on"),
        ("llama.attention.head_count", "4", "an integer from 1 on"),
        ("llama.rope.freq_base", "x", "a positive number"),
        ("tokenizer.ggml.eos_token_id", 9999, "the id of one of"),
    ],
)
def test_metadata_that_is_not_written_or_no_number_is_refused(
    key: str, value: Any, expected: str, tmp_path: Path
):
    written(tmp_path / "model.gguf", metadata={key: value})
    with pytest.raises(ModelError, match=re.escape(f"{key} = {value!r}: expected {expected}")):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_heads_that_do_not_share_the_width_are_refused(tmp_path: Path):
    written(tmp_path / "model.gguf", metadata={"llama.attention.head_count": 3})
    with pytest.raises(
        ModelError, match="embedding_length = 32, head_count = 3, head_count_kv = 2"
    ):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "made")


def test_a_file_that_is_cut_off_or_none_is_refused(tmp_path: Path):
    path = tmp_path / "model.gguf"
    written(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:100], b"GGML", b""):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.gguf cannot be read as GGUF.*copy it again"):
            convert_gguf(path, tmp_path / "made")
    with pytest.raises(ModelError, match=r"missing\.gguf: there is no such file"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "made")


# -- SmolLM2 itself ------------------------------------------------------------------------------

TEXT = """The tower is 324 metres tall, about the same height as an 81-storey building, and the \
tallest structure in Paris. Its base is square, measuring 125 metres on each side. During its \
construction, it surpassed the Washington Monument to become the tallest human-made structure in \
the world, a title it held for 41 years until the Chrysler Building in New York City was finished \
in 1930.

def add(a, b):
    return a + b

print(add(2, 3))  # 5
"""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = packaged_file()
    except ConfigError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("smollm2")
    convert_gguf(source, root)
    return root


def logprobs(config: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    """[T, V] of the tokens that follow each of `ids`."""
    positions = np.arange(len(ids), dtype=np.int32)[None]
    hidden = transformer.forward(config, params, ids[None], positions)
    return np.asarray(jax.nn.log_softmax(transformer.logits(config, params, hidden)[0]))


def perplexity(found: np.ndarray, ids: np.ndarray) -> float:
    return float(np.exp(-np.mean(found[np.arange(len(ids) - 1), ids[1:]])))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_smollm2_completes_a_sentence_and_has_the_perplexity_of_transformers(smollm2: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = read_tokenizer_files(smollm2).tokenizer
    with HuggingFaceDirectory(smollm2) as directory:
        config = directory.config
        params = directory.load(config, everywhere(config))

    ids = list(tokenizer.encode("The capital of France is"))
    for _ in range(2):
        ids.append(int(logprobs(config, params, np.asarray(ids, np.int32))[-1].argmax()))
    assert tokenizer.decode(ids).endswith("The capital of France is Paris.")

    source = packaged_file()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    theirs = transformers.AutoTokenizer.from_pretrained(**where)
    ids = np.asarray(tokenizer.encode(TEXT), np.int32)
    assert theirs(TEXT)["input_ids"] == ids.tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = model(torch.tensor(ids[None], dtype=torch.long)).logits[0]
    want = jnp.asarray(torch.log_softmax(scores, -1).numpy())
    got = logprobs(config, params, ids)
    assert abs(perplexity(got, ids) / perplexity(want, ids) - 1) <= 0.01
    message = [{"role": "user", "content": "Hello"}]
    made = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert made.apply_chat_template(message, tokenize=False) == theirs.apply_chat_template(
        message, tokenize=False
    )
