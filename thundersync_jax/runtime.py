"""Puts a run together: configuration in, connected parts out. Shared by the mains.

Cheap checks come first, so that a mistake in a configuration is reported before anything is
compiled or started. Nothing is started here but the sandbox back-ends' self-tests: `Trainer` starts
and closes the parts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from thundersync_jax.config import RunConfig
from thundersync_jax.config_sampling import SamplingSection
from thundersync_jax.config_sections import EnvSection
from thundersync_jax.envs.base import Attempt, EnvironmentSuite
from thundersync_jax.errors import ConfigError, UserError, check
from thundersync_jax.factory import call_factory, describe_error, import_factory, user_code
from thundersync_jax.frozen_policy import FrozenPolicy, check_weights, find_frozen_policy
from thundersync_jax.initial_policy import initial_params, make_model
from thundersync_jax.learner.compilation import compile_apart
from thundersync_jax.learner.distiller import Distiller
from thundersync_jax.learner.groups import LearnerError
from thundersync_jax.learner.learner import Learner
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.losses.objective import Objective
from thundersync_jax.losses.objective_check import check_turns
from thundersync_jax.losses.objectives import make_objective
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.sharded import check_mesh, init_on_mesh
from thundersync_jax.model.transformer import Params
from thundersync_jax.rollout.agent import derive_seed
from thundersync_jax.rollout.chat_renderer import make_renderer
from thundersync_jax.rollout.phases import AttemptError, run_phase
from thundersync_jax.rollout.renderer import Renderer
from thundersync_jax.rollout.rollout import RolloutRunner
from thundersync_jax.rollout.scoring import TurnListener
from thundersync_jax.sandbox.base import SandboxPool
from thundersync_jax.sandbox.selection import open_pool
from thundersync_jax.saved_policy import Start
from thundersync_jax.serving.engine import PolicyEngine
from thundersync_jax.serving.memory import device_bytes
from thundersync_jax.serving.scorer import Scorer
from thundersync_jax.serving.worker import ServingWorker
from thundersync_jax.sharding import MeshShape, make_mesh
from thundersync_jax.trajectory import Task, TrajectoryKey
from thundersync_jax.workdir import WorkDirectory

_SPLIT_REMEDY = "Name splits that it has in config.data.train_split and config.data.eval_split"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts of one run, not started yet."""

    config: RunConfig
    workdir: WorkDirectory
    model: TransformerConfig
    suite: EnvironmentSuite
    renderer: Renderer
    train_tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    learner: Learner | Distiller
    worker: ServingWorker
    frozen: FrozenPolicy | None
    scorer: Scorer | None
    sandboxes: SandboxPool
    began_s: float  # on time.monotonic's clock

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        return self.renderer.prompt_ids(task)

    def runner(
        self,
        sampling: SamplingSection,
        *,
        purpose: int,
        is_scored: bool = False,
        on_turn: TurnListener | None = None,
    ) -> RolloutRunner:
        """Runs attempts; runners of different `purpose` draw independently.

        Args:
          is_scored: the run's frozen policy, if it has one, scores every turn.
          on_turn: hears every turn, once a teacher has scored it where there is one; the scores of
            a frozen policy without it are the reference's.
        """
        return RolloutRunner(
            client=self.worker,
            suite=self.suite,
            renderer=self.renderer,
            sandboxes=self.sandboxes,
            limits=self.config.rollout,
            sampling=sampling,
            run_seed=derive_seed(self.config.run.seed, purpose),
            max_context=self.config.model.max_context,
            scorer=self.scorer if is_scored else None,
            on_turn=on_turn,
        )


async def build(
    config: RunConfig, workdir: WorkDirectory, announce: Callable[[str], None]
) -> Runtime:
    """Makes every part; raises ConfigError and the parts' own errors for what cannot work."""
    began_s = time.monotonic()
    suite = load_suite(config.env)
    renderer = load_renderer(config, suite)
    tokenizer = renderer.tokenizer
    model = make_model(config.model, tokenizer)
    frozen = check_learning(config, model, renderer, workdir)
    mesh = make_learner_mesh(config, model)
    train_tasks = load_split(config, suite, workdir, config.data.train_split)
    eval_tasks = (
        load_split(config, suite, workdir, config.data.eval_split)[: config.evaluation.num_tasks]
        if config.evaluation.every_steps
        else ()
    )
    for task in (*train_tasks, *eval_tasks):
        check_prompt(task, renderer, config.model.max_context)
    if frozen is not None:
        frozen = await asyncio.to_thread(check_weights, frozen, workdir)
    sandboxes, sandbox_report = await open_pool(config.sandbox)
    lacks = f", which does not enforce {', '.join(sandbox_report.unenforced)}"
    announce(f"tools run in {sandbox_report.backend}{lacks if sandbox_report.unenforced else ''}")
    await check_environment(config, suite, train_tasks[0], sandboxes, announce)
    announce("compiling; the work directory keeps the programs")
    scored_by = None if frozen is None else frozen.model
    await asyncio.to_thread(compile_apart, warm_up, config, model, scored_by)
    params = initial_params(model, Start.of(config), mesh)
    engine, learner, scorer = _make_programs(config, model, scored_by, mesh, params)
    return Runtime(
        config=config,
        workdir=workdir,
        model=model,
        suite=suite,
        renderer=renderer,
        train_tasks=train_tasks,
        eval_tasks=eval_tasks,
        learner=learner,
        worker=ServingWorker(engine, tokenizer.text_stream),
        frozen=frozen,
        scorer=scorer,
        sandboxes=sandboxes,
        began_s=began_s,
    )


