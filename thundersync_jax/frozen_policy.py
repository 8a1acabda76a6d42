"""Frozen policies, which only score: the teacher of distillation, or an objective's reference.

Shared by the mains. Before anything compiles `find_frozen_policy`, which is cheap, refuses what
cannot score a run's tokens or what nothing would read, and `check_weights` what cannot be read or
is not what a resumed run learned from; `load_weights` makes or reads the parameters. Which
checkpoint of a run it is, is decided once: that run may go on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from thundersync_jax.config import RunConfig, from_dict
from thundersync_jax.config_lora import LoraSection
from thundersync_jax.config_reference import INITIAL
from thundersync_jax.config_sections import ModelSection
from thundersync_jax.errors import ConfigError, check
from thundersync_jax.initial_policy import make_model
from thundersync_jax.learner.checkpoint import CheckpointError
from thundersync_jax.losses.objective import Objective
from thundersync_jax.model.import_hf import is_hugging_face
from thundersync_jax.model.presets import ModelError, TransformerConfig
from thundersync_jax.model.trainable import fingerprint
from thundersync_jax.model.transformer import Params
from thundersync_jax.rollout.chat import Tokenizer, TokenizerError
from thundersync_jax.rollout.tokenizer_files import read_tokenizer_files
from thundersync_jax.saved_policy import FRESH, Start, initial_policy, newest_step, read_policy
from thundersync_jax.trajectory_log import step_path
from thundersync_jax.workdir import WorkDirectory

_OPTIONS = "learner.objective_options.kl_coefficient or distillation_coefficient"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenPolicy:
    """Where a frozen policy is, and its shapes.

    Attributes:
      key: of the configuration that names it.
      source: the run whose checkpoint it is; None: what a run of this start begins with.
      start: of its run.
      step: of the checkpoint, the newest when it was looked for; FRESH without a source.
      identity: fingerprint of its parameters, and the step; None before they are read, and of
        parameters that are made of a seed, which is in the configuration.
    """

    key: str
    model: TransformerConfig
    source: WorkDirectory | None
    start: Start
    step: int = FRESH
    identity: str | None = None


def find_frozen_policy(
    config: RunConfig,
    *,
    objective: Objective,
    model: TransformerConfig,
    tokenizer: Tokenizer,
    workdir: WorkDirectory,
) -> FrozenPolicy | None:
    """The one that scores this run's turns; None where the run needs none.

    Args:
      model: of the policy that the run trains.
      workdir: of this run.

    Raises:
      ConfigError: a policy is missing, is read by nothing, or cannot score.
    """
    _check_roles(config, objective)
    if config.reference.policy == INITIAL:
        _check_start(workdir)
        start = Start.of(config)
        return FrozenPolicy(key="reference.policy", model=model, source=None, start=start)
    name = config.opd.teacher or config.reference.policy
    if not name:
        return None
    key = "opd.teacher" if config.opd.teacher else "reference.policy"
    if is_hugging_face(Path(name)):
        found = _imported(key, name, config.model, tokenizer)
        return FrozenPolicy(key=key, model=found, source=None, start=Start(checkpoint=name))
    source = WorkDirectory(Path(name))
    if source.root.resolve() == workdir.root.resolve():
        raise ConfigError(
            f"config.{key} = {name!r} is this run's own directory, whose newest checkpoint changes "
            f"while it trains: name a copy of it. The policy that a run starts from is the "
            f"reference.policy {INITIAL!r}"
        )
    found, start, step = _model_of(key, source, tokenizer)
    check(
        found.dtype != "float64" or model.dtype == "float64",
        "model.dtype",
        model.dtype,
        f"'float64', in which the policy of {key} = {name!r} computes: 64-bit numbers are on or "
        "off for a whole run",
        "Or name another policy.",
    )
    return FrozenPolicy(key=key, model=found, source=source, start=start, step=step)


def check_weights(policy: FrozenPolicy, workdir: WorkDirectory) -> FrozenPolicy:
    """Reads parameters once and keeps none, for a copy may have broken off; with their identity.

    Args:
      workdir: of the run that learns.

    Raises:
      ConfigError: they cannot be read, or the run has learned from others.
    """
    is_read = policy.start.checkpoint and policy.model.lora is None  # no adapter of the seed
    if policy.source is None and not is_read:
        return policy
    identity = fingerprint(load_weights(policy))
    if policy.source is not None:
        identity += f" of step {policy.step}"
    workdir.check_frozen_policy(policy.key, identity)
    return dataclasses.replace(policy, identity=identity)


def load_weights(policy: FrozenPolicy) -> Params:
    """Its parameters, on the first device. Raises ConfigError when they cannot be read."""
    if policy.source is None:
        return initial_policy(policy.model, policy.start)
    try:
        return read_policy(policy.model, policy.start, policy.source.checkpoints, policy.step)[0]
    except CheckpointError as error:
        raise ConfigError(
            f"config.{policy.key} names a run whose newest checkpoint cannot be read: {error}. Or "
            "name another run, or a copy of one that trains on"
        ) from error


def _check_roles(config: RunConfig, objective: Objective) -> None:
    """One frozen policy a run, and something that reads it."""
    policy, teacher = config.reference.policy, config.opd.teacher
    unread = _changed("learner", config.learner, "objective", "objective_options")
    unread += _changed("reference", config.reference, "policy")
    if teacher and unread:
        raise ConfigError(
            f"config.opd.teacher = {teacher!r} trains on the teacher's scores alone and reads no "
            f"objective: expected the default of {', '.join(unread)}. To learn from rewards and a "
            "teacher, leave opd.teacher empty, name the teacher in reference.policy and set "
            "learner.objective_options.distillation_coefficient"
        )
    if objective.needs_reference and not policy:
        names = ", ".join(term.name for term in objective.terms if term.needs_reference)
        raise ConfigError(
            f"config.reference.policy = '': expected {INITIAL!r} or the work directory of a run, "
            f"for learner.objective = {objective.name!r} has a term that reads a reference policy "
            f"({names}). Or set {_OPTIONS} to 0"
        )
    if not teacher and (unread := _changed("opd", config.opd)):
        raise ConfigError(
            f"config.opd.teacher = '': expected the default of {', '.join(unread)}, which is read "
            "with a teacher alone: name its work directory. A reference.policy scores at "
            "sampling.temperature; its terms have learner.objective_options (terms_normalizer, "
            "distillation_ratio_cap)"
        )
    if policy and not teacher and not objective.needs_reference:
        raise ConfigError(
            f"config.reference.policy = {policy!r}: expected '', for learner.objective = "
            f"{objective.name!r} has no term that reads it. Or set {_OPTIONS}"
        )


def _changed(key: str, section: Any, *names: str) -> list[str]:
    """The keys of a section, of all or of these, that are not as by default."""
    default = type(section)()
    names = names or tuple(field.name for field in dataclasses.fields(section))
    return [f"{key}.{name}" for name in names if getattr(section, name) != getattr(default, name)]


def _check_start(workdir: WorkDirectory) -> None:
    """The run begins at its seed's parameters: it has no checkpoint before its first step."""
    if (
        newest_step(workdir.checkpoints) != FRESH
        and not step_path(workdir.trajectories, 0).exists()
    ):
        raise ConfigError(
            f"config.reference.policy = {INITIAL!r}: {workdir.root} starts from a checkpoint and "
            "not from the parameters of run.seed, which the reference would be. Name a copy of the "
            "directory instead"
        )


