"""Checkpoints through Orbax: train state and the host numbers that go with it, the last few and the
best.

Saves are synchronous: the arrays are donated to the next update, and a save that fails must stop
the run here, not be noticed later. Orbax writes to a temporary directory and renames, so a killed
save leaves no checkpoint at all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from thundersync_jax.errors import UserError
from thundersync_jax.learner.grids import SumStart
from thundersync_jax.learner.streaming import Params
from thundersync_jax.learner.train_state import TrainState


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be read or written: which, why, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Host numbers of a checkpoint, besides the train state.

    Attributes:
      num_steps: train steps that are complete, empty ones included.
      task_position: tasks consumed from the training split.
      num_empty_steps: empty steps in a row up to here.
    """

    num_steps: int = 0
    task_position: int = 0
    num_empty_steps: int = 0


class Checkpointer:
    """Owns one directory of checkpoints, named by the number of complete steps."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self._directory = directory.absolute()

        def reward_of(metrics: dict[str, float]) -> float:
            return metrics["reward"]

        policy = preservation_policy.AnyPreservationPolicy(
            [
                preservation_policy.LatestN(keep_last),
                preservation_policy.BestN(get_metric_fn=reward_of, n=1),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            enable_async_checkpointing=False,
            best_fn=reward_of,  # stores the metrics, so that a resumed run knows the best
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest(self) -> int | None:
        """Number of steps of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, position: RunPosition, *, reward: float) -> None:
        """Saves after `position.num_steps` steps; `reward` ranks it for the best one kept."""
        meta = dataclasses.asdict(position) | {
            "policy_version": state.policy_version,
            "sums": dataclasses.asdict(state.sums),
            "base": state.base,
        }
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({"params": state.params, "opt_state": state.opt_state}),
            meta=ocp.args.JsonSave(meta),
        )
        if not self._manager.save(position.num_steps, args=args, metrics={"reward": reward}):
            raise CheckpointError(
                f"the checkpoint of step {position.num_steps} in {self._directory} was not "
                "written: "
                f"checkpoints {self.steps()} exist already"
            )

    def restore(self, like: TrainState, num_steps: int) -> tuple[TrainState, RunPosition]:
        """Reads the checkpoint of `num_steps` into the shapes and shardings of `like`.

        Raises:
          CheckpointError: it is damaged or belongs to another model; nothing was changed.
        """
        target = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, {"params": like.params, "opt_state": like.opt_state}
        )
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
        )
        try:
            restored = self._manager.restore(num_steps, args=args)
            meta: dict[str, Any] = dict(restored.meta)
            base = meta.pop("base")
            state = TrainState(
                params=restored.state["params"],
                opt_state=restored.state["opt_state"],
                policy_version=meta.pop("policy_version"),
                sums=SumStart(**meta.pop("sums")),
                base=like.base,
            )
            position = RunPosition(**meta)
        except Exception as error:  # Orbax and its storage raise many types for bad files
            raise self._unreadable(num_steps, error) from error
        self._check_base(num_steps, base, like.base)
        return state, position

    def restore_policy(self, like: Params, num_steps: int, *, base: str = "") -> tuple[Params, int]:
        """Reads the parameters alone, into the shapes and shardings of `like`, and their version.

        Args:
          like: of those that train.
          base: fingerprint of the frozen ones.

        Raises:
          CheckpointError: as `restore`.
        """
        target = {"params": like}
        args = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,  # not the optimizer's moments
            ),
            meta=ocp.args.JsonRestore(),
        )
        try:
            restored = self._manager.restore(num_steps, args=args)
            params, meta = restored.state["params"], restored.meta
            version, saved = meta["policy_version"], meta["base"]
        except Exception as error:  # as in `restore`
            raise self._unreadable(num_steps, error) from error
        self._check_base(num_steps, saved, base)
        return params, version

    def _check_base(self, num_steps: int, saved: str, present: str) -> None:
        """Adapters belong to the parameters that were frozen beside them."""
        if saved != present:
            raise CheckpointError(
                f"the adapters of step {num_steps} in {self._directory / str(num_steps)} belong to "
                f"frozen parameters of fingerprint {saved or 'none'}, and these are "
                f"{present or 'none'}. Give the base that the run began with"
            )

    def _unreadable(self, num_steps: int, error: Exception) -> CheckpointError:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        others = [step for step in self.steps() if step != num_steps]
        remedy = (
            f"Other checkpoints: {others}. Move that directory away to go on from the newest of "
            "them"
            if others
            else "There is no other: restore it from a copy"
        )
        return CheckpointError(
            f"the checkpoint of step {num_steps} in {self._directory / str(num_steps)} cannot be "
            f"read ({cause}). {remedy}, or use an empty work directory to begin again"
        )

    def close(self) -> None:
        self._manager.close()
