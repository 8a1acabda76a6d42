"""What the queries of whole rows may attend to, as the splash kernel takes it, and when it does.

Rows hold segments one after the other. What a query sees of its own row is a range, from the first
token of its segment to itself: one integer. The kernel itself is in `splash.py`.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.sharding import FSDP, constrain

# Queries and keys a step of the kernel works on: multiples of the smaller, at most the larger.
MIN_BLOCK, MAX_BLOCK = 128, 512
# "auto" takes the kernel from here on: the scores of a head are then 4 MB in float32.
MIN_AUTO_LENGTH = 1024
INDEX_BITS = 16  # of an index and of a segment's start, packed in one integer
MAX_LENGTH = 1 << INDEX_BITS


@flax.struct.dataclass
class Visible:
    """What every query may attend to.

    Attributes:
      ranges: int32 [B, T]; first own key << 16 | last own key.
      valid: int32 [B, P + T]; 1 where a key may be attended at all.
    """

    ranges: jax.Array
    valid: jax.Array


def visible(segment_ids: jax.Array, prefix_valid: jax.Array | None) -> Visible:
    """Of segments in ascending order along each row, the positions ascending within each.

    Args:
      segment_ids: int32 [B, T]; 0 is padding, which may lie anywhere.
      prefix_valid: bool [B, P], or None without a prefix.
    """
    length = segment_ids.shape[1]
    if length > MAX_LENGTH:
        raise ModelError(
            f"attention = 'splash' with {length} tokens in a row: expected at most {MAX_LENGTH}"
        )
    index = jnp.arange(length, dtype=jnp.int32)
    reached = jax.lax.cummax(segment_ids, axis=1)  # padding belongs to what precedes it
    is_first = jnp.diff(reached, axis=1, prepend=0) != 0
    first = jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)
    valid = (segment_ids != 0).astype(jnp.int32)
    if prefix_valid is not None:
        valid = jnp.concatenate([prefix_valid.astype(jnp.int32), valid], axis=1)
    # Whole on every device: a scan along a row that is split costs more than the row.
    ranges = constrain(first << INDEX_BITS | index, ("batch", None))
    return Visible(ranges=ranges, valid=constrain(valid, ("batch", None)))


def wants_splash(config: TransformerConfig, length: int) -> bool:
    """Whether rows of `length` tokens take the kernel in the program that is being traced."""
    if config.attention != "auto":
        return config.attention == "splash"
    return (
        platform() == "tpu"
        and not config.windows
        and config.dtype != "float64"
        and MIN_AUTO_LENGTH <= length <= MAX_LENGTH
        and length % (MIN_BLOCK * num_query_shards()) == 0
    )


def platform() -> str:
    """That the traced program is for: the mesh knows, also when it is compiled on another."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def num_query_shards() -> int:
    """Over how many devices of the program's mesh the queries of a row are split."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[FSDP]
