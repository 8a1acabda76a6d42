"""A small whole run of a model with random weights through a chat template."""

import small_run
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = small_run.get_config()
    config.run.num_steps = 2
    config.model.preset = "micro"
    config.model.max_context = 256
    config.learner.buckets = (256,)
    config.learner.prompt_buckets = (48,)
    config.learner.tokens_per_step = 256
    config.env.factory = "chat_env:LettersSuite"
    config.env.options = ConfigDict()
    config.rollout.max_turns = 3
    config.rollout.max_turn_tokens = 6
    config.serving.extend_buckets = (64,)
    config.checkpoint.every_steps = 1
    return config