def check_learning(
    config: RunConfig, model: TransformerConfig, renderer: Renderer, workdir: WorkDirectory
) -> FrozenPolicy | None:
    """Raises ConfigError or ObjectiveError for what a run cannot learn; its frozen policy."""
    check_saved(workdir, model, renderer)
    check_history(config, renderer)
    objective = make_objective(config.learner.objective, config.learner.objective_options)
    if config.learner.stream_turns != "never":
        check_turns(objective)
    _check_step(config, objective)
    return find_frozen_policy(
        config, objective=objective, model=model, tokenizer=renderer.tokenizer, workdir=workdir
    )


def check_saved(workdir: WorkDirectory, model: TransformerConfig, renderer: Renderer) -> None:
    """Raises ConfigError where the policy of the run in `workdir` would be, read or say another."""
    workdir.check_tokenizer(renderer.tokenizer.fingerprint)
    workdir.check_template(renderer.template_fingerprint)
    workdir.check_model(model)


def warm_up(
    config: RunConfig, model: TransformerConfig, scored_by: TransformerConfig | None
) -> None:
    """Compiles the programs of a run, and nothing else of it."""
    mesh = make_learner_mesh(config, model)
    params = init_on_mesh(model, config.run.seed, mesh)  # as good as any
    engine, learner, scorer = _make_programs(config, model, scored_by, mesh, params)
    learner.warm_up()
    engine.warm_up()
    if scorer is not None:
        scorer.warm_up()


def load_suite(env: EnvSection) -> EnvironmentSuite:
    """Imports and calls `env.factory` with `env.options`; ConfigError unless it makes a suite."""
    factory = import_factory(env.factory, "env.factory")
    suite = call_factory(factory, env.factory, env.options, "env.options")
    with user_code(f"make or solved_reward of {env.factory}"):
        make, solved = getattr(suite, "make", None), getattr(suite, "solved_reward", None)
    if not callable(make) or not isinstance(solved, int | float) or math.isnan(solved):
        raise ConfigError(
            f"config.env.factory = {env.factory!r} returned {suite!r:.80}, whose solved_reward is "
            f"{solved!r:.80}: expected a suite of environments, which has make(attempt) and a "
            "number solved_reward; see envs/base.py"
        )
    return suite


async def check_environment(
    config: RunConfig,
    suite: EnvironmentSuite,
    task: Task,
    sandboxes: SandboxPool,
    announce: Callable[[str], None],
) -> None:
    """Makes one environment and closes it; ConfigError where all attempts would fail."""
    key = TrajectoryKey(step=0, group=0, index=0)
    name = f"make(attempt) of {config.env.factory}, for task {task.task_id!r},"
    with user_code(name):
        environment = suite.make(Attempt(key=key, task=task, seed=0, sandboxes=sandboxes))
    phases = ("reset", "step", "grade", "close")
    if missing := [m for m in phases if not callable(getattr(environment, m, None))]:
        raise ConfigError(
            f"{name} returned {environment!r:.80}, which has no {', '.join(missing)}: expected an "
            "environment, see envs/base.py"
        )
    try:
        await run_phase("close", key, config.rollout.reset_timeout_s, lambda: environment.close())
    except AttemptError as error:
        announce(f"an environment that was not reset cannot be closed: {error}")


def load_renderer(config: RunConfig, suite: EnvironmentSuite) -> Renderer:
    """The suite's words, or the chat template of the configured tokenizer's directory."""
    section = dataclasses.replace(config.chat, tokenizer=config.tokenizer_directory)
    return make_renderer(suite, section)


def make_learner_mesh(config: RunConfig, model: TransformerConfig) -> Mesh:
    """The configured mesh over the first devices; MeshError when it cannot hold the model."""
    data, fsdp, tensor = config.learner.mesh
    shape, devices = MeshShape(data=data, fsdp=fsdp, tensor=tensor), jax.devices()
    lengths = (*config.learner.buckets, *config.learner.prompt_buckets)
    check_mesh(shape, model, lengths, num_devices=len(devices))
    return make_mesh(shape, devices[: shape.num_devices])


