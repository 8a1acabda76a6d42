"""The agentic comparison: 4 prompts x 8 agents of 6 turns, with tools of half a second.

    python -m thundersync_jax.benchmark agentic
    python -m thundersync_jax.train --config=configs/bench_agentic.py --workdir=runs/agentic

A 0.5M-parameter policy with random weights. The environment decides what an emission does: each is
a call of one tool in a sandbox, whose wait is lognormal(sigma = 1) with a mean of 0.5 s. A prompt
has 512 tokens. A trajectory's 256 own tokens are 6 emissions of 11, and after each but the last the
tool's answer of 38; an emission that <eos> ended early is made up by its answer, except the last.
"""

from ml_collections import ConfigDict

from thundersync_jax.config import default_config

PROMPT_TOKENS, OWN_TOKENS, NUM_TURNS = 512, 256, 6
TURN_TOKENS = 49  # 5 x 49 + 11 = 256


def get_config() -> ConfigDict:
    config = default_config()
    config.run.num_steps = 4
    config.run.groups_per_step = 4
    config.run.group_size = 8

    config.model.preset = "tiny"
    config.model.max_context = PROMPT_TOKENS + OWN_TOKENS
    config.learner.buckets = (256, 768)  # behind a shared prompt, and with it
    config.learner.prompt_buckets = (512,)
    config.learner.tokens_per_step = 768
    config.learner.pool_size = 4

    config.env.factory = "thundersync_jax.envs.paced_tool:paced_tool"
    config.env.options = ConfigDict(
        {
            "num_words": 870,  # with them the model has 0.50M parameters
            "prompt_tokens": PROMPT_TOKENS,
            "num_turns": NUM_TURNS,
            "turn_tokens": TURN_TOKENS,
            "tool_delay_s": 0.5,
            "num_tasks": 4,
        }
    )
    config.rollout.max_turns = NUM_TURNS
    config.rollout.max_turn_tokens = OWN_TOKENS - (NUM_TURNS - 1) * TURN_TOKENS
    config.rollout.max_tokens = OWN_TOKENS
    config.rollout.tool_timeout_s = 120.0
    config.sandbox.num_slots = 32

    # Three agents of four wait for their tools, and on a CPU an empty row costs as much as a full
    # one: few slots, and observations one by one.
    config.serving.num_slots = 8
    config.serving.steps_per_sync = 4
    config.serving.extend_rows = 1
    config.serving.extend_buckets = (64, 512)
    return config
