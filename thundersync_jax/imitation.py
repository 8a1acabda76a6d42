"""Supervised steps on an environment's demonstrations, by the distiller: a policy to begin with.

A demonstrated token is one whose teacher is certain of it, so that the distiller's gradient is that
of the log-likelihood. `python -m thundersync_jax.imitate` is the command.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from thundersync_jax.config import RunConfig
from thundersync_jax.config_opd import OpdSection
from thundersync_jax.envs.base import DemonstratedTurn
from thundersync_jax.errors import ConfigError, check
from thundersync_jax.factory import user_code
from thundersync_jax.initial_policy import initial_params, make_model
from thundersync_jax.learner.checkpoint import Checkpointer, RunPosition
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.rollout.chat import Tokenizer
from thundersync_jax.rollout.renderer import WordRenderer
from thundersync_jax.runtime import (
    check_learning,
    load_renderer,
    load_split,
    load_suite,
    make_learner_mesh,
)
from thundersync_jax.saved_policy import Start, newest_step
from thundersync_jax.trajectory import ScoredTurn, TrajectoryBuilder, TrajectoryTokens
from thundersync_jax.workdir import WorkDirectory


def imitate(config: RunConfig, workdir: WorkDirectory) -> None:
    """Trains from the initial parameters to `run.num_steps`, unless a checkpoint is there."""
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
        "A model that chats is trained as it is, by `train`.",
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
    check_learning(config, model, renderer, workdir)
    checkpoints = Checkpointer(workdir.checkpoints, keep_last=config.checkpoint.keep_last)
    try:
        tasks = load_split(config, suite, workdir, config.data.train_split)
        learner = _make_learner(config, model)
        size = config.run.groups_per_step * config.run.group_size
        for step in range(config.run.num_steps):
            for number in range(size):
                draw = step * size + number
                task = tasks[draw % len(tasks)]
                prompt = renderer.prompt_ids(task)
                with user_code(f"demonstration(task, seed) of {config.env.factory}"):
                    demonstration = tuple(demonstrate(task, config.run.seed * 2**32 + draw))
                _add(learner, task.task_id, prompt, _tokens_of(demonstration, tokenizer))
            report = learner.update()
            if (step + 1) % 50 == 0 or step + 1 == config.run.num_steps:
                print(f"step {step + 1}: gradient norm {report.grad_norm:.3g}", flush=True)
        workdir.claim(config, model=model, tokenizer=tokenizer.fingerprint)
        position = RunPosition(num_steps=config.run.num_steps)
        checkpoints.save(learner.state, position, reward=-math.inf)
    finally:
        checkpoints.close()


def _make_learner(config: RunConfig, model: TransformerConfig) -> Distiller:
    """A distiller whose samples have log-probability -1 and whose teacher gives 0: then every token
    has weight log q - log b = 1, and the gradient is that of the log-likelihood.
    """

    mesh = make_learner_mesh(config, model)
    return Distiller(
        dataclasses.replace(config.learner, max_logprob_gap=math.inf),
        OpdSection(stream_turns="never"),
        config.optimizer,
        model,
        initial_params(model, Start.of(config), mesh),
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

    turn = ScoredTurn(tokens=tokens, teacher_logprobs=np.zeros(tokens.num_tokens))
    try:
        group = learner.open_group(task_id, prompt, 1)
        learner.add_turn(group, 0, turn)
    except LearnerError as error:
        raise ConfigError(f"a demonstration cannot be learned: {error}") from error
    learner.add_trajectory(group, 0, tokens)
