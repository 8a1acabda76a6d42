"""Adapters as `peft` reads them: the names, the shapes, and the same policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from test_hugging_face import MODELS, everywhere, one_model

from thundersync_jax.config_lora import LoraSection
from thundersync_jax.model.export_hf import export_hugging_face
from thundersync_jax.model.export_peft import export_peft
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.transformer import abstract_params

SECTION = LoraSection(rank=2, alpha=3.0, targets=("query", "output", "up", "down"))


def random(config: TransformerConfig) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), abstract_params(config)
    )


@one_model
def test_the_exported_model_is_the_base_with_the_exported_adapters(
    config: TransformerConfig, tmp_path: Path
):
    """W + alpha / r * lora_B lora_A of every target, from the two files as they are."""
    model = with_adapters(config, SECTION)
    params = random(model)
    export_hugging_face(model, params, tmp_path / "model", dtype="float32")
    export_peft(model, params, tmp_path / "adapter", base="base")
    text = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert text["target_modules"] == ["down_proj", "o_proj", "q_proj", "up_proj"]
    assert (text["r"], text["lora_alpha"], text["base_model_name_or_path"]) == (2, 3.0, "base")

    plain = {k: v for k, v in flatten_dict(params).items() if "lora" not in k}
    export_hugging_face(config, unflatten_dict(plain), tmp_path / "base", dtype="float32")
    merged, base = (
        load_file(next((tmp_path / d).glob("*.safetensors"))) for d in ("model", "base")
    )
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, kernel in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in adapters:
            down, up = adapters.pop(f"{key}.lora_A.weight"), adapters.pop(f"{key}.lora_B.weight")
            kernel = kernel + 1.5 * up @ down
        np.testing.assert_allclose(merged[name], kernel, atol=1e-5)
    assert not adapters
    with HuggingFaceDirectory(tmp_path / "model") as directory:
        assert directory.config == config
        directory.load(config, everywhere(config))


def test_a_model_without_adapters_has_none_to_write(tmp_path: Path):
    config = MODELS["llama"]
    with pytest.raises(ModelError, match=r"model.lora.rank = 0\): export the model itself"):
        export_peft(config, random(config), tmp_path, base="")
