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
from thundersync_jax.model.typed_values import TypedValues

_ARCHITECTURE = "llama"
# Hugging Face's name of every tensor, and its dimensions by `GgufFile._sizes`.
_WHOLE = {
    "token_embd": ("model.embed_tokens", "vocab embed"),
    "output_norm": ("model.norm", "embed"),
    "output": ("lm_head", "vocab embed"),
}
_LAYER = {
    "attn_norm": ("input_layernorm", "embed"),
    "attn_q": ("self_attn.q_proj", "queries embed"),
    "attn_k": ("self_attn.k_proj", "keys embed"),
    "attn_v": ("self_attn.v_proj", "keys embed"),
    "attn_output": ("self_attn.o_proj", "embed queries"),
    "ffn_norm": ("post_attention_layernorm", "embed"),
    "ffn_gate": ("mlp.gate_proj", "mlp embed"),
    "ffn_up": ("mlp.up_proj", "mlp embed"),
    "ffn_down": ("mlp.down_proj", "embed mlp"),
}
# Metadata of the architecture that config.json has. Another key may change every logit.
_READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    "rope.freq_base",
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
      ModelError: it is no GGUF file, or not one of a model and tokenizer that are known here; then
        nothing is written.
    """
    file = GgufFile(source)
    contents = {
        "config.json": file.config(),
        "tokenizer.json": json.loads(file.tokenizer().to_str()),
        "tokenizer_config.json": file.tokenizer_config(),
    }
    arrays = dict(file.arrays())
    root.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (root / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    save_file(arrays, root / "model.safetensors", metadata={"format": "pt"})


class GgufFile:
    """What a GGUF file says, in Hugging Face's words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise ModelError(f"{path}: there is no such file")
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(
                f"{path} cannot be read as GGUF ({type(error).__name__}: {error}): copy it again"
            ) from error
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}
        fields = self._reader.fields.items()
        self._values = TypedValues({key: field.contents() for key, field in fields}, str(path))
        self._check("general.architecture", (_ARCHITECTURE,))
        self._check("tokenizer.ggml.model", ("gpt2",))
        self._check("tokenizer.ggml.pre", tuple(_SPLITS))
        self._sizes = self._read_sizes()
        self._check_metadata()
        self._check_tensors()

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        values = self._values
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self._sizes["vocab"],
            "hidden_size": self._sizes["embed"],
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": self._size("attention.head_count"),
            "num_key_value_heads": self._size("attention.head_count_kv"),
            "intermediate_size": self._sizes["mlp"],
            "max_position_embeddings": self._size("context_length"),
            "rope_theta": _decimal(values.number(f"{_ARCHITECTURE}.rope.freq_base")),
            "rms_norm_eps": _decimal(
                values.number(f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon")
            ),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._special_id("bos"),
            "eos_token_id": self._special_id("eos"),
            "torch_dtype": "float32",
        }

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor by Hugging Face's name, float32."""
        heads = {
            "attn_q": self._size("attention.head_count"),
            "attn_k": self._size("attention.head_count_kv"),
        }
        for name, (theirs, _) in self._expected().items():
            if name in self._tensors:
                array = self._dequantized(self._tensors[name])
                if num_heads := heads.get(name.split(".")[-2]):
                    array = _halves(array, num_heads)
                yield theirs, array

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.json: byte-level BPE."""
        values, tokens = self._values, self._tokens()
        kinds = values.get("tokenizer.ggml.token_type")
        if not isinstance(kinds, list) or len(kinds) != len(tokens):
            raise values.error("tokenizer.ggml.token_type", f"a list of {len(tokens)} kinds")
        merges = [tuple(pair.split(" ")) for pair in values.texts("tokenizer.ggml.merges")]
        ids = {token: at for at, token in enumerate(tokens)}
        wrong = [m for m in merges if len(m) != 2 or not ids.keys() >= {*m, "".join(m)}]
        if wrong or len(ids) < len(tokens):
            raise ModelError(
                f"{self._path}: {len(tokens)} tokens, {len(ids)} of them different, and merges of "
                f"what is no token: {wrong[:4]}: expected different ones and no such merges"
            )
        found = Tokenizer(models.BPE(ids, merges))
        found.pre_tokenizer = _SPLITS[values.text("tokenizer.ggml.pre")]()
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
        tokens = self._tokens()
        named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {ours: self._special_id(theirs, None) for ours, theirs in named.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._size("context_length"),
            "clean_up_tokenization_spaces": False,
            **{f"{name}_token": tokens[at] for name, at in ids.items() if at is not None},
            "chat_template": self._values.text("tokenizer.chat_template", None),
        }

    def _size(self, key: str) -> int:
        return self._values.integer(f"{_ARCHITECTURE}.{key}")

    def _tokens(self) -> list[str]:
        return self._values.texts("tokenizer.ggml.tokens")

    def _special_id(self, name: str, *default: None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        found = self._values.integer(key, *default, least=0)
        if found is not None and found >= len(self._tokens()):
            raise self._values.error(key, f"the id of one of {len(self._tokens())} tokens")
        return found

    def _read_sizes(self) -> dict[str, int]:
        width, num_heads = self._size("embedding_length"), self._size("attention.head_count")
        num_kv_heads = self._size("attention.head_count_kv")
        if width % (2 * num_heads) or num_heads % num_kv_heads:
            raise ModelError(
                f"{self._path}: embedding_length = {width}, head_count = {num_heads}, "
                f"head_count_kv = {num_kv_heads}: expected even heads, as many for each kv head"
            )
        return {
            "vocab": len(self._tokens()),
            "embed": width,
            "queries": width,
            "keys": width // num_heads * num_kv_heads,
            "mlp": self._size("feed_forward_length"),
        }

    def _check_metadata(self) -> None:
        """Metadata that config.json has not says what follows from the rest."""
        head_dim = self._sizes["embed"] // self._size("attention.head_count")
        follows = {
            "vocab_size": self._sizes["vocab"],
            "rope.dimension_count": head_dim,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.scaling.type": "none",
            "rope.scale_linear": 1.0,
            "expert_count": 0,
            "expert_used_count": 0,
        }
        for name in self._values:
            architecture, _, key = name.partition(".")
            if architecture != _ARCHITECTURE or key in _READ:
                continue
            if key not in follows:
                raise self._values.error(name, "no such entry: it may change every logit")
            if self._values.get(name) != follows[key]:
                raise self._values.error(name, f"{follows[key]!r}, for this is all that is known")

    def _check_tensors(self) -> None:
        """Raises ModelError naming all that is missing, misshapen or unknown at once."""
        expected, wrong = self._expected(), []
        for name, (_, want) in expected.items():
            if name in self._tensors:
                shape = _shape(self._tensors[name])
                if shape != want:
                    wrong.append(f"{name} has shape {shape}, its metadata asks for {want}")
            elif name != "output.weight":
                wrong.append(f"{name} is missing")
        wrong += [f"{name} is not known" for name in self._tensors.keys() - expected.keys()]
        if wrong:
            raise ModelError(
                f"{self._path}: {len(wrong)} tensors are not those of a {_ARCHITECTURE} model, "
                "which would change every logit:\n  " + "\n  ".join(sorted(wrong)[:100])
            )

    def _expected(self) -> dict[str, tuple[str, list[int]]]:
        """Hugging Face's name and the shape of every tensor."""
        found = {ours: (f"{theirs}.weight", dims) for ours, (theirs, dims) in _WHOLE.items()}
        for layer in range(self._size("block_count")):
            for ours, (theirs, dims) in _LAYER.items():
                name = f"model.layers.{layer}.{theirs}.weight"
                found[f"blk.{layer}.{ours}"] = (name, dims)
        return {
            f"{ours}.weight": (name, [self._sizes[axis] for axis in dims.split()])
            for ours, (name, dims) in found.items()
        }

    def _dequantized(self, tensor: ReaderTensor) -> np.ndarray:
        try:
            # As one row: the library's loop over groups of rows takes ten times as long.
            return dequantize(tensor.data.reshape(1, -1), tensor.tensor_type).reshape(
                _shape(tensor)
            )
        except NotImplementedError as error:
            raise ModelError(
                f"{self._path}: {tensor.name} has numbers of the kind {tensor.tensor_type.name}, "
                "which the library gguf does not read: take the model in another quantization"
            ) from error

    def _check(self, key: str, expected: tuple[str, ...]) -> None:
        if self._values.text(key) not in expected:
            raise self._values.error(
                key, f"one of {list(expected)}. Take the model as a Hugging Face directory"
            )


def _shape(tensor: ReaderTensor) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


def _halves(kernel: np.ndarray, num_heads: int) -> np.ndarray:
    """[N H, D] with the halves of every head apart, of one where they alternate."""
    width = kernel.shape[-1]
    pairs = kernel.reshape(num_heads, -1, 2, width)  # [N, H / 2, 2, D]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(-1, width))


def _decimal(value: float) -> float:
    """The number that was meant by one stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
