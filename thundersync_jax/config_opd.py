"""On-policy distillation's part of a configuration. Never imports jax."""

from __future__ import annotations

import dataclasses
import math

from thundersync_jax.config_sampling import MIN_SAMPLING
from thundersync_jax.config_sections import mutable
from thundersync_jax.errors import check, check_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpdSection:
    """The teacher, and how its scores are trained on.

    Attributes:
      teacher: a Hugging Face directory, or the work directory of the run whose newest checkpoint
        teaches; "" is no distillation.
      temperature: of the teacher's distribution.
      stream_turns: a scored turn of a growing trajectory is differentiated "always", only when the
        learner would "idle", or "never": then its trajectory is differentiated once, at its end.
      num_caches: trajectories of every replica whose turns may stream at one time; each keeps keys
        and values in the model's dtype and their adjoints in at least float32.
      cache_memory: "device", or "pinned_host": there lie all caches but as many as a call reaches.
      num_residuals: segments of every shape (a prefix bucket, or none, and a bucket) of which a
        replica keeps what their backward pass reads, so that their replay needs no forward pass:
        the outputs of projections, or what model.remat keeps if that is less; the others are
        replayed with one. A replica must be one device, and there must be caches to stream with.
      prefix_buckets: padded lengths of what a turn attends to, ascending; by default the longest of
        learner.buckets alone.
      normalizer: "token_mean" divides by the action tokens that were scored, "sum" by 1.
      ratio_cap: C of the truncated importance weight min(p / b, C) of learner against sampler; 0
        leaves it out.
    """

    teacher: str = ""
    temperature: float = mutable(1.0)
    stream_turns: str = mutable("idle")
    num_caches: int = mutable(8)
    cache_memory: str = mutable("device")
    num_residuals: int = mutable(0)
    prefix_buckets: tuple[int, ...] = mutable(())
    normalizer: str = "token_mean"
    ratio_cap: float = 0.0

    def __post_init__(self) -> None:
        is_temperature = MIN_SAMPLING <= self.temperature <= 1 / MIN_SAMPLING
        limits = f"a number from {MIN_SAMPLING:g} to {1 / MIN_SAMPLING:g}"
        check(is_temperature, "opd.temperature", self.temperature, limits)
        check_choice("opd.stream_turns", self.stream_turns, ("idle", "always", "never"))
        check_choice("opd.cache_memory", self.cache_memory, ("device", "pinned_host"))
        for key in ("num_caches", "num_residuals"):
            check(getattr(self, key) >= 0, f"opd.{key}", getattr(self, key), "0 or more")
        check(
            self.has_caches or self.num_residuals == 0,
            "opd.num_residuals",
            self.num_residuals,
            "0 with opd.stream_turns = 'never' or opd.num_caches = 0: no turn streams, and no "
            "segment is replayed",
        )
        is_ladder = list(self.prefix_buckets) == sorted(set(self.prefix_buckets))
        expected = "ascending lengths of at least 1"
        is_ladder = is_ladder and min(self.prefix_buckets, default=1) >= 1
        check(is_ladder, "opd.prefix_buckets", self.prefix_buckets, expected)
        check_choice("opd.normalizer", self.normalizer, ("token_mean", "sum"))
        is_cap = math.isfinite(self.ratio_cap) and self.ratio_cap >= 0
        check(is_cap, "opd.ratio_cap", self.ratio_cap, "a finite number, at least 0")

    @property
    def has_caches(self) -> bool:
        """Whether turns can stream."""
        return self.stream_turns != "never" and self.num_caches > 0
