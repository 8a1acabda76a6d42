"""Qwen3-0.6B, all parameters trained, on one TPU host of eight chips (v5e:2x4).

    python -m thundersync_jax.plan --config=configs/qwen3_0p6b.py --topology=v5e:2x4

Prompts of 1,024 tokens, trajectories of 4,096. To train, give
--config.model.checkpoint=DIR --config.model.preset="": the model's directory.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.run.groups_per_step = 8
    config.run.group_size = 8

    config.model.preset = "qwen3_0p6b"
    config.model.dtype = "bfloat16"
    config.model.remat = "block"
    config.model.max_context = 4096
    config.learner.mesh = (2, 4, 1)
    config.learner.buckets = (1024, 2048, 4096)
    config.learner.tokens_per_step = 8192
    config.learner.prompt_buckets = (1024,)
    config.learner.pool_size = -1
    config.learner.prompt_slots = -1
    config.learner.held_gradients = 1
    config.optimizer.learning_rate = 1e-6
    config.rollout.max_tokens = 4096
    config.rollout.max_turn_tokens = 512

    config.serving.num_slots = 32
    config.serving.steps_per_sync = 8
    config.serving.extend_rows = 8
    config.serving.extend_buckets = (32, 256)
    return config
