"""`TransformerConfig`: every number that shapes the model, and presets with the published values.

Invariants: a `TransformerConfig` that exists is consistent (checked when it is made), hashable, and
the only static argument of every model program. Published presets have the shapes of their Hugging
Face `config.json`.
"""

from __future__ import annotations

import dataclasses
import difflib

from thundersync_jax.errors import UserError

DTYPES = ("float32", "bfloat16", "float64")
REMATS = ("none", "block", "dots")
ACTIVATIONS = ("silu", "gelu")
ATTENTIONS = ("auto", "xla", "splash")


class ModelError(UserError, ValueError):
    """A model configuration or call that cannot work: the value, what was expected, what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama-3.1 stretching of the rotary wavelengths beyond the context of pre-training.

    Wavelengths above original_max_position / low_freq_factor are stretched by `factor`, those below
    original_max_position / high_freq_factor are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ModelError(f"{self} needs factor >= 1 and 0 < low_freq_factor < high_freq_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Every rotary wavelength is stretched by `factor` (Gemma 3)."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ModelError(f"{self} needs factor >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of the projections named `targets`; see `lora.py`, which checks the names."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP: Llama,
    Qwen2.5, Qwen3, Gemma 3.

    Attributes:
      use_qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
      use_qkv_bias: queries, keys and values have a bias (Qwen2.5).
      activation: of the gate: "silu" or "gelu" (its tanh form).
      use_post_norms: what a block adds is normed too (Gemma 3).
      zero_centered_norms: norms multiply by 1 + scale (Gemma 3).
      scale_embeddings: embeddings are multiplied by sqrt(embed_dim) (Gemma 3).
      query_scale: attention scores are divided by its root; 0 is head_dim.
      windows: of every layer, how many of the last tokens a query sees, itself included; 0 is all
        of them. () is 0 everywhere.
      local_rope_theta: of the layers with a window, whose positions are not stretched.
      tie_embeddings: the output kernel is the transposed embedding.
      dtype: arithmetic; norms, softmax and logits are at least float32.
      param_dtype: storage of the parameters that `init_params` makes; of adapters at least float32.
      remat: what the backward pass keeps: "none" everything, "block" the block inputs, "dots" also
        the projections.
      attention: of whole trajectories: "xla" holds the scores of all queries and keys, "splash"
        runs the TPU kernel that does not (interpreted, slowly, elsewhere), "auto" takes the kernel
        on TPUs for long rows.
      lora: the adapters that train while all else is frozen; None trains everything.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None = None
    rms_norm_eps: float = 1e-6
    use_qk_norm: bool = False
    use_qkv_bias: bool = False
    activation: str = "silu"
    use_post_norms: bool = False
    zero_centered_norms: bool = False
    scale_embeddings: bool = False
    query_scale: int = 0
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 1e4
    tie_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    lora: Lora | None = None

    def forward_flops(self, num_positions: int, num_before: int = 0) -> int:
        """Floating-point operations of the blocks' matrix products over so many positions after
        others; the output head is left out.
        """
        width = self.num_heads * self.head_dim
        kernels = self.embed_dim * (2 * width + 2 * self.num_kv_heads * self.head_dim)
        kernels += 3 * self.embed_dim * self.mlp_dim
        pairs = num_positions * num_before + num_positions * (num_positions + 1) // 2
        return self.num_layers * (2 * kernels * num_positions + 4 * width * pairs)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "embed_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_dim",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads = {self.num_heads}, num_kv_heads = {self.num_kv_heads}: every kv "
                "head serves the same number of query heads, so expected a multiple"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"head_dim = {self.head_dim}: rotary positions pair dimensions, so it must be even"
            )
        if not (self.rope_theta > 0 and self.rms_norm_eps > 0):
            raise ModelError(
                f"rope_theta = {self.rope_theta}, rms_norm_eps = {self.rms_norm_eps}: "
                "expected positive numbers"
            )
        for name, allowed in (
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
            ("remat", REMATS),
            ("attention", ATTENTIONS),
            ("activation", ACTIVATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ModelError(f"{name} = {getattr(self, name)!r}: expected one of {allowed}")
        if self.attention == "splash" and self.dtype == "float64":
            raise ModelError("attention = 'splash' computes in float32: expected 'xla' for float64")
        if len(self.windows) not in (0, self.num_layers) or min(self.windows, default=0) < 0:
            raise ModelError(
                f"windows = {self.windows}: expected a number from 0 on of each of the "
                f"{self.num_layers} layers, or ()"
            )
        if self.windows and self.attention == "splash":
            raise ModelError("attention = 'splash' has no windows: expected 'xla' or 'auto'")

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


def _qwen3(
    embed_dim: int, num_layers: int, num_heads: int, mlp_dim: int, *, tie_embeddings: bool
) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=151_936,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        rope_theta=1e6,
        use_qk_norm=True,
        tie_embeddings=tie_embeddings,
    )


# The vocabulary of "micro" and "tiny" is their environment's: 1 stands for "open", `preset` never
# returns it.
_OPEN_VOCABULARY = 1

_PRESETS = {
    "micro": TransformerConfig(
        vocab_size=_OPEN_VOCABULARY,
        embed_dim=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=12,
        mlp_dim=128,
        rope_theta=1e4,
    ),
    "tiny": TransformerConfig(
        vocab_size=_OPEN_VOCABULARY,
        embed_dim=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=24,
        mlp_dim=256,
        rope_theta=1e4,
    ),
    "qwen3_0p6b": _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    "qwen3_1p7b": _qwen3(2048, 28, 16, 6144, tie_embeddings=True),
    "qwen3_4b": _qwen3(2560, 36, 32, 9728, tie_embeddings=True),
    "qwen3_8b": _qwen3(4096, 36, 32, 12_288, tie_embeddings=False),
    "qwen3_14b": _qwen3(5120, 40, 40, 17_408, tie_embeddings=False),
    "qwen3_32b": _qwen3(5120, 64, 64, 25_600, tie_embeddings=False),
    "llama3_8b": TransformerConfig(
        vocab_size=128_256,
        embed_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14_336,
        rope_theta=5e5,
        rope_scaling=Llama3RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        ),
        rms_norm_eps=1e-5,
    ),
    "smollm2_135m": TransformerConfig(
        vocab_size=49_152,
        embed_dim=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_dim=1536,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
    ),
}

PRESETS = tuple(_PRESETS)


def preset(
    name: str, *, vocab_size: int = 0, dtype: str = "float32", remat: str = "none"
) -> TransformerConfig:
    """The named configuration.

    Args:
      vocab_size: 0 keeps the preset's; "micro" and "tiny" have none of their own.
      dtype: arithmetic; "float64" stores the parameters in float64 too, the others in float32.
    """
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ModelError(
            f"{name!r} is not a preset. Did you mean {near!r}? There are: {', '.join(PRESETS)}"
        )
    base = _PRESETS[name]
    if vocab_size == 0 and base.vocab_size == _OPEN_VOCABULARY:
        raise ModelError(
            f"preset {name!r} leaves the vocabulary open: give the environment's vocab_size"
        )
    return dataclasses.replace(
        base,
        vocab_size=vocab_size or base.vocab_size,
        dtype=dtype,
        param_dtype=param_dtype_of(dtype),
        remat=remat,
    )


def param_dtype_of(dtype: str) -> str:
    """How parameters are stored where `dtype` computes."""
    return "float64" if dtype == "float64" else "float32"
