"""Imported and exported models are Hugging Face's own, on random small checkpoints of each family
(the `parity` extra).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.config_lora import LoraSection
from thundersync_jax.model import transformer
from thundersync_jax.model.export_hf import export_hugging_face
from thundersync_jax.model.export_peft import export_peft
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.trainable import join, partition

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": None,  # torch gives a padding token no gradient
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "smollm2": ("Llama", {"rope_theta": 1e5, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rope_theta": 1e6}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"rope_theta": 1e6}),
    "qwen3_tied": ("Qwen3", {"rope_theta": 3e4, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3_stretched": (
        "Gemma3Text",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40)).astype(np.int32)


def made(name: str, root: Path) -> Any:
    """A random model of that kind in torch, saved in `root`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, changes = CHECKPOINTS[name]
    config = getattr(transformers, f"{family}Config")(**COMMON | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(root)
    return model


def loaded(root: Path) -> tuple[Any, Any]:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with HuggingFaceDirectory(root) as directory:
        config = directory.config
        shardings = jax.tree.map(lambda _: one, transformer.abstract_params(config))
        return config, directory.load(config, shardings)


def torch_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def logits(config: Any, params: Any) -> np.ndarray:
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    hidden = transformer.forward(config, params, TOKENS, positions)
    return np.asarray(transformer.logits(config, params, hidden))


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_imported_model_has_the_logits_of_transformers(name: str, tmp_path: Path):
    want = torch_logits(made(name, tmp_path))
    got = logits(*loaded(tmp_path))
    assert np.abs(got - want).max() <= 1e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_gradients_are_those_of_torch(name: str, tmp_path: Path):
    """Of the summed log-probability of the tokens after the first."""
    torch = pytest.importorskip("torch")
    model = made(name, tmp_path)
    scores = torch.log_softmax(model(torch.tensor(TOKENS, dtype=torch.long)).logits, -1)
    wanted = torch.tensor(TOKENS[:, 1:, None], dtype=torch.long)
    scores[:, :-1].gather(2, wanted).sum().backward()
    config, params = loaded(tmp_path)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)

    def total(params: Any) -> jax.Array:
        hidden = transformer.forward(config, params, TOKENS, positions)
        logps = jax.nn.log_softmax(transformer.logits(config, params, hidden))
        return jnp.take_along_axis(logps[:, :-1], TOKENS[:, 1:, None], axis=2).sum()

    grads = jax.grad(total)(params)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    model.save_pretrained(tmp_path / "grads")
    _, want = loaded(tmp_path / "grads")
    errors = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), grads, want)
    assert max(jax.tree.leaves(errors)) <= 1e-3, errors


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_exported_model_is_loaded_by_transformers(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    want = torch_logits(made(name, tmp_path / "made"))
    config, params = loaded(tmp_path / "made")
    exported = tmp_path / "exported"
    export_hugging_face(config, params, exported, dtype="float32", max_file_bytes=40_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="float32")
    np.testing.assert_allclose(torch_logits(again), want, atol=1e-6)
    assert dataclasses.asdict(loaded(exported)[0]) == dataclasses.asdict(config)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_exported_adapters_are_loaded_by_peft(name: str, tmp_path: Path):
    """Beside their base, and merged into it."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    made(name, tmp_path / "base")
    config, frozen = loaded(tmp_path / "base")
    section = LoraSection(rank=4, alpha=6.0, targets=("query", "value", "output", "gate", "down"))
    model = with_adapters(config, section)
    rng = np.random.default_rng(1)
    trainable, _ = partition(model, transformer.abstract_params(model))
    params = join(
        jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.2).astype(x.dtype), trainable),
        frozen,
    )
    want = logits(model, params)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="float32")
    assert np.abs(want - torch_logits(base)).max() > 0.1
    export_peft(model, params, tmp_path / "adapter", base=str(tmp_path / "base"))
    got = torch_logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    assert np.abs(got - want).max() <= 1e-4
    assert (got.argmax(-1) == want.argmax(-1)).all()
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    np.testing.assert_allclose(torch_logits(auto.eval()), got, atol=1e-6)
    export_hugging_face(model, params, tmp_path / "merged", dtype="float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert np.abs(torch_logits(merged) - want).max() <= 1e-4
