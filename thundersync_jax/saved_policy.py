"""The policy that a run has saved: which checkpoint is the newest, and its parameters alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from thundersync_jax.config import RunConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.workdir import WorkDirectory

if TYPE_CHECKING:
    from thundersync_jax.model.presets import TransformerConfig
    from thundersync_jax.model.transformer import Params

FRESH = 0  # the step of the weights before the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What the parameters of a run are before its first step.

    Attributes:
      checkpoint: a Hugging Face directory that has them; "" makes all of `seed`.
      seed: of what the checkpoint does not have.
    """

    checkpoint: str = ""
    seed: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Start:
        return cls(checkpoint=config.model.checkpoint, seed=config.run.seed)


def saved_steps(checkpoints: Path) -> list[int]:
    """Of the checkpoints in a directory, which Orbax names by their steps; in order."""
    return sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())


def newest_step(checkpoints: Path) -> int:
    """Of the checkpoints in a directory; FRESH without any."""
    return max(saved_steps(checkpoints), default=FRESH)


def load_policy(
    config: RunConfig, model: TransformerConfig, workdir: WorkDirectory, step: int
) -> tuple[Params, int]:
    """Parameters and policy version after `step` steps, on the first device. Writes nothing.

    Raises:
      ConfigError: there is no such checkpoint.
      CheckpointError: it cannot be read.
    """
    if step == FRESH:
        return initial_policy(model, Start.of(config)), 0
    if step not in (steps := saved_steps(workdir.checkpoints)):
        raise ConfigError(
            f"{workdir.checkpoints} has no checkpoint of step {step}: expected one of "
            f"{[FRESH, *steps]}, {FRESH} for the policy before the first step"
        )
    return read_policy(model, Start.of(config), workdir.checkpoints, step)


def initial_policy(model: TransformerConfig, start: Start) -> Params:
    """The parameters that a run begins with, on the first device: as `initial_params`."""
    import jax  # here and below: the supervisor of `serve` has none

    from thundersync_jax.initial_policy import initial_params
    from thundersync_jax.sharding import MeshShape, make_mesh

    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    return initial_params(model, start, mesh)


def read_policy(
    model: TransformerConfig, start: Start, checkpoints: Path, step: int
) -> tuple[Params, int]:
    """`load_policy` of a checkpoint of a run of this start: it holds what trains, and what is
    frozen is still as it began.
    """
    import jax

    from thundersync_jax.learner.checkpoint import Checkpointer
    from thundersync_jax.model.trainable import fingerprint, join, partition
    from thundersync_jax.model.transformer import abstract_params

    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract_params(model)
    )
    trainable, frozen = partition(model, like)
    if frozen:
        _, frozen = partition(model, initial_policy(model, start))
    checkpointer = Checkpointer(checkpoints, keep_last=1)
    try:
        restored, version = checkpointer.restore_policy(trainable, step, base=fingerprint(frozen))
        return join(restored, frozen), version
    finally:
        checkpointer.close()
