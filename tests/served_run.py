"""What the tests serve: the weights of a seed, rows so long that a turn takes seconds."""

from ml_collections import ConfigDict
from small_run import get_config as small_config


def get_config() -> ConfigDict:
    config = small_config()
    config.run.seed = 5
    config.model.max_context = 2048
    config.learner.buckets = (2048,)
    config.learner.tokens_per_step = 2048
    config.serving.num_slots = 2
    config.serving.steps_per_sync = 4
    config.serving.extend_rows = 2
    config.serving.extend_buckets = (64,)
    config.serving.request_timeout_s = 30.0
    return config
