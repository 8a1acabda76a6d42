"""The sections of a configuration: frozen records that check their own values.

`config.py` joins them into a `RunConfig` and knows the ConfigDict form. Units are in the names.
Fields made with `mutable` may differ when a work directory is resumed. Never imports jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_sampling import EvaluationSamplingSection
from thundersync_jax.errors import check, check_choice

RESUME_MUTABLE = {"resume_mutable": True}


def mutable(default: Any) -> Any:
    """A field that may change between a run and its resumption."""
    return dataclasses.field(default=default, metadata=RESUME_MUTABLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    """What the run does, at the top level.

    Attributes:
      mode: "stream" computes gradients as their inputs are fixed; "barrier" waits for the step's
        last reward.
      num_steps: train steps in all, counting those before a resume.
      groups_per_step, group_size: tasks a step and trajectories a task.
      max_refilled_groups: so many groups a step may open besides, each in place of one whose
        rewards tied (dynamic sampling); an objective with drop_equal_groups leaves those out. A
        step without a gradient that used them all, and whose groups all tie, ends the run.
      step_timeout_s: a step that is not terminal by then fails its missing trajectories by name.
      watchdog_s: after so long without an event, what the step waits for is logged.
      max_empty_steps: this many steps in a row without a gradient stop the run with the reason.
      profile_steps: "A:B" writes a jax.profiler trace of the steps A to B-1; "" writes none.
    """

    mode: str = "stream"
    seed: int = 0
    num_steps: int = mutable(100)
    groups_per_step: int = 12
    group_size: int = 12
    max_refilled_groups: int = 0
    max_open_groups: int = mutable(1024)
    step_timeout_s: float = mutable(600.0)
    watchdog_s: float = mutable(60.0)
    max_empty_steps: int = mutable(5)
    profile_steps: str = mutable("")
    progress: str = mutable("auto")

    def __post_init__(self) -> None:
        check(self.mode in ("stream", "barrier"), "run.mode", self.mode, "'stream' or 'barrier'")
        is_seed = -(2**63) <= self.seed < 2**63
        check(is_seed, "run.seed", self.seed, "an integer of 64 bits")
        for key in ("num_steps", "groups_per_step", "max_open_groups", "max_empty_steps"):
            check(getattr(self, key) >= 1, f"run.{key}", getattr(self, key), "at least 1")
        refills = self.max_refilled_groups
        check(refills >= 0, "run.max_refilled_groups", refills, "0 (off) or more")
        expected = "at least 2: the advantage of a lone trajectory is always 0"
        check(self.group_size >= 2, "run.group_size", self.group_size, expected)
        for key in ("step_timeout_s", "watchdog_s"):
            check(getattr(self, key) > 0, f"run.{key}", getattr(self, key), "above 0")
        check_choice("run.progress", self.progress, ("auto", "rich", "plain", "none"))
        self.profile_range  # noqa: B018  a malformed range is refused here

    @property
    def profile_range(self) -> range:
        """The steps to profile; empty when `profile_steps` is ""."""
        if not self.profile_steps:
            return range(0)
        first, _, last = self.profile_steps.partition(":")
        is_valid = first.isdigit() and last.isdigit() and int(first) < int(last)
        check(
            is_valid,
            "run.profile_steps",
            self.profile_steps,
            "'A:B' with whole numbers A < B, or ''",
        )
        return range(int(first), int(last))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model: a checkpoint, or a preset of `model/presets.py`, and its arithmetic.

    Attributes:
      checkpoint: a Hugging Face directory (config.json, safetensors, tokenizer.json): shapes,
        tokenizer and first parameters are its own. "" takes the preset and run.seed.
      preset: "" is "tiny" without a checkpoint, and must be "" with one.
      vocab_size: 0 takes the checkpoint's, or as many as the environment's vocabulary has words.
      max_context: tokens of prompt and trajectory together; also the length of a serving row.
      dtype: arithmetic of the forward pass: "float32", "bfloat16" or "float64".
      remat: "none", "block" (keep block inputs only) or "dots" (keep matrix products).
      logprob_chunk: vocabulary entries whose logits exist at one time.
      lora: adapters that train in place of the parameters.
    """

    checkpoint: str = ""
    preset: str = ""
    vocab_size: int = 0
    max_context: int = 64
    dtype: str = "float32"
    remat: str = "none"
    logprob_chunk: int = 16384
    lora: LoraSection = dataclasses.field(default_factory=LoraSection)

    def __post_init__(self) -> None:
        check(self.max_context >= 2, "model.max_context", self.max_context, "at least 2 tokens")
        check_choice("model.dtype", self.dtype, ("float32", "bfloat16", "float64"))
        check_choice("model.remat", self.remat, ("none", "block", "dots"))
        check(self.logprob_chunk >= 1, "model.logprob_chunk", self.logprob_chunk, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW or Adafactor with global-norm clipping and a warm-up, constant or cosine schedule.

    Attributes:
      name: "adamw", or "adafactor": no first moments, and second moments as rows and columns of
        kernels of at least 128 x 128.
      b1, b2, eps: of AdamW alone.
      decay_steps: of a cosine, from the first step on, the warm-up's included. It does not follow
        run.num_steps, which a resume may raise.
    """

    name: str = "adamw"
    learning_rate: float = 5e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.5

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, ("adamw", "adafactor"))
        for key in ("b1", "b2", "eps") if self.name == "adafactor" else ():
            value, default = getattr(self, key), getattr(OptimizerSection, key)
            expected = f"the default {default}, for optimizer.name = 'adafactor' reads none"
            check(value == default, f"optimizer.{key}", value, expected)
        for key in ("learning_rate", "eps"):
            value = getattr(self, key)
            check(0 < value < math.inf, f"optimizer.{key}", value, "a finite number above 0")
        for key in ("b1", "b2"):
            value = getattr(self, key)
            check(0 <= value < 1, f"optimizer.{key}", value, "at least 0 and below 1")
        is_decay = 0 <= self.weight_decay < math.inf
        expected = "a finite number, at least 0"
        check(is_decay, "optimizer.weight_decay", self.weight_decay, expected)
        check_choice("optimizer.schedule", self.schedule, ("constant", "cosine"))
        check(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "a positive number")
        check(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        needs_decay = self.schedule == "cosine" and self.decay_steps <= self.warmup_steps
        expected = "more than optimizer.warmup_steps"
        check(not needs_decay, "optimizer.decay_steps", self.decay_steps, expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Budgets of one trajectory. They are host numbers and never enter a compiled shape."""

    max_turns: int = 10
    max_turn_tokens: int = 32
    max_tokens: int = 1024
    max_observation_tokens: int = 256
    reset_timeout_s: float = mutable(30.0)
    tool_timeout_s: float = mutable(30.0)
    grade_timeout_s: float = mutable(60.0)

    def __post_init__(self) -> None:
        for key in ("max_turns", "max_turn_tokens", "max_tokens", "max_observation_tokens"):
            check(getattr(self, key) >= 1, f"rollout.{key}", getattr(self, key), "at least 1")
        for key in ("reset_timeout_s", "tool_timeout_s", "grade_timeout_s"):
            check(
                getattr(self, key) > 0,
                f"rollout.{key}",
                getattr(self, key),
                "a positive number of seconds",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSection:
    """Which environment: "package.module:function", called once a run with `options` as keyword
    arguments.
    """

    factory: str = "thundersync_jax.envs.file_probe:file_probe"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, function = self.factory.partition(":")
        is_name = bool(module) and bool(function)
        check(is_name, "env.factory", self.factory, "'package.module:function'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxSection:
    """Where tool commands run, and their limits.

    Attributes:
      backend: "auto" takes the first of bubblewrap and restricted whose self-test passes.
      num_slots: sandboxes alive at one time; each has its own numeric uid when run as root.
      start_timeout_s: for a sandbox to start, or to become free when all slots are taken.
      output_bytes: bytes kept of one command's output: the head and the tail.
    """

    backend: str = mutable("auto")
    num_slots: int = mutable(64)
    output_bytes: int = 16384
    max_processes: int = 64
    max_file_bytes: int = 64 * 1024 * 1024
    cpu_s: int = 600
    start_timeout_s: float = mutable(20.0)

    def __post_init__(self) -> None:
        check_choice("sandbox.backend", self.backend, ("auto", "bubblewrap", "restricted"))
        for key, most in (
            ("num_slots", 4096),  # each has a uid and some processes
            ("output_bytes", 2**40),
            ("max_processes", 2**22),
            ("max_file_bytes", 2**62),
            ("cpu_s", 2**31),
        ):
            value = getattr(self, key)
            check(1 <= value <= most, f"sandbox.{key}", value, f"1 to {most}")
        is_time = 0 < self.start_timeout_s < math.inf
        expected = "a positive number of seconds"
        check(is_time, "sandbox.start_timeout_s", self.start_timeout_s, expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection:
    """Tasks, read from a tensorflow-datasets builder in array_record form.

    Attributes:
      builder: "package.module:Builder", or "" for the tasks that the environment brings itself.
      options: keyword arguments of the builder.
      train_split, eval_split: tfds split expressions.
    """

    builder: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train_split: str = "train"
    eval_split: str = "test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Held-out evaluation: every N steps (0: never), the first num_tasks of the held-out split."""

    every_steps: int = mutable(0)
    num_tasks: int = mutable(64)
    sampling: EvaluationSamplingSection = dataclasses.field(
        default_factory=EvaluationSamplingSection, metadata=RESUME_MUTABLE
    )

    def __post_init__(self) -> None:
        check(self.every_steps >= 0, "evaluation.every_steps", self.every_steps, "0 (off) or more")
        check(self.num_tasks >= 1, "evaluation.num_tasks", self.num_tasks, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When to save, and how many to keep: the last `keep_last` and the best by reward."""

    every_steps: int = mutable(20)
    keep_last: int = mutable(2)

    def __post_init__(self) -> None:
        check(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "at least 1")
        check(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "at least 1")
