"""Logits equal Hugging Face's own Llama and Qwen3 on tiny random weights (the `parity` extra)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from thundersync_jax.model import transformer
from thundersync_jax.model.presets import Llama3RopeScaling, TransformerConfig

SCALING = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
CONFIGS = {
    "llama": dict(rope_theta=5e3, rope_scaling=SCALING, rms_norm_eps=1e-5),
    "llama_tied": dict(rope_theta=1e5, tie_embeddings=True, rms_norm_eps=1e-5),
    "qwen3": dict(rope_theta=1e6, use_qk_norm=True),
    "qwen3_tied": dict(rope_theta=1e6, use_qk_norm=True, tie_embeddings=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_hugging_face(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = TransformerConfig(
        vocab_size=64,
        embed_dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=48,
        **CONFIGS[family],
    )
    torch.manual_seed(0)
    model = _hugging_face_model(transformers, config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    weights = {name: w.detach().numpy() for name, w in model.state_dict().items()}
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    positions = np.broadcast_to(np.arange(40), tokens.shape)
    params = _params(config, weights)
    got = transformer.logits(config, params, transformer.forward(config, params, tokens, positions))
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-4, atol=2e-4)


def _hugging_face_model(transformers: Any, config: TransformerConfig) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_position,
        }
    family = "Qwen3" if config.use_qk_norm else "Llama"
    made = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_dim,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=rope,
    )
    return getattr(transformers, f"{family}ForCausalLM")(made)


def _params(config: TransformerConfig, weights: dict[str, np.ndarray]) -> transformer.Params:
    embed, head_dim = config.embed_dim, config.head_dim

    def stacked(name: str) -> np.ndarray:
        names = [f"model.layers.{layer}.{name}.weight" for layer in range(config.num_layers)]
        return np.stack([weights[n].T for n in names])

    def heads(name: str, num_heads: int) -> dict[str, np.ndarray]:
        return {"kernel": stacked(name).reshape(-1, embed, num_heads, head_dim)}

    output = stacked("self_attn.o_proj").reshape(-1, config.num_heads, head_dim, embed)
    attention: dict[str, Any] = {
        "query": heads("self_attn.q_proj", config.num_heads),
        "key": heads("self_attn.k_proj", config.num_kv_heads),
        "value": heads("self_attn.v_proj", config.num_kv_heads),
        "output": {"kernel": output},
    }
    if config.use_qk_norm:
        attention["query_norm"] = {"scale": stacked("self_attn.q_norm")}
        attention["key_norm"] = {"scale": stacked("self_attn.k_norm")}
    mlp = {name: {"kernel": stacked(f"mlp.{name}_proj")} for name in ("gate", "up", "down")}
    params: transformer.Params = {
        "embedding": weights["model.embed_tokens.weight"],
        "blocks": {
            "attention_norm": {"scale": stacked("input_layernorm")},
            "attention": attention,
            "mlp_norm": {"scale": stacked("post_attention_layernorm")},
            "mlp": mlp,
        },
        "final_norm": {"scale": weights["model.norm.weight"]},
    }
    if not config.tie_embeddings:
        params["output_kernel"] = weights["lm_head.weight"].T
    return params