def _make_programs(
    config: RunConfig,
    model: TransformerConfig,
    scored_by: TransformerConfig | None,
    mesh: Mesh,
    params: Params,
) -> tuple[PolicyEngine, Learner | Distiller, Scorer | None]:
    serving, max_context = config.serving, config.model.max_context
    engine = PolicyEngine(model, serving, max_context)
    reserved = [device_bytes(model, serving, max_context)]
    scorer: Scorer | None = None
    make: Callable[..., Learner | Distiller] = functools.partial(Learner, config.learner)
    is_taught = bool(config.opd.teacher)
    if scored_by is not None:
        scorer = Scorer(
            scored_by,
            serving,
            max_context,
            temperature=config.opd.temperature if is_taught else config.sampling.temperature,
            logprob_chunk=config.model.logprob_chunk,
        )
        reserved.append(device_bytes(scored_by, serving, max_context) | {"parked rows": 0})
    if is_taught:
        make = functools.partial(Distiller, config.learner, config.opd)
    learner = make(
        config.optimizer,
        model,
        params,
        mesh=mesh,
        temperature=config.sampling.temperature,
        logprob_chunk=config.model.logprob_chunk,
        reserved_bytes=sum(sum(parts.values()) for parts in reserved),
    )
    return engine, learner, scorer


def load_split(
    config: RunConfig, suite: EnvironmentSuite, workdir: WorkDirectory, split: str
) -> Sequence[Task]:
    """The tasks of one split, from the data set or from the environment; ConfigError."""
    data = config.data
    if not data.builder:
        return _tasks_of(suite, split, f"tasks({split!r}) of {config.env.factory}")
    try:
        from thundersync_jax.envs.data import load_tasks

        return load_tasks(data.builder, options=data.options, split=split, data_dir=workdir.data)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"{data.builder} gives no tasks for the split {split!r}: {error}. {_SPLIT_REMEDY}"
        ) from error


def _tasks_of(suite: EnvironmentSuite, split: str, name: str) -> Sequence[Task]:
    """A suite's own tasks, which it may read when indexed."""
    with user_code(name, f"{_SPLIT_REMEDY}, or mend the suite"):
        tasks = suite.tasks(split)
        is_sequence = hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")
        num_tasks = len(tasks) if is_sequence else 0
        others = [task for task in tasks if not _is_task(task)] if is_sequence else []
    records = "thundersync_jax.trajectory.Task records, each with a str task_id"
    if not is_sequence:
        raise ConfigError(
            f"{name} returned {tasks!r:.80}: expected a sequence of {records}. Mend the suite"
        )
    if not num_tasks:
        raise ConfigError(f"{name} has no tasks. {_SPLIT_REMEDY}")
    if others:
        raise ConfigError(f"{name} has {others[0]!r:.80}: expected {records}. Mend the suite")
    return tasks


def _is_task(task: object) -> bool:
    return isinstance(task, Task) and isinstance(task.task_id, str)


def check_history(config: RunConfig, renderer: Renderer) -> None:
    """Raises ConfigError where turns would be taken back that are learned from as they come."""
    teacher, stream_turns = config.opd.teacher, config.learner.stream_turns
    if (teacher or stream_turns != "never") and config.rollout.max_turns > 1:
        by = f"opd.teacher = {teacher!r}" if teacher else f"learner.stream_turns = {stream_turns!r}"
        check(
            not renderer.rewrites_history,
            "chat.history",
            config.chat.history,
            f"'append' with {by}, which learns from turns as they come, for the chat template in "
            f"{config.tokenizer_directory} rewrites what the policy said before",
            "" if teacher else "Or set learner.stream_turns = 'never'.",
        )


def _check_step(config: RunConfig, objective: Objective) -> None:
    """A step of so many groups can be summed."""
    num_groups = config.run.groups_per_step + config.run.max_refilled_groups
    sizes = [config.run.group_size] * num_groups
    reduction = REDUCTIONS[config.learner.reduction]
    try:
        reduction.check_group(f"config.run: {num_groups} groups a step", sizes, objective)
    except LearnerError as error:
        raise ConfigError(str(error)) from error


def check_prompt(task: Task, renderer: Renderer, max_context: int) -> None:
    """Raises ConfigError unless the task has a prompt that leaves room for a token."""
    try:
        num_tokens = len(renderer.prompt_ids(task))
        renderer.check(task)
    except UserError as error:
        raise ConfigError(f"the prompt of task {task.task_id!r}: {error}") from error
    except Exception as error:  # a user's suite, whatever it returns
        raise ConfigError(
            f"the prompt of task {task.task_id!r}: {describe_error(error)}. Expected a text of "
            "prompt(task), or messages of messages(task) with tools: mend the suite"
        ) from error
    if not 1 <= num_tokens < max_context:
        raise ConfigError(
            f"task {task.task_id!r} has a prompt of {num_tokens} tokens: expected 1 to "
            f"{max_context - 1}, so that one more fits config.model.max_context = {max_context}. "
            "Shorten the prompt or raise model.max_context, learner.buckets with it"
        )
