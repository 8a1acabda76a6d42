"""One whole experiment: a frozen `RunConfig` inside, an ml_collections ConfigDict at the edge.

`configs/*.py` start from `default_config()` and change what differs; on the command line
`--config.learner.pool_size=4` changes a single key, and `--config.env.options.KEY=VALUE` adds one
where options are free. `resolve` turns the ConfigDict into a
`RunConfig`: unknown keys are refused with the nearest name, values with the range they must lie in.
Never imports jax.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from thundersync_jax.config_chat import ChatSection
from thundersync_jax.config_learner import LearnerSection
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.config_reference import ReferenceSection
from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import (
    CheckpointSection,
    DataSection,
    EnvSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    SandboxSection,
)
from thundersync_jax.config_serving import ColocatedSection, ServingSection
from thundersync_jax.errors import ConfigError, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One whole experiment."""

    run: RunSection = dataclasses.field(default_factory=RunSection)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    learner: LearnerSection = dataclasses.field(default_factory=LearnerSection)
    opd: OpdSection = dataclasses.field(default_factory=OpdSection)
    reference: ReferenceSection = dataclasses.field(default_factory=ReferenceSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    sampling: SamplingSection = dataclasses.field(default_factory=SamplingSection)
    serving: ServingSection = dataclasses.field(default_factory=ServingSection)
    colocated: ColocatedSection = dataclasses.field(default_factory=ColocatedSection)
    rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
    chat: ChatSection = dataclasses.field(default_factory=ChatSection)
    env: EnvSection = dataclasses.field(default_factory=EnvSection)
    sandbox: SandboxSection = dataclasses.field(default_factory=SandboxSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)

    @property
    def tokenizer_directory(self) -> str:
        """Where the policy's tokenizer is; "" for the words of the environment's vocabulary."""
        return self.chat.tokenizer or self.model.checkpoint

    def __post_init__(self) -> None:
        """Checks that need more than one section."""
        self._check_chat()
        check(
            self.learner.buckets[-1] >= self.model.max_context,
            "learner.buckets",
            self.learner.buckets,
            f"a last bucket of at least model.max_context = {self.model.max_context} tokens",
            "Add a longer bucket or shorten the context.",
        )
        check(
            self.learner.reduction == "ordered" or self.model.dtype != "float64",
            "learner.reduction",
            self.learner.reduction,
            "'ordered' with model.dtype = 'float64': exact sums are of float32 gradients",
            "Or set model.dtype = 'float32' or 'bfloat16'.",
        )
        check(
            not self.opd.teacher or self.learner.reduction == "ordered",
            "learner.reduction",
            self.learner.reduction,
            "'ordered' with opd.teacher: a turn's bits depend on whether it was streamed",
        )
        check(
            not self.opd.teacher or self.learner.stream_turns == "never",
            "learner.stream_turns",
            self.learner.stream_turns,
            "'never' with opd.teacher, whose turns opd.stream_turns decides about",
        )
        check(
            not self.opd.teacher or self.run.max_refilled_groups == 0,
            "run.max_refilled_groups",
            self.run.max_refilled_groups,
            "0 with opd.teacher: no reward counts, so no group is lost when its rewards tie",
        )
        least, most = self.model.max_context - 1, self.learner.buckets[-1]
        check(
            least <= max(self.opd.prefix_buckets, default=most) <= most,
            "opd.prefix_buckets",
            self.opd.prefix_buckets,
            f"a last length from {least}, all of model.max_context but one token, to {most}, the "
            "longest of learner.buckets",
            "() takes that one.",
        )
        is_untruncated = (
            self.sampling.top_k == 0
            and self.sampling.top_p == 1.0
            and self.sampling.temperature > 0
        )
        check(
            is_untruncated,
            "sampling",
            dataclasses.asdict(self.sampling),
            "temperature > 0, top_k = 0 and top_p = 1: the gradient is that of the untruncated "
            "policy",
            "Truncated or greedy sampling belongs in evaluation.sampling.",
        )

    def _check_chat(self) -> None:
        for field in dataclasses.fields(ChatSection) if not self.tokenizer_directory else ():
            value, default = getattr(self.chat, field.name), getattr(ChatSection(), field.name)
            expected = f"the default {default!r} without a tokenizer that chats"
            remedy = "Set chat.tokenizer, or model.checkpoint."
            check(value == default, f"chat.{field.name}", value, expected, remedy)


def default_config() -> ConfigDict:
    """The defaults as a ConfigDict for `configs/*.py` and ml_collections.config_flags to change."""
    return _to_config_dict(RunConfig())


def resolve(config: ConfigDict) -> RunConfig:
    """Checks an edited ConfigDict and freezes it; raises ConfigError."""
    return _build(RunConfig, config.to_dict(), "")


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The configuration of a config.json; raises ConfigError."""
    return _build(RunConfig, values, "")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain JSON values of a resolved configuration."""
    return _plain(config)


def resume_differences(saved: Mapping[str, Any], current: RunConfig) -> list[str]:
    """Lines "key: saved -> current" for every key that may not differ when a work directory is
    resumed.
    """
    fixed = _fixed_keys(RunConfig, _plain(current), "")
    before = _fixed_keys(RunConfig, saved, "")
    keys = sorted(fixed.keys() | before.keys())
    missing = "(absent)"
    return [
        f"{key}: {before.get(key, missing)!r} -> {fixed.get(key, missing)!r}"
        for key in keys
        if before.get(key, missing) != fixed.get(key, missing)
    ]


def _to_config_dict(section: Any) -> ConfigDict:
    """Locked, but for mappings of options, whose keys a user's function knows."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = _to_config_dict(value)
        else:
            values[field.name] = dict(value) if isinstance(value, Mapping) else value
    made = ConfigDict(values).lock()
    for field in dataclasses.fields(section):
        if isinstance(getattr(section, field.name), Mapping):
            made[field.name].unlock()
    return made


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"config.{prefix}{key} is not a key. Did you mean config.{prefix}{near[0]}?"
            )
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            kwargs[key] = _build(typing.cast(type, hint), value, f"{prefix}{key}.")
        else:
            kwargs[key] = _coerce(value, hint, f"{prefix}{key}")
    return cls(**kwargs)


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """The value in the field's type, where nothing is lost; ConfigError otherwise."""
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        is_tuple = isinstance(value, (list, tuple)) and all(type(v) is kind for v in value)
        check(is_tuple, key, value, f"a tuple of {kind.__name__}")
        return tuple(_coerce(v, typing.get_args(hint)[0], key) for v in value)
    if isinstance(hint, types.GenericAlias) or typing.get_origin(hint) is not None:
        check(isinstance(value, Mapping), key, value, "a mapping")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    check(type(value) is hint, key, value, f"a value of type {hint.__name__}")
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _fixed_keys(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Flat key -> value of the keys that a resume must not change."""
    hints = typing.get_type_hints(cls)
    mutable_keys = {f.name for f in dataclasses.fields(cls) if f.metadata.get("resume_mutable")}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in mutable_keys:
            continue
        if dataclasses.is_dataclass(hints.get(key)) and isinstance(value, Mapping):
            flat |= _fixed_keys(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
