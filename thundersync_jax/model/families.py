"""Model families of Hugging Face: what their `config.json` says, and how their tensors are named.

A family is one `Family`. `import_hf.py` and `export_hf.py` know no names of their own. What a
configuration asks for and the decoder does not have is refused here, never ignored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from thundersync_jax.model.layers import ADAPTER
from thundersync_jax.model.presets import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelError,
    TransformerConfig,
)
from thundersync_jax.model.typed_values import TypedValues

T = TypeVar("T")
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # kinds of layers of Gemma 3
_ROPE_KEYS = {
    *("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter, here and in a file.

    Attributes:
      path: of ours, in the tree of `transformer.init_params`.
      name: in the files; with "{}" for the layer where ours has a `layers` axis.
      dims: of the file's array; each is one or several of our logical axes, the slowest first.
    """

    path: tuple[str, ...]
    name: str
    dims: tuple[tuple[str, ...], ...]

    @property
    def is_stacked(self) -> bool:
        return "{}" in self.name

    @property
    def axes(self) -> tuple[str, ...]:
        """All of `dims`, in the file's order."""
        return tuple(axis for group in self.dims for axis in group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one architecture is written.

    Attributes:
      model_type, architecture: as in `config.json`.
      fields: of `TransformerConfig`, the values that make a decoder one of this family.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, Any]


def read_config(text: Any, where: str = "config.json") -> TransformerConfig:
    """The shapes that a `config.json` describes, in float32.

    Args:
      text: what the file holds.
      where: names it in errors.

    Raises:
      ModelError: the architecture is not supported, or asks for what the decoder does not have; or
        a value has another type.
    """
    values = TypedValues(text, where)
    family = _family(values)
    _check_supported(family, values)
    num_heads, width = values.integer("num_attention_heads"), values.integer("hidden_size")
    fields = {
        "vocab_size": values.integer("vocab_size"),
        "embed_dim": width,
        "num_layers": values.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": values.integer("num_key_value_heads", None) or num_heads,
        "head_dim": values.integer("head_dim", None) or width // num_heads,
        "mlp_dim": values.integer("intermediate_size"),
        "rms_norm_eps": values.number("rms_norm_eps", 1e-6),
        "tie_embeddings": values.boolean("tie_word_embeddings", family.fields["scale_embeddings"]),
        **family.fields,
        **(_read_gemma(values) if family.model_type == "gemma3_text" else _read_rope(values)),
    }
    try:
        return TransformerConfig(**fields)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that `read_config` reads as this configuration."""
    (family,) = (
        family
        for family in FAMILIES.values()
        if all(getattr(config, key) == value for key, value in family.fields.items())
    )
    rope = _write_rope(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if "factor" in rope else None,
        "rope_parameters": rope,
        **(_write_gemma(config) if config.use_post_norms else {}),
    }


def tensors(config: TransformerConfig) -> tuple[Tensor, ...]:
    """Of every parameter but the adapters', in no particular order."""
    layer = [
        ("attention_norm/scale", "input_layernorm", "embed"),
        ("attention/query/kernel", "self_attn.q_proj", "(heads head_dim) embed"),
        ("attention/key/kernel", "self_attn.k_proj", "(kv_heads head_dim) embed"),
        ("attention/value/kernel", "self_attn.v_proj", "(kv_heads head_dim) embed"),
        ("attention/output/kernel", "self_attn.o_proj", "embed (heads head_dim)"),
        ("mlp/gate/kernel", "mlp.gate_proj", "mlp embed"),
        ("mlp/up/kernel", "mlp.up_proj", "mlp embed"),
        ("mlp/down/kernel", "mlp.down_proj", "embed mlp"),
    ]
    if config.use_post_norms:
        layer += [
            ("attention_post_norm/scale", "post_attention_layernorm", "embed"),
            ("mlp_norm/scale", "pre_feedforward_layernorm", "embed"),
            ("mlp_post_norm/scale", "post_feedforward_layernorm", "embed"),
        ]
    else:
        layer.append(("mlp_norm/scale", "post_attention_layernorm", "embed"))
    if config.use_qk_norm:
        layer += [
            ("attention/query_norm/scale", "self_attn.q_norm", "head_dim"),
            ("attention/key_norm/scale", "self_attn.k_norm", "head_dim"),
        ]
    whole = [
        ("embedding", "model.embed_tokens.weight", "vocab embed"),
        ("final_norm/scale", "model.norm.weight", "embed"),
    ]
    if not config.tie_embeddings:
        whole.append(("output_kernel", "lm_head.weight", "vocab embed"))
    found = [
        (f"blocks/{path}", f"model.layers.{{}}.{name}.weight", dims) for path, name, dims in layer
    ]
    if config.use_qkv_bias:
        found += [
            (f"blocks/attention/{ours}/bias", f"model.layers.{{}}.self_attn.{name}.bias", dims)
            for ours, name, dims in (
                ("query", "q_proj", "(heads head_dim)"),
                ("key", "k_proj", "(kv_heads head_dim)"),
                ("value", "v_proj", "(kv_heads head_dim)"),
            )
        ]
    return tuple(
        Tensor(path=tuple(path.split("/")), name=name, dims=_parsed(dims))
        for path, name, dims in (*whole, *found)
    )


