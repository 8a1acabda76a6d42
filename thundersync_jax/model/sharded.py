"""Whether a model fits a mesh: every sharded size divides by the devices along its axis."""

from __future__ import annotations

from collections.abc import Sequence

from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.sharding import FSDP, TABLE, TENSOR, MeshError, MeshShape


def check_divisible(
    shape: MeshShape, model: TransformerConfig, buckets: Sequence[int] = ()
) -> None:
    """Raises MeshError naming everything that does not divide, with the nearest mesh size.

    Args:
      buckets: padded lengths, whose tokens are sharded over fsdp.
    """
    sizes = {
        "embed": model.embed_dim,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "mlp": model.mlp_dim,
        "vocab": model.vocab_size,
    }
    devices = {FSDP: shape.fsdp, TENSOR: shape.tensor}
    wrong = [
        _complaint(f"{axis} = {size}", size, name, devices[name])
        for axis, size in sizes.items()
        if (name := TABLE[axis]) is not None and size % devices[name]
    ]
    wrong += [
        _complaint(f"bucket {bucket}", bucket, FSDP, shape.fsdp)
        for bucket in buckets
        if bucket % shape.fsdp
    ]
    if wrong:
        raise MeshError("the model does not divide over the mesh: " + "; ".join(wrong))


def _complaint(what: str, size: int, axis: str, devices: int) -> str:
    nearest = max(d for d in range(1, devices + 1) if size % d == 0)
    return f"{what} over {axis} = {devices} (the nearest that divides is {nearest})"
