"""python -m thundersync_jax.imitate --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]

Trains a policy on its environment's demonstrations, `run.num_steps` supervised steps of
`run.groups_per_step` x `run.group_size` of them, and saves it in DIR as a run that can teach
(`opd.teacher`), be trained further, or be served. No rollouts, no sandboxes. The configuration is
that of the run that goes on from there: what `train` refuses is refused here. A finished DIR is
left as it is. Exit status: 0 when it is done, 130 when interrupted, 2 for bad input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import app, flags

from thundersync_jax.command_line import define_config_flag, load_config, run_main
from thundersync_jax.config import RunConfig, resolve
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.envs.base import DemonstratedTurn
from thundersync_jax.errors import ConfigError, check
from thundersync_jax.saved_policy import newest_step
from thundersync_jax.trajectory import ScoredTurn, TrajectoryBuilder, TrajectoryTokens
from thundersync_jax.workdir import WorkDirectory

if TYPE_CHECKING:
    from thundersync_jax.learner.distiller import Distiller
    from thundersync_jax.model.presets import TransformerConfig
    from thundersync_jax.rollout.chat import Tokenizer

_CONFIG = define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the new run.")


def main(argv: Sequence[str]) -> int:
    """Trains and saves; returns the exit status."""
    if len(argv) > 1 or not _CONFIG.present or _WORKDIR.value is None:
        raise app.UsageError("give --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]")
    config = resolve(load_config(_CONFIG))

    # Imported late: a mistake in the configuration is reported without waiting for jax.
    from thundersync_jax.learner.compilation import configure

    workdir = WorkDirectory(Path(_WORKDIR.value))
    workdir.open(config)
    try:
        configure(workdir.compile_cache, is_float64=config.model.dtype == "float64")
        imitate(config, workdir)
    finally:
        workdir.close()
    return 0


def imitate(config: RunConfig, workdir: WorkDirectory) -> None:
    """Trains from the initial parameters to `run.num_steps`, unless a checkpoint is there."""
    from thundersync_jax.initial_policy import make_model
    from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
    from thundersync_jax.rollout.renderer import WordRenderer
    from thundersync_jax.runtime import check_learning, load_renderer, load_split, load_suite

    suite = load_suite(config.env)
    demonstrate = getattr(suite, "demonstration", None)
    if demonstrate is None:
        raise ConfigError(
            f"{config.env.factory} has no demonstrations: its suite needs a method "
            "demonstration(task, seed), see envs/file_probe.py"
        )
    renderer = load_renderer(config, suite)
    check(
        isinstance(renderer, WordRenderer),
        "chat.tokenizer" if config.chat.tokenizer else "model.checkpoint",
        config.tokenizer_directory,
        "'' or a vocabulary of words: demonstrations are in those of the environment",
    )
    tokenizer = renderer.tokenizer
    model = make_model(config.model, tokenizer)
    if newest := newest_step(workdir.checkpoints):
        check(
            newest >= config.run.num_steps,
            "run.num_steps",
            config.run.num_steps,
            f"at most {newest}, the step of the checkpoint in {workdir.root}: imitation does not "
            "go on from one",
            "Use a new --workdir.",
        )
        print(f"{workdir.root} holds a checkpoint of step {newest} already: nothing to do")
        return
    check_learning(config, model, tokenizer, workdir)
    checkpoints = Checkpointer(workdir.checkpoints, keep_last=config.checkpoint.keep_last)
    try:
        tasks = load_split(config, suite, workdir, config.data.train_split)
        learner = _make_learner(config, model)
        size = config.run.groups_per_step * config.run.group_size
        for step in range(config.run.num_steps):
            for number in range(size):
                draw = step * size + number
                task = tasks[draw % len(tasks)]
                prompt = tokenizer.encode(suite.prompt(task))
                demonstration = demonstrate(task, config.run.seed * 2**32 + draw)
                _add(learner, task.task_id, prompt, _tokens_of(demonstration, tokenizer))
            report = learner.update()
            if (step + 1) % 50 == 0 or step + 1 == config.run.num_steps:
                print(f"step {step + 1}: gradient norm {report.grad_norm:.3g}", flush=True)
        workdir.claim(config, tokenizer=tokenizer.fingerprint)
        position = RunPosition(num_steps=config.run.num_steps)
        checkpoints.save(learner.state, position, reward=-math.inf)
    finally:
        checkpoints.close()


def _make_learner(config: RunConfig, model: TransformerConfig) -> Distiller:
    """A distiller whose samples have log-probability -1 and whose teacher gives 0: then every token
    has weight log q - log b = 1, and the gradient is that of the log-likelihood.
    """
    from thundersync_jax.initial_policy import initial_params
    from thundersync_jax.learner.distiller import Distiller
    from thundersync_jax.runtime import make_learner_mesh

    mesh = make_learner_mesh(config, model)
    return Distiller(
        dataclasses.replace(config.learner, max_logprob_gap=math.inf),
        OpdSection(stream_turns="never"),
        config.optimizer,
        model,
        initial_params(model, config.model.checkpoint, config.run.seed, mesh),
        mesh=mesh,
        logprob_chunk=config.model.logprob_chunk,
    )


def _tokens_of(demonstration: Sequence[DemonstratedTurn], tokenizer: Tokenizer) -> TrajectoryTokens:
    """One demonstration as one trajectory; what is not to be learned is read only."""
    builder = TrajectoryBuilder()
    for turn in demonstration:
        builder.append_observation(tokenizer.encode(turn.observation))
        ids = tokenizer.encode(turn.action)
        if turn.is_taught:
            builder.append_action(ids, [-1.0] * len(ids), [0] * len(ids))
        else:
            builder.append_observation(ids)
    return builder.build()


def _add(learner: Distiller, task_id: str, prompt: Sequence[int], tokens: TrajectoryTokens) -> None:
    """Gives the learner a demonstration. Raises ConfigError where it does not fit."""
    from thundersync_jax.learner.groups import LearnerError

    turn = ScoredTurn(tokens=tokens, teacher_logprobs=np.zeros(tokens.num_tokens))
    try:
        group = learner.open_group(task_id, prompt, 1)
        learner.add_turn(group, 0, turn)
    except LearnerError as error:
        raise ConfigError(f"a demonstration cannot be learned: {error}") from error
    learner.add_trajectory(group, 0, tokens)


if __name__ == "__main__":
    run_main(
        main, "interrupted: nothing is saved before the last step; the same command begins again"
    )
