"""Writes adapters as a PEFT directory, which `peft` loads beside their base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from thundersync_jax.model.export_hf import as_in_file
from thundersync_jax.model.families import adapter_tensors
from thundersync_jax.model.import_hf import at_path
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.transformer import Params, logical_axes


def export_peft(
    config: TransformerConfig, params: Params, root: Path, *, base: str, dtype: str = "float32"
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, and replaces those that are there.

    Args:
      params: on devices of this host, in any float dtype.
      base: the directory or name of the base model, for whoever loads the adapters.
      dtype: of the file.

    Raises:
      ModelError: the model has no adapters.
    """
    lora = config.lora
    if lora is None:
        raise ModelError(
            "the model has no adapters, for all of its parameters train (model.lora.rank = 0): "
            "export the model itself"
        )
    axes = logical_axes(config)
    arrays = {
        tensor.name.format(layer): as_in_file(
            np.asarray(jax.device_get(at_path(params, tensor.path)[layer])).astype(dtype),
            at_path(axes, tensor.path)[1:],
            tensor,
        )
        for tensor in adapter_tensors(config)
        for layer in range(config.num_layers)
    }
    text: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in arrays}),
        "inference_mode": True,
    }
    root.mkdir(parents=True, exist_ok=True)
    save_file(arrays, root / "adapter_model.safetensors", metadata={"format": "pt"})
    (root / "adapter_config.json").write_text(json.dumps(text, indent=1))
