"""python -m thundersync_jax.export --workdir=DIR --to=DIR [--checkpoint_step=N]
    [--dtype=bfloat16|float32] [--form=model|adapter] [--base=NAME]

Writes the policy of a run as a Hugging Face directory, which `transformers` loads: config.json,
safetensors files and the tokenizer; adapters are merged. Or with --form=adapter the adapters alone,
as a directory that `peft` loads beside the base, which is that of step 0. The run's directory is
only read.
Exit status: 0 when it is written, 2 for bad input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from thundersync_jax.command_line import check_new_directory, run_main
from thundersync_jax.config import RunConfig, from_dict
from thundersync_jax.errors import ConfigError
from thundersync_jax.rollout.tokenizer_files import copy_tokenizer_files, write_words
from thundersync_jax.saved_policy import FRESH, load_policy, newest_step
from thundersync_jax.workdir import WorkDirectory

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_TO = flags.DEFINE_string("to", None, "Directory to write: a new or an empty one.")
_CHECKPOINT_STEP = flags.DEFINE_integer(
    "checkpoint_step", None, "The weights after so many steps. Default: the newest."
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float32"), "Of the files.")
_FORM = flags.DEFINE_enum(
    "form", "model", ("model", "adapter"), "The whole model, or the adapters beside its base."
)
_BASE = flags.DEFINE_string("base", "", "Directory or name of the base, for --form=adapter.")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    if len(argv) > 1 or not (_WORKDIR.value and _TO.value):
        raise app.UsageError("give --workdir=DIR --to=DIR")
    workdir, to = WorkDirectory(Path(_WORKDIR.value)), Path(_TO.value)
    check_new_directory("to", to)
    if (_FORM.value == "adapter") != bool(_BASE.value):
        raise ConfigError(
            f"--form={_FORM.value} --base={_BASE.value}: expected --base, the directory or name of "
            "the model beside which the adapters lie, with --form=adapter alone"
        )
    if workdir.checkpoints.resolve() in (to.resolve(), *to.resolve().parents):
        raise ConfigError(f"--to={to} is among the run's checkpoints, which are only read")
    step = export(
        workdir,
        to,
        step=_CHECKPOINT_STEP.value,
        dtype=_DTYPE.value,
        is_adapter=_FORM.value == "adapter",
        base=_BASE.value,
    )
    print(f"wrote the policy after {step} steps to {to}")
    return 0


def export(
    workdir: WorkDirectory, to: Path, *, step: int | None, dtype: str, is_adapter: bool, base: str
) -> int:
    """Writes the policy after `step` steps, or the newest, to `to`; returns its step.

    Args:
      is_adapter: its adapters alone, beside the model that is called `base`.
    """
    import jax

    from thundersync_jax.initial_policy import make_model
    from thundersync_jax.model.export_hf import export_hugging_face
    from thundersync_jax.model.export_peft import export_peft
    from thundersync_jax.runtime import check_saved, load_renderer, load_suite

    config = _config_of(workdir)
    jax.config.update("jax_enable_x64", config.model.dtype == "float64")
    renderer = load_renderer(config, load_suite(config.env))
    tokenizer = renderer.tokenizer
    model = make_model(config.model, tokenizer)
    check_saved(workdir, model, renderer)
    saved = newest_step(workdir.checkpoints) if step is None else step
    if step is None and saved == FRESH:
        raise ConfigError(f"{workdir.checkpoints} holds no checkpoint: train the run first")
    params, _ = load_policy(config, model, workdir, saved)
    source = Path(config.model.checkpoint) if config.model.checkpoint else None
    if is_adapter:
        export_peft(model, params, to, base=base, dtype=dtype)
    else:
        export_hugging_face(model, params, to, dtype=dtype, source=source)
    if config.tokenizer_directory:
        copy_tokenizer_files(Path(config.tokenizer_directory), to)
    else:
        write_words(tokenizer, to, config.model.max_context)
    return saved


def _config_of(workdir: WorkDirectory) -> RunConfig:
    try:
        return from_dict(json.loads(workdir.config.read_text(encoding="utf-8"))["config"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--workdir={workdir.root}: expected the directory of a run, with a config.json "
            f"({type(error).__name__}: {error})"
        ) from error


if __name__ == "__main__":
    run_main(main)
