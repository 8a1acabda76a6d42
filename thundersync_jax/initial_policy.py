"""The policy that a run begins with: its shapes and its parameters.

They come from `model.checkpoint`, a Hugging Face directory, or else from `model.preset`, `run.seed`
and the environment's vocabulary. Shared by the mains.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from thundersync_jax.config_sections import ModelSection
from thundersync_jax.errors import ConfigError, check
from thundersync_jax.model.import_hf import HuggingFaceDirectory
from thundersync_jax.model.lora import with_adapters
from thundersync_jax.model.presets import TransformerConfig, param_dtype_of, preset
from thundersync_jax.model.sharded import init_on_mesh, master_shardings
from thundersync_jax.model.trainable import join, partition
from thundersync_jax.model.transformer import Params, init_params
from thundersync_jax.rollout.chat import Tokenizer
from thundersync_jax.saved_policy import Start

DEFAULT_PRESET = "tiny"
# Rows of an embedding without a token: sizes are rounded up to what divides well.
MAX_UNUSED_IDS = 1023


def make_model(section: ModelSection, tokenizer: Tokenizer | None) -> TransformerConfig:
    """The shapes of the checkpoint or the preset, with room for every token.

    Args:
      tokenizer: None where shapes are all that is asked, as in a plan.

    Raises:
      ConfigError: the section contradicts the checkpoint, or its vocabulary the tokenizer's.
      ModelError: there is no such checkpoint or preset, or it is not one of a model.
    """
    if section.checkpoint:
        return _checkpoint_model(section, tokenizer)
    num_tokens = 0 if tokenizer is None else tokenizer.vocab_size
    model = preset(
        section.preset or DEFAULT_PRESET,
        vocab_size=section.vocab_size or num_tokens,
        dtype=section.dtype,
        remat=section.remat,
    )
    model = with_adapters(model, section.lora)
    check(
        model.vocab_size >= num_tokens,
        "model.vocab_size",
        model.vocab_size,
        f"at least {num_tokens}, for so many tokens has the tokenizer",
        "0 takes just these; or take the tokenizer that belongs to the model.",
    )
    return model


def initial_params(model: TransformerConfig, start: Start, mesh: Mesh) -> Params:
    """What a run of this start begins with, as the optimizer's copy lies. No checkpoint has the
    adapters, which are those of the seed.
    """
    if not start.checkpoint:
        return init_on_mesh(model, start.seed, mesh)
    shardings = master_shardings(model, mesh)
    with HuggingFaceDirectory(Path(start.checkpoint)) as directory:
        params = directory.load(model, shardings)
    if model.lora is None:
        return params

    def adapters(seed: int) -> Params:
        return partition(model, init_params(model, seed))[0]

    made = jax.jit(adapters, out_shardings=partition(model, shardings)[0])(start.seed)
    return join(made, params)


def _checkpoint_model(section: ModelSection, tokenizer: Tokenizer | None) -> TransformerConfig:
    with HuggingFaceDirectory(Path(section.checkpoint)) as directory:
        model = dataclasses.replace(
            directory.config,
            dtype=section.dtype,
            param_dtype=param_dtype_of(section.dtype),
            remat=section.remat,
        )
        directory.check(model)
        _check_options(section, model, directory.max_context)
    if tokenizer is not None and not 0 <= model.vocab_size - tokenizer.vocab_size <= MAX_UNUSED_IDS:
        raise ConfigError(
            f"config.model.checkpoint = {section.checkpoint!r}: its config.json has a vocabulary "
            f"of {model.vocab_size} and the tokenizer one of {tokenizer.vocab_size}: expected as "
            f"many or up to {MAX_UNUSED_IDS} more. Take both from the same model"
        )
    return with_adapters(model, section.lora)


def _check_options(
    section: ModelSection, model: TransformerConfig, max_context: int | None
) -> None:
    """Options that shape a model say what the checkpoint says, or nothing."""
    wrong = []
    if section.preset:
        wrong.append(f"preset = {section.preset!r} (expected '')")
    if section.vocab_size not in (0, model.vocab_size):
        wrong.append(f"vocab_size = {section.vocab_size} (expected 0 or {model.vocab_size})")
    if max_context is not None and section.max_context > max_context:
        wrong.append(f"max_context = {section.max_context} (expected at most {max_context})")
    if wrong:
        raise ConfigError(
            f"config.model.checkpoint = {section.checkpoint!r} has the shapes of its config.json, "
            f"which these options of config.model contradict: {', '.join(wrong)}"
        )
