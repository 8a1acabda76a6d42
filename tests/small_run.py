"""A whole run small enough for tests: real model, engine, sandboxes, files; seconds long."""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.run.num_steps = 6
    config.run.groups_per_step = 2
    config.run.group_size = 4
    config.run.progress = "plain"
    config.model.max_context = 12
    config.learner.buckets = (12,)
    config.learner.pool_size = 1
    config.learner.tokens_per_step = 48
    config.optimizer.learning_rate = 1e-3
    config.env.options = ConfigDict(
        {"num_values": 4, "max_turns": 5, "tool_delay_s": 0.0, "num_train_tasks": 7}
    )
    config.rollout.max_turns = 5
    config.rollout.max_turn_tokens = 1
    config.sandbox.num_slots = 8
    config.serving.num_slots = 8
    config.serving.steps_per_sync = 1
    config.serving.extend_rows = 8
    config.serving.extend_buckets = (2,)
    config.checkpoint.every_steps = 3
    return config
