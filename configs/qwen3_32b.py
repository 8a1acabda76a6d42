"""Qwen3-32B, all parameters trained, on 64 chips of 95 GB (v5p:4x4x4).

    python -m thundersync_jax.plan --config=configs/qwen3_32b.py --topology=v5p:4x4x4

Prompts of 2,048 tokens, trajectories of 8,192. To train, give
--config.model.checkpoint=DIR --config.model.preset="": the model's directory.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.run.groups_per_step = 16
    config.run.group_size = 16

    config.model.preset = "qwen3_32b"
    config.model.dtype = "bfloat16"
    config.model.remat = "block"
    config.model.max_context = 8192
    config.learner.mesh = (2, 16, 2)
    config.learner.buckets = (2048, 4096, 8192)
    config.learner.tokens_per_step = 16384
    config.learner.prompt_buckets = (2048,)
    config.learner.pool_size = -1
    config.learner.prompt_slots = -1
    config.learner.held_gradients = 1
    config.optimizer.learning_rate = 1e-6
    config.rollout.max_tokens = 8192
    config.rollout.max_turn_tokens = 1024

    config.serving.num_slots = 64
    config.serving.steps_per_sync = 8
    config.serving.extend_rows = 12
    config.serving.extend_buckets = (64, 512)
    return config
