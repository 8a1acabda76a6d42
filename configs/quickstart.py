"""Trains a small agent from scratch on a real tool: find the secret in a file with `probe N`.

    bash launch/quickstart.sh

A 0.3M-parameter policy, 8 tasks x 8 trajectories a step, at most 10 turns, each turn one command
in a sandbox.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.run.num_steps = 350
    config.run.groups_per_step = 8
    config.run.group_size = 8

    config.model.preset = "tiny"
    config.model.max_context = 24  # <bos> and ten turns of probe and answer
    config.learner.buckets = (12, 24)
    config.learner.pool_size = 8
    config.learner.objective = "dr_grpo"  # small differences among solved attempts stay small
    config.learner.objective_options = ConfigDict({"normalizer": "token_mean"})
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.decay_steps = config.run.num_steps
    config.optimizer.clip_norm = 1.0

    config.env.factory = "thundersync_jax.envs.file_probe:file_probe"
    config.env.options = ConfigDict(
        {
            "num_values": 8,
            "max_turns": 10,
            "num_train_tasks": 8,  # every secret once: a step of 8 groups sees each of them
            "tool_delay_s": 0.02,  # means of heavy-tailed (lognormal) waits; 0 turns them off
            "tool_delay_sigma": 1.0,
            "grade_delay_s": 0.02,
            "grade_delay_sigma": 1.0,
        }
    )
    config.rollout.max_turns = 10
    config.rollout.max_turn_tokens = 1
    config.sandbox.num_slots = 64

    config.serving.num_slots = 64
    config.serving.steps_per_sync = 1
    config.serving.extend_rows = 32
    config.serving.extend_buckets = (2, 8)
    config.checkpoint.every_steps = 25
    return config
