r"""Qwen3-8B, all parameters trained, on 256 chips of 16 GB (v5e:16x16).

    python -m thundersync_jax.plan --config=configs/qwen3_8b.py --topology=v5e:16x16
    python -m thundersync_jax.plan --config=configs/qwen3_8b.py --topology=v6e:8x8 \
        --config.learner.mesh="(4, 8, 2)"
    python -m thundersync_jax.plan --config=configs/qwen3_8b.py --topology=v5e:16x16 \
        --config.model.lora.rank=32

Prompts of 2,048 tokens, trajectories of 8,192. To train, give
--config.model.checkpoint=DIR --config.model.preset="": the model's directory.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.run.groups_per_step = 32
    config.run.group_size = 16

    config.model.preset = "qwen3_8b"
    config.model.dtype = "bfloat16"
    config.model.remat = "block"
    config.model.max_context = 8192
    config.learner.mesh = (8, 16, 2)
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
