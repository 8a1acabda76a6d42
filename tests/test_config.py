"""A configuration is either resolved whole or refused with the key, the value and the remedy."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from thundersync_jax.config import RunConfig, default_config, resolve, resume_differences, to_dict
from thundersync_jax.errors import ConfigError


def changed(**keys):
    """The default configuration with section__key=value changes."""
    config = default_config()
    for path, value in keys.items():
        *sections, key = path.split("__")
        setattr(functools.reduce(getattr, sections, config), key, value)
    return config


def test_defaults_survive_the_round_trip_through_a_config_dict():
    assert resolve(default_config()) == RunConfig()
    assert json.loads(json.dumps(to_dict(RunConfig()))) == to_dict(RunConfig())


def test_a_mistyped_key_names_its_neighbor():
    with pytest.raises(AttributeError, match='Did you mean "learner"'):
        default_config().lerner = 1
    config = default_config().to_dict()
    config["learner"]["pool_sise"] = 3
    with pytest.raises(
        ConfigError, match=r"config\.learner\.pool_sise is not a key.*config\.learner\.pool_size"
    ):
        resolve(ConfigDict(config))


def test_options_of_a_users_function_are_free():
    config = default_config()
    config.learner.objective_options.tis_cap = 2.0
    config.data.options.path = "tasks"
    assert resolve(config).learner.objective_options == {"tis_cap": 2.0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"run__group_size": 1}, "run.group_size = 1: expected at least 2"),
        ({"evaluation__every_steps": -1}, "evaluation.every_steps = -1: expected 0"),  # LESSONS 9
        ({"model__max_context": 65}, "learner.buckets = .* at least model.max_context = 65"),
        ({"learner__buckets": (32, 16)}, "learner.buckets = .*ascending"),
        ({"learner__pool_size": -2}, "learner.pool_size = -2: expected 0 or more"),
        ({"learner__tokens_per_step": 63}, "tokens_per_step = 63: expected at least the longest"),
        ({"learner__tokens_per_step": 10**9}, "10+: .* at most 65536: 4096 trajectories"),
        ({"learner__pack_tokens": 15}, r"pack_tokens = 15: expected 0 .*\(16, 32, 64\)"),
        ({"learner__mesh": (8, 1)}, r'of at least 1.*--config.learner.mesh="\(8, 1, 1\)"'),
        ({"learner__mesh": (2, 0, -1)}, r'mesh = \(2, 0, -1\).*mesh="\(2, 1, 1\)"'),
        ({"learner__prompt_buckets": (64, 65)}, r"\(64, 65\): expected .* longest bucket, 64"),
        ({"learner__prompt_buckets": (24,)}, "min_shared_tokens = 32: expected at most .* 24"),
        ({"learner__held_gradients": -1}, "learner.held_gradients = -1: expected 0 or more"),
        ({"run__mode": "sync"}, "run.mode = 'sync': expected 'stream' or 'barrier'"),
        ({"run__profile_steps": "5"}, "run.profile_steps = '5': expected 'A:B'"),
        ({"run__profile_steps": "5:5"}, "run.profile_steps = '5:5'"),
        ({"sampling__top_p": 0.9}, "gradient is that of the untruncated policy"),
        ({"sampling__temperature": 0.0}, "temperature > 0"),
        ({"run__seed": 2**63}, "run.seed = .*: expected an integer of 64 bits"),
        ({"optimizer__learning_rate": float("inf")}, "learning_rate = inf: expected a finite"),
        ({"optimizer__eps": float("nan")}, "optimizer.eps = nan: expected a finite number above 0"),
        ({"optimizer__b1": 1.0}, "optimizer.b1 = 1.0: expected at least 0 and below 1"),
        ({"optimizer__b2": float("nan")}, "optimizer.b2 = nan: expected at least 0 and below 1"),
        ({"optimizer__weight_decay": -5.0}, "weight_decay = -5.0: expected a finite number, at"),
        (
            {"evaluation__sampling__top_p": 1e-300},
            r"evaluation\.sampling\.top_p = 1e-300: ",
        ),
        ({"evaluation__sampling__top_k": 2**40}, "config.evaluation.sampling.top_k = .*below 2"),
        ({"sampling__temperature": 1e300}, "config.sampling.temperature = 1e.300: expected 0 .gre"),
        ({"sandbox__start_timeout_s": float("nan")}, "start_timeout_s = nan: expected a positive"),
        ({"sandbox__cpu_s": 2**70}, "sandbox.cpu_s = .*: expected 1 to"),
        ({"sandbox__num_slots": 100000}, "sandbox.num_slots = 100000: expected 1 to 4096"),
        ({"optimizer__schedule": "cosine"}, "optimizer.decay_steps = 0: expected more than"),
        ({"env__factory": "module"}, "expected 'package.module:function'"),
        (
            {"chat__history": "append"},
            "the default 'template' without a tokenizer.* Set chat.token",
        ),
        (
            {"opd__prefix_buckets": (8, 62)},
            r"\(8, 62\): expected a last length from 63, .* to 64",
        ),
        ({"opd__prefix_buckets": (65,)}, r"opd.prefix_buckets = \(65,\): expected a last length"),
        (
            {"learner__reduction": "exact", "learner__stream_turns": "idle"},
            "stream_turns = 'idle': expected 'never' .* last bits .*Or set learner.reduction",
        ),
        (
            {"learner__reduction": "exact", "model__dtype": "float64"},
            "reduction = 'exact': expected 'ordered' with model.dtype = 'float64'.* Or set model",
        ),
        (
            {"opd__teacher": "runs/teacher", "run__max_refilled_groups": 2},
            "run.max_refilled_groups = 2: expected 0 with opd.teacher: no reward counts",
        ),
    ],
)
def test_values_out_of_range_are_refused_with_what_was_expected(keys, message):
    with pytest.raises(ConfigError, match=message):
        resolve(changed(**keys))


def test_values_of_another_type_are_refused():
    values = default_config().to_dict()
    values["run"]["group_size"] = "eight"
    with pytest.raises(
        ConfigError, match=r"run.group_size = 'eight': expected a value of type int"
    ):
        resolve(ConfigDict(values))


def test_resume_allows_marked_keys_only():
    saved = to_dict(RunConfig())
    longer = dataclasses.replace(RunConfig(), run=dataclasses.replace(RunConfig().run, num_steps=9))
    assert resume_differences(saved, longer) == []
    other = resolve(changed(run__seed=1, run__num_steps=5, serving__num_slots=2))
    assert resume_differences(saved, other) == ["run.seed: 0 -> 1"]
    del saved["model"]["preset"]
    assert resume_differences(saved, RunConfig()) == ["model.preset: '(absent)' -> ''"]


def test_layers_without_jax_start_without_it():
    modules = [
        "trajectory", "config", "metrics", "trajectory_log", "workdir", "coordinator.coordinator",
        "rollout.rollout", "envs.file_probe", "envs.data", "sandbox.base",
    ]  # fmt: skip
    code = "import sys\n" + "\n".join(f"import thundersync_jax.{m}" for m in modules)
    code += "\nassert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
