"""On-policy distillation by turns, on a real tool: a scripted teacher teaches a smaller student.

    bash launch/opd_quickstart.sh

The teacher (0.3M parameters) learns from demonstrations of binary search, with mistakes in between
that it learns to mend; no rollouts. The student (0.06M) starts from scratch: it acts with a tool in
a sandbox, the teacher scores every turn while the tool runs, and no reward is used.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config


def get_config(role: str = "student") -> ConfigDict:
    """The run of the "student"; `--config=configs/opd_quickstart.py:teacher` is the teacher's."""
    config = default_config()
    config.run.groups_per_step = 8
    config.run.group_size = 8
    config.model.max_context = 8  # <bos> and four turns of probe and answer
    config.learner.buckets = (4, 8)
    config.optimizer.clip_norm = 1.0
    config.env.factory = "thundersync_jax.envs.file_probe:file_probe"
    config.env.options = ConfigDict(
        {
            "num_values": 8,
            "max_turns": 4,  # as many as binary search needs at worst
            "num_train_tasks": 8,
            "tool_delay_s": 0.02,
            "tool_delay_sigma": 1.0,
        }
    )
    config.rollout.max_turns = 4
    config.rollout.max_turn_tokens = 1
    config.sandbox.num_slots = 64
    config.serving.num_slots = 64
    config.serving.steps_per_sync = 1
    config.serving.extend_rows = 32
    config.serving.extend_buckets = (2, 8)
    if role == "teacher":
        config.run.num_steps = 300
        config.model.preset = "tiny"
        config.optimizer.learning_rate = 1e-3
        return config
    config.run.num_steps = 280
    config.model.preset = "micro"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = "cosine"
    config.optimizer.decay_steps = config.run.num_steps
    config.opd.teacher = "runs/opd_teacher"
    config.opd.num_caches = 64
    return config