def _model_of(
    key: str, source: WorkDirectory, tokenizer: Tokenizer
) -> tuple[TransformerConfig, Start, int]:
    """The shapes of a run's policy, which must speak the language of `tokenizer`, the run's start
    and its newest checkpoint's step.
    """
    name = f"config.{key} = {str(source.root)!r}"
    try:
        saved = json.loads(source.config.read_text(encoding="utf-8"))
        config, their_tokenizer = from_dict(saved["config"]), saved["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{name}: expected the work directory of a run that has saved, with a config.json "
            f"({type(error).__name__}: {error}). Name one, or make one first: "
            "`python -m thundersync_jax.imitate` or `train` with that --workdir"
        ) from error
    _check_tokenizer(name, their_tokenizer, tokenizer)
    step = newest_step(source.checkpoints)
    if step == FRESH:
        raise ConfigError(f"{name} has no checkpoints: train it first")
    try:
        model = make_model(config.model, tokenizer)
        source.check_model(model)
    except (ModelError, ConfigError) as error:
        raise ConfigError(f"{name}, in its config.json: {error}") from error
    return model, Start.of(config), step


def _imported(
    key: str, root: str, section: ModelSection, tokenizer: Tokenizer
) -> TransformerConfig:
    """The shapes of a Hugging Face directory's policy, which computes as the run's does."""
    name = f"config.{key} = {root!r}"
    try:
        _check_tokenizer(name, read_tokenizer_files(Path(root)).tokenizer.fingerprint, tokenizer)
        theirs = dataclasses.replace(
            section, checkpoint=root, preset="", vocab_size=0, lora=LoraSection()
        )
        return make_model(theirs, tokenizer)
    except (ModelError, TokenizerError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_tokenizer(name: str, theirs: str, tokenizer: Tokenizer) -> None:
    if theirs != tokenizer.fingerprint:
        raise ConfigError(
            f"{name} has a tokenizer of fingerprint {theirs} and this run's is "
            f"{tokenizer.fingerprint}: their ids mean different tokens, so its scores would be of "
            "other texts. Take a policy that was trained with the same vocabulary"
        )
