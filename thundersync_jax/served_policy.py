"""The policy of a run behind JetStream's engine, as `serve` has it, without the rest of a run."""

from __future__ import annotations

from thundersync_jax.config import RunConfig
from thundersync_jax.initial_policy import make_model
from thundersync_jax.runtime import check_saved, load_renderer, load_suite
from thundersync_jax.saved_policy import load_policy
from thundersync_jax.serving.jetstream_server import DrivenEngine
from thundersync_jax.workdir import WorkDirectory


def load_engine(config: RunConfig, workdir: WorkDirectory, step: int) -> DrivenEngine:
    """The configured engine, compiled, with the weights after `step` steps."""
    renderer = load_renderer(config, load_suite(config.env))
    model = make_model(config.model, renderer.tokenizer)
    check_saved(workdir, model, renderer)
    params, version = load_policy(config, model, workdir, step)
    engine = DrivenEngine(model, config.serving, config.model.max_context)
    engine.warm_up(with_prefill=True)
    engine.weights.publish(params, version)
    return engine
