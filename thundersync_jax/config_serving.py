"""The decode loop's part of a configuration, and how it shares devices. Never imports jax."""

from __future__ import annotations

import dataclasses

from thundersync_jax.config_sections import mutable
from thundersync_jax.errors import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSection:
    """The co-located decode loop.

    Attributes:
      num_slots: rows of the decode batch; live trajectories above it share them turn by turn.
      steps_per_sync: decode steps between two looks of the host, at most. While turns wait for a
        slot the host looks earlier, as soon as some rows have ended.
      extend_rows: rows that one prefill or extension call handles.
      extend_buckets: padded token counts of such a call; longer pieces are cut into several calls.
      extend_calls: such calls between two looks while a row generates, at most: what a long context
        may delay the others by.
      parked_bytes: device memory for keys and values of trajectories that hold no slot, and of the
        groups' prompts.
      host_bytes: host memory for those that no longer fit there, used least recently. What fits
        neither is dropped and prefilled again when its turn comes.
      request_timeout_s: a turn that is not sampled by then fails its trajectory.
      publish_timeout_s: new weights that open sessions keep out for so long are refused.
    """

    num_slots: int = mutable(64)
    steps_per_sync: int = mutable(4)
    extend_rows: int = mutable(16)
    extend_buckets: tuple[int, ...] = mutable((4, 16, 64))
    extend_calls: int = mutable(2)
    parked_bytes: int = mutable(256 * 1024 * 1024)
    host_bytes: int = mutable(1024 * 1024 * 1024)
    request_timeout_s: float = mutable(120.0)
    publish_timeout_s: float = mutable(120.0)

    def __post_init__(self) -> None:
        for key in ("num_slots", "steps_per_sync", "extend_rows", "extend_calls"):
            check(getattr(self, key) >= 1, f"serving.{key}", getattr(self, key), "at least 1")
        for key in ("parked_bytes", "host_bytes"):
            expected = "a number of bytes; 0 keeps no row there"
            check(getattr(self, key) >= 0, f"serving.{key}", getattr(self, key), expected)
        is_ladder = bool(self.extend_buckets) and list(self.extend_buckets) == sorted(
            set(self.extend_buckets)
        )
        check(
            is_ladder and self.extend_buckets[0] >= 1,
            "serving.extend_buckets",
            self.extend_buckets,
            "ascending lengths",
        )
        for key in ("request_timeout_s", "publish_timeout_s"):
            expected = "a positive number of seconds"
            check(getattr(self, key) > 0, f"serving.{key}", getattr(self, key), expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColocatedSection:
    """Learner and engine on the same devices.

    Attributes:
      max_decode_stall_s: while rows decode, a learner's call that is expected to take longer waits
        until none does.
    """

    max_decode_stall_s: float = mutable(1.0)

    def __post_init__(self) -> None:
        check(
            self.max_decode_stall_s >= 0,
            "colocated.max_decode_stall_s",
            self.max_decode_stall_s,
            "0 or more seconds",
        )
