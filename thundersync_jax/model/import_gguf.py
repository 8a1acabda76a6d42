"""Makes a Hugging Face directory of a GGUF file, the form in which llama.cpp reads models.

Quantized numbers become the float32 that they stand for. llama.cpp rotates neighboring dimensions
of queries and keys, Hugging Face those half a head apart: the rows of their kernels are put back in
order, which no shape would show. What this module does not know is refused. Never imports jax.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from thundersync_jax.model.presets import ModelError

_ARCHITECTURE = "llama"
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How text is split before byte-level BPE, by tokenizer.ggml.pre.
_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
}


def convert_gguf(source: Path, root: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer of `source` to the directory `root`.

    Raises:
      ModelError: it is no GGUF file, or not one of a model and tokenizer that are known here.
    """
    file = GgufFile(source)
    config, arrays = file.config(), dict(file.arrays())
    root.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", json.loads(file.tokenizer().to_str())),
        ("tokenizer_config.json", file.tokenizer_config()),
    ):
        (root / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    save_file(arrays, root / "model.safetensors", metadata={"format": "pt"})


class GgufFile:
    """What a GGUF file says, in Hugging Face's words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(
                f"{path} cannot be read as GGUF ({type(error).__name__}: {error}): copy it again"
            ) from error
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}
        self._check("general.architecture", (_ARCHITECTURE,))
        self._check("tokenizer.ggml.model", ("gpt2",))
        self._check("tokenizer.ggml.pre", tuple(_SPLITS))

    def config(self) -> dict[str, Any]:
        """Its config.json."""

        def of(key: str) -> Any:
            return self._entry(f"{_ARCHITECTURE}.{key}")

        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self._entry("tokenizer.ggml.tokens")),
            "hidden_size": of("embedding_length"),
            "num_hidden_layers": of("block_count"),
            "num_attention_heads": of("attention.head_count"),
            "num_key_value_heads": of("attention.head_count_kv"),
            "intermediate_size": of("feed_forward_length"),
            "max_position_embeddings": of("context_length"),
            "rope_theta": _decimal(of("rope.freq_base")),
            "rms_norm_eps": _decimal(of("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._entry("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._entry("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float32",
        }

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor by Hugging Face's name, float32."""
        heads = {
            "attn_q": self._entry(f"{_ARCHITECTURE}.attention.head_count"),
            "attn_k": self._entry(f"{_ARCHITECTURE}.attention.head_count_kv"),
        }
        unknown = [name for name in self._tensors if _name(name) is None]
        if unknown:
            raise ModelError(
                f"{self._path} has tensors that a {_ARCHITECTURE} model of these families does "
                f"not: {', '.join(unknown[:8])}. They would change every logit"
            )
        for name, tensor in self._tensors.items():
            found, array = _name(name), self._dequantized(tensor)
            assert found is not None
            if num_heads := heads.get(name.split(".")[-2]):
                array = _halves(array, num_heads)
            yield found, array

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.json: byte-level BPE."""
        tokens, kinds = (self._entry(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
        merges = [tuple(pair.split(" ")) for pair in self._entry("tokenizer.ggml.merges")]
        found = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        found.pre_tokenizer = _SPLITS[self._entry("tokenizer.ggml.pre")]()
        found.decoder = decoders.ByteLevel()
        found.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == TokenType.CONTROL
            ]
        )
        return found

    def tokenizer_config(self) -> dict[str, Any]:
        """Its tokenizer_config.json, with the chat template."""
        tokens = self._entry("tokenizer.ggml.tokens")
        named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {ours: self._find(f"tokenizer.ggml.{key}_token_id") for ours, key in named.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._entry(f"{_ARCHITECTURE}.context_length"),
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": tokens[at] for name, at in ids.items() if at is not None},
            "chat_template": self._find("tokenizer.chat_template"),
        }

    def _dequantized(self, tensor: ReaderTensor) -> np.ndarray:
        shape = [int(size) for size in reversed(tensor.shape)]
        try:
            # As one row: the library's loop over groups of rows takes ten times as long.
            return dequantize(tensor.data.reshape(1, -1), tensor.tensor_type).reshape(shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._path}: {tensor.name} has numbers of the kind {tensor.tensor_type.name}, "
                "which the library gguf does not read: take the model in another quantization"
            ) from error

    def _check(self, key: str, expected: tuple[str, ...]) -> None:
        if self._entry(key) not in expected:
            raise ModelError(
                f"{self._path}: {key} = {self._entry(key)!r}: expected one of {list(expected)}. "
                "Take the model as a Hugging Face directory"
            )

    def _entry(self, key: str) -> Any:
        value = self._find(key)
        if value is None:
            raise ModelError(f"{self._path} has no {key!r}: it is not a whole model")
        return value

    def _find(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()


def _name(name: str) -> str | None:
    """Hugging Face's; None for what is not known."""
    *layer, kind, suffix = name.split(".")
    if suffix != "weight":
        return None
    if not layer:
        return f"{_WHOLE[kind]}.weight" if kind in _WHOLE else None
    return f"model.layers.{layer[-1]}.{_LAYER[kind]}.weight" if kind in _LAYER else None


def _halves(kernel: np.ndarray, num_heads: int) -> np.ndarray:
    """[N H, D] with the halves of every head apart, of one where they alternate."""
    width = kernel.shape[-1]
    pairs = kernel.reshape(num_heads, -1, 2, width)  # [N, H / 2, 2, D]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(-1, width))


def _decimal(value: float) -> float:
    """The number that was meant by one stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
