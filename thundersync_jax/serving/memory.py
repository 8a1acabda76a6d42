"""What an engine keeps on its device, in bytes; too much is refused before anything is compiled."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from thundersync_jax.config_serving import ServingSection
from thundersync_jax.errors import check
from thundersync_jax.model import transformer
from thundersync_jax.model.kv_cache import init_cache
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.serving.decode_state import empty_state


def token_bytes(config: TransformerConfig) -> int:
    """Of the keys and values of one token."""
    return _num_bytes(jax.eval_shape(functools.partial(init_cache, config, 1, 1)))


def device_bytes(
    config: TransformerConfig, serving: ServingSection, row_length: int
) -> dict[str, int]:
    """By part. The stored rows take theirs as they come."""
    state = functools.partial(empty_state, config, serving.num_slots, row_length)
    itemsize = jnp.dtype(config.dtype).itemsize
    return {
        "weights": transformer.num_parameters(config) * itemsize,
        "slots": _num_bytes(jax.eval_shape(state)),
        "parked rows": serving.parked_bytes,
    }


def check_memory(
    devices: Sequence[jax.Device],
    config: TransformerConfig,
    serving: ServingSection,
    row_length: int,
) -> None:
    """Raises ConfigError for slots that cannot fit, with the number that would."""
    here = [device for device in devices if device in jax.local_devices()]
    if not here:  # a topology to compile for, or other hosts
        return
    device = here[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        limit *= len(devices)
    elif device.platform == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is None:  # a device that does not say
        return
    parts = device_bytes(config, serving, row_length)
    room = max(0, limit - parts["weights"] - parts["parked rows"])
    check(
        sum(parts.values()) <= limit,
        "serving.num_slots",
        serving.num_slots,
        f"at most {room * serving.num_slots // parts['slots']} slots of model.max_context = "
        f"{row_length} tokens in {limit:,} bytes",
        f"Kept there: {', '.join(f'{name} {size:,}' for name, size in parts.items())}. Take fewer "
        "slots, or less for serving.parked_bytes.",
    )


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