def adapter_tensors(config: TransformerConfig) -> tuple[Tensor, ...]:
    """Of the factors of every adapter, as PEFT names and turns them; none without adapters."""
    found = []
    for kernel in tensors(config):
        *projection, leaf = kernel.path
        if config.lora is not None and leaf == "kernel" and projection[-1] in config.lora.targets:
            name = f"base_model.model.{kernel.name.removesuffix('.weight')}"
            outer, inner = kernel.dims
            for factor, dims in (("a", (("rank",), inner)), ("b", (outer, ("rank",)))):
                path = (*projection, ADAPTER, factor)
                their_name = f"{name}.lora_{factor.upper()}.weight"
                found.append(Tensor(path=path, name=their_name, dims=dims))
    return tuple(found)


def _parsed(dims: str) -> tuple[tuple[str, ...], ...]:
    """(("heads", "head_dim"), ("embed",)) of "(heads head_dim) embed"."""
    return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\w+", dims))


def _family(values: TypedValues) -> Family:
    model_type = values.get("model_type")
    if model_type not in list(FAMILIES):
        raise values.error(
            "model_type",
            f"one of {sorted(FAMILIES)} (Llama 3.x and SmolLM2, Qwen2.5, dense Qwen3, Gemma 3 "
            "text)",
        )
    return FAMILIES[model_type]


def _check_supported(family: Family, values: TypedValues) -> None:
    """What would change the logits, and the decoder does not do."""
    activation = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}[family.fields["activation"]]
    wanted: dict[str, Any] = {
        "hidden_act": activation,
        "hidden_activation": activation,
        "mlp_bias": False,
        "attention_bias": family.fields["use_qkv_bias"],
        "use_sliding_window": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "quantization_config": None,
        "partial_rotary_factor": 1.0,
    }
    found = {
        key: values.get(key)
        for key, value in wanted.items()
        if values.get(key) is not None and values.get(key) != value
    }
    if found:
        raise ModelError(
            f"{values.where}: "
            + ", ".join(
                f"{key} = {value!r} (expected {wanted[key]!r})" for key, value in found.items()
            )
            + f": the decoder does not do this for model_type = {family.model_type!r}"
        )


def _layer_kinds(values: TypedValues, known: tuple[str, ...]) -> list[str] | None:
    """Of every layer, where the file says."""
    kinds, num_layers = values.texts("layer_types", None), values.integer("num_hidden_layers")
    if kinds is not None and (len(kinds) != num_layers or set(kinds) - set(known)):
        raise values.error("layer_types", f"of each of {num_layers} layers one of {list(known)}")
    return kinds


def _read_rope(values: TypedValues) -> dict[str, Any]:
    """`rope_parameters` as newer files have it, or `rope_theta` and `rope_scaling`."""
    _layer_kinds(values, (_GLOBAL,))
    ropes = [values.inner("rope_parameters"), values.inner("rope_scaling")]
    theta, scaling = _rope(values, "rope_theta", ropes, 1e4)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rope(
    outer: TypedValues, key: str, ropes: Sequence[TypedValues], default: float
) -> tuple[float, Llama3RopeScaling | LinearRopeScaling | None]:
    """The base and the stretching on which all of `ropes`, and the base `key` of `outer`, agree."""
    places = [(outer, key), *((rope, "rope_theta") for rope in ropes)]
    found = {f"{at.where}: {key}": at.number(key) for at, key in places if key in at}
    scalings = {rope.where: _read_scaling(rope) for rope in ropes if list(rope)}
    return _agreed(found, default), _agreed(scalings, None)


