"""The teacher of distillation: the newest checkpoint of another run's work directory.

Shared by the mains. `find_teacher` is cheap and refuses what cannot teach before anything compiles;
`load_weights` reads the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax

from thundersync_jax.config import RunConfig, from_dict
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner.checkpoint import Checkpointer
from thundersync_jax.model.presets import TransformerConfig, preset
from thundersync_jax.model.transformer import Params, abstract_params
from thundersync_jax.rollout.chat import Tokenizer
from thundersync_jax.workdir import WorkDirectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Where a teacher is, and its shapes."""

    workdir: WorkDirectory
    model: TransformerConfig


def find_teacher(config: RunConfig, tokenizer: Tokenizer) -> Teacher | None:
    """The configured teacher; None without one.

    Raises:
      ConfigError: there is no such run, or it speaks another language than the student.
    """
    if not config.opd.teacher:
        return None
    workdir = WorkDirectory(Path(config.opd.teacher))
    try:
        saved = json.loads(workdir.config.read_text(encoding="utf-8"))
        model, fingerprint = from_dict(saved["config"]).model, saved["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"config.opd.teacher = {config.opd.teacher!r}: expected the work directory of a run, "
            f"with a config.json ({type(error).__name__}: {error})"
        ) from error
    if fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"config.opd.teacher = {config.opd.teacher!r} has a tokenizer of fingerprint "
            f"{fingerprint} and the student's is {tokenizer.fingerprint}: their ids mean different "
            "tokens, so its scores would be of other texts. Take a teacher that was trained with "
            "the same environment's vocabulary"
        )
    if not workdir.checkpoints.is_dir():
        raise ConfigError(
            f"config.opd.teacher = {config.opd.teacher!r} has no checkpoints: train it first"
        )
    vocab_size = model.vocab_size or tokenizer.vocab_size
    shapes = preset(model.preset, vocab_size=vocab_size, dtype=model.dtype)
    return Teacher(workdir=workdir, model=shapes)


def load_weights(teacher: Teacher) -> Params:
    """Its newest parameters, on the first device. Raises ConfigError or CheckpointError."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        abstract_params(teacher.model),
    )
    checkpoints = Checkpointer(teacher.workdir.checkpoints, keep_last=1)
    try:
        newest = checkpoints.latest()
        if newest is None:
            raise ConfigError(
                f"config.opd.teacher: {teacher.workdir.checkpoints} holds no checkpoint: train the "
                "teacher first"
            )
        return checkpoints.restore_policy(like, newest)[0]
    finally:
        checkpoints.close()