def _agreed(found: Mapping[str, T], default: T) -> T:
    """The one value of all places that name it."""
    if len(set(found.values())) > 1:
        raise ModelError(
            "; ".join(f"{where} says {value}" for where, value in found.items())
            + ": expected the same of all, for programs differ in which they read. Keep one"
        )
    return next(iter(found.values()), default)


def _read_scaling(rope: TypedValues) -> Llama3RopeScaling | LinearRopeScaling | None:
    kind = _agreed(
        {f"{rope.where}: {key}": rope.text(key) for key in ("rope_type", "type") if key in rope},
        "default",
    )
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(
            f"{rope.where}: rope_type = {kind!r}: expected 'default', 'linear' or 'llama3'. "
            "Stretched positions of another kind would change every logit"
        )
    if unknown := sorted(set(rope) - _ROPE_KEYS):
        raise ModelError(f"{rope.where} has {unknown}: expected some of {sorted(_ROPE_KEYS)}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise rope.error("partial_rotary_factor", "1: all of a head is rotated")
    match kind:
        case "linear":
            return LinearRopeScaling(factor=rope.number("factor"))
        case "llama3":
            return Llama3RopeScaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=rope.integer("original_max_position_embeddings"),
            )
    return None


def _write_rope(config: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    match config.rope_scaling:
        case LinearRopeScaling(factor=factor):
            rope |= {"rope_type": "linear", "factor": factor}
        case Llama3RopeScaling() as scaling:
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return rope


def _read_gemma(values: TypedValues) -> dict[str, Any]:
    """Windows and positions of its two kinds of layers."""
    every = values.integer("sliding_window_pattern", 6)
    kinds = _layer_kinds(values, (_LOCAL, _GLOBAL)) or [
        _GLOBAL if (layer + 1) % every == 0 else _LOCAL
        for layer in range(values.integer("num_hidden_layers"))
    ]
    window = values.integer("sliding_window") if _LOCAL in kinds else 0
    both = values.inner("rope_parameters")
    if unknown := sorted(set(both) - {_LOCAL, _GLOBAL}):
        raise ModelError(f"{both.where} has {unknown}: expected {_GLOBAL!r} and {_LOCAL!r} only")
    ropes = [both.inner(_GLOBAL), values.inner("rope_scaling")]
    theta, scaling = _rope(values, "rope_theta", ropes, 1e6)
    local = both.inner(_LOCAL)
    local_theta, local_scaling = _rope(values, "rope_local_base_freq", [local], 1e4)
    if local_scaling is not None:
        raise local.error("rope_type", "'default': the decoder stretches no layer with a window")
    return {
        "windows": tuple(window if kind == _LOCAL else 0 for kind in kinds),
        "query_scale": values.integer("query_pre_attn_scalar"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
    }


def _write_gemma(config: TransformerConfig) -> dict[str, Any]:
    rope = _write_rope(config)
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_scale or config.head_dim,
        "sliding_window": max(config.windows),
        "layer_types": [_LOCAL if window else _GLOBAL for window in config.windows],
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {_GLOBAL: rope, _LOCAL: local},
    }


_PLAIN = {
    "use_qk_norm": False,
    "use_qkv_bias": False,
    "activation": "silu",
    "use_post_norms": False,
    "zero_centered_norms": False,
    "scale_embeddings": False,
}
_GEMMA = {
    **_PLAIN,
    "use_qk_norm": True,
    "activation": "gelu",
    "use_post_norms": True,
    "zero_centered_norms": True,
    "scale_embeddings": True,
}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="llama", architecture="LlamaForCausalLM", fields=_PLAIN),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            fields={**_PLAIN, "use_qkv_bias": True},
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            fields={**_PLAIN, "use_qk_norm": True},
        ),
        Family(model_type="gemma3_text", architecture="Gemma3ForCausalLM", fields=_GEMMA),
    )
}
