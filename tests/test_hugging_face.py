"""A model is written and read again without a change, piece by piece; misfits are named."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from model_reference import random_params
from safetensors.numpy import load_file, save_file

from thundersync_jax.model import import_hf, safetensors_file
from thundersync_jax.model.export_hf import export_hugging_face
from thundersync_jax.model.families import read_config, write_config
from thundersync_jax.model.import_hf import HuggingFaceDirectory, at_path, parameters
from thundersync_jax.model.presets import (
    PRESETS,
    LinearRopeScaling,
    ModelError,
    TransformerConfig,
    preset,
)
from thundersync_jax.model.transformer import abstract_params

LLAMA = TransformerConfig(
    vocab_size=24,
    embed_dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=20,
    rope_theta=1e4,
)
GEMMA = dataclasses.replace(
    LLAMA,
    use_qk_norm=True,
    activation="gelu",
    use_post_norms=True,
    zero_centered_norms=True,
    scale_embeddings=True,
    tie_embeddings=True,
    query_scale=4,
    windows=(5, 0, 5),
    rope_scaling=LinearRopeScaling(factor=8.0),
)
MODELS = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, use_qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, use_qk_norm=True, tie_embeddings=True),
    "gemma3": GEMMA,
}
INDEX = "model.safetensors.index.json"
one_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def everywhere(config: TransformerConfig) -> Any:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: device, abstract_params(config))


@one_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_again(config: TransformerConfig, dtype: str, tmp_path: Path):
    params = random_params(config, 0)
    export_hugging_face(config, params, tmp_path, dtype=dtype, max_file_bytes=3000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with HuggingFaceDirectory(tmp_path) as directory:
        assert directory.config == config
        again = directory.load(config, everywhere(config))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert np.array_equal(one, np.asarray(other).astype(dtype).astype(np.float32))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_piece_is_that_piece_of_the_whole(data: st.DataObject, tmp_path_factory: Any):
    """What a device of a mesh holds."""
    config = data.draw(st.sampled_from(list(MODELS.values())))
    root = tmp_path_factory.mktemp("model")
    params = random_params(config, 1)
    export_hugging_face(config, params, root, dtype="float32")
    parameter = data.draw(st.sampled_from(parameters(config)))
    whole = np.asarray(at_path(params, parameter.tensor.path))
    index = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    strip_bytes = data.draw(st.sampled_from([1, 200, 2**20]))
    least_bytes = data.draw(st.sampled_from([1, 2**20]))
    with (
        HuggingFaceDirectory(root) as directory,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(import_hf, "_STRIP_BYTES", strip_bytes)
        patch.setattr(safetensors_file, "_LEAST_BYTES", least_bytes)
        piece = directory.read(parameter, tuple(index), threads=threads)
    assert np.array_equal(piece, whole[tuple(index)])


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("micro", "tiny")])
def test_presets_are_written_and_read_as_they_are(name: str):
    config = preset(name)
    assert read_config(json.loads(json.dumps(write_config(config)))) == config


def test_everything_that_is_missing_or_misshapen_is_named_at_once(tmp_path: Path):
    export_hugging_face(LLAMA, random_params(LLAMA, 0), tmp_path, dtype="float32")
    (tmp_path / INDEX).unlink()
    (file,) = tmp_path.glob("*.safetensors")
    arrays = load_file(file)
    del arrays["model.layers.1.mlp.up_proj.weight"]
    arrays["model.norm.weight"] = np.zeros(7, np.float32)
    save_file(arrays, file)
    with (
        HuggingFaceDirectory(tmp_path) as directory,
        pytest.raises(ModelError, match="2 tensors") as raised,
    ):
        directory.load(LLAMA, everywhere(LLAMA))
    assert "model.layers.1.mlp.up_proj.weight is missing" in str(raised.value)
    assert "model.norm.weight has shape [7], config.json asks for [16]" in str(raised.value)


def test_broken_directories_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"nowhere: there is no such directory"):
        HuggingFaceDirectory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON file.*FileNotFoundError"):
        HuggingFaceDirectory(tmp_path)
    export_hugging_face(LLAMA, random_params(LLAMA, 0), tmp_path, max_file_bytes=3000)
    last = max(tmp_path.glob("*.safetensors"))
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=rf"{last.name} cannot be read.*copy it again"):
        HuggingFaceDirectory(tmp_path)
    last.unlink()
    with pytest.raises(ModelError, match=rf"lacks \['{last.name}'\]"):
        HuggingFaceDirectory(tmp_path)


NORM = "model.norm.weight"


def changed(root: Path, config: TransformerConfig, **arrays: np.ndarray) -> None:
    """A model in one file without an index, with more or other tensors."""
    export_hugging_face(config, random_params(config, 0), root, dtype="float32")
    (root / INDEX).unlink()
    (file,) = root.glob("*.safetensors")
    save_file(load_file(file) | arrays, root / "model.safetensors")
    file.unlink()


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path):
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}
    changed(tmp_path, LLAMA, **extra, **{"model.rotary_emb.inv_freq": np.ones(3, np.float32)})
    with HuggingFaceDirectory(tmp_path) as directory:
        with pytest.raises(ModelError, match=r"1 tensors.*\n.*q_proj\.bias is in the files, the m"):
            directory.check(LLAMA)
        with pytest.raises(
            ModelError, match=r"10 tensors do not fit(.|\n)*layers\.2\.mlp\.up_proj"
        ):
            directory.check(dataclasses.replace(LLAMA, num_layers=2))


@pytest.mark.parametrize("add", [0.0, 1.0])
def test_an_output_kernel_beside_a_tied_embedding_must_be_it(add: float, tmp_path: Path):
    tied = dataclasses.replace(LLAMA, tie_embeddings=True)
    changed(tmp_path, tied)
    arrays = load_file(tmp_path / "model.safetensors")
    kernel = arrays["model.embed_tokens.weight"].copy()
    kernel[-1, -1] += add
    save_file(arrays | {"lm_head.weight": kernel}, tmp_path / "model.safetensors")
    with HuggingFaceDirectory(tmp_path) as directory:
        if add:
            with pytest.raises(
                ModelError, match=r"tie_word_embeddings = true, yet lm_head.*expect"
            ):
                directory.load(tied, everywhere(tied))
        else:
            directory.load(tied, everywhere(tied))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_with_a_number_that_is_not_finite_is_named(
    number: float, dtype: str, tmp_path: Path
):
    params = random_params(LLAMA, 0)
    params["blocks"]["mlp"]["up"]["kernel"] = (
        params["blocks"]["mlp"]["up"]["kernel"].at[1, 3, 2].set(number)
    )
    export_hugging_face(LLAMA, params, tmp_path, dtype=dtype)
    for config in (LLAMA, dataclasses.replace(LLAMA, param_dtype="bfloat16")):
        with (
            HuggingFaceDirectory(tmp_path) as directory,
            pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN, infinite"),
        ):
            directory.load(config, everywhere(config))


def test_a_tensor_is_in_one_file(tmp_path: Path):
    changed(tmp_path, LLAMA)
    save_file({NORM: np.zeros(16, np.float32)}, tmp_path / "old.safetensors")
    with pytest.raises(ModelError, match=rf"1 ten.*\n.*{NORM} is in model\.saf.* and in old\.safe"):
        HuggingFaceDirectory(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {NORM: "old.safetensors"}}))
    with pytest.raises(ModelError, match=rf"model\.safetensors beside {INDEX}.*one of the two"):
        HuggingFaceDirectory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda places: places.update({NORM: max(places.values())}),
            rf"{NORM} is in model.*says mo",
        ),
        (lambda places: places.pop(NORM), rf"{NORM} is in model-.*index\.json says nothing of it"),
        (lambda places: places.update(x=places[NORM]), "x is in no file.*says model-"),
        (lambda places: places.update(x="no"), r"lacks \['no'\]"),
        (lambda places: places.update(x="."), r"x = '\.': expected the name of a file"),
        (lambda places: places.update(x="../x"), r"x = '\.\./x': expected the name of a file"),
        (lambda places: places.update(x=5), "x = 5: expected a string"),
        (lambda places: places.clear(), r"weight_map = \{\}: expected the file of every tensor"),
    ],
)
def test_an_index_says_where_every_tensor_is(change: Any, message: str, tmp_path: Path):
    export_hugging_face(LLAMA, random_params(LLAMA, 0), tmp_path, max_file_bytes=3000)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index["weight_map"])
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        HuggingFaceDirectory(tmp_path)


@pytest.mark.parametrize("index", [[1], None, {}, {"weight_map": None}, {"weight_map": [1]}])
def test_an_index_of_another_type_is_refused(index: Any, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(write_config(LLAMA)))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"{INDEX}.*: expected"):
        HuggingFaceDirectory(tmp_path)


def test_a_directory_is_no_file_of_tensors(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(write_config(LLAMA)))
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"lacks \['model\.safetensors'\]"):
        HuggingFaceDirectory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba': expected one of.*qwen3"),
        ({"hidden_act": "relu"}, r"hidden_act = 'relu' \(expected 'silu'\)"),
        ({"attention_bias": True}, r"attention_bias = True \(expected False\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn': expected 'default'"),
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types.*one of \['full_attention'\]"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5 \(expected 1.0\)"),
        ({"rope_parameters": {"rope_theta": 1e4, "mscale": 2}}, r"has \['mscale'\]"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta says 10000.0.*says 5.0.*Keep one"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}},
            r"rope_parameters says None;.*rope_scaling says LinearRopeScaling\(factor=4.0\)",
        ),
    ],
)
def test_what_the_decoder_does_not_do_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read_config(write_config(LLAMA) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size = '32': expected an integer from 1 on"),
        ({"hidden_size": 32.0}, "hidden_size = 32.0: expected an integer"),
        ({"num_hidden_layers": [2]}, r"num_hidden_layers = \[2\]: expected an integer"),
        ({"num_attention_heads": True}, "num_attention_heads = True: expected an integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0: expected an integer from 1 on"),
        ({"num_key_value_heads": 3}, "num_heads = 4, num_kv_heads = 3: every kv head"),
        ({"hidden_size": None}, "hidden_size = None: expected an integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': expected a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: expected a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': expected true or"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\]: expected one of"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]: expected a JSON object"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta = None: expected a positive"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor = '4': expected a"),
        ({"layer_types": "all"}, "layer_types = 'all': expected a list of strings"),
    ],
)
def test_a_value_of_another_type_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=f"^of mine.*{message}"):
        read_config(write_config(LLAMA) | changes, "of mine")


@pytest.mark.parametrize("text", [[], None, "model_type", 5])
def test_a_file_of_another_thing_than_an_object_is_named(text: Any, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert not import_hf.is_hugging_face(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json is .*: expected a JSON object"):
        HuggingFaceDirectory(tmp_path)


FULL, LOCAL = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 8.0}}},
            "sliding_attention: rope_type = 'linear': expected 'default'",
        ),
        ({"rope_parameters": {"rope_theta": 7.0}}, r"rope_parameters has \['rope_theta'\]"),
        ({"layer_types": [FULL, LOCAL, "chunked_attention"]}, "layer_types.*chunked.*expected of"),
        ({"layer_types": [FULL]}, "layer_types = .*expected of each of 3 layers"),
        ({"query_pre_attn_scalar": 24.5}, "query_pre_attn_scalar = 24.5: expected an integer"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: expected an integer from 1"),
        ({"sliding_window": 0}, "sliding_window = 0: expected an integer from 1"),
        ({"sliding_window": "8"}, "sliding_window = '8': expected an integer"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern = 0: expected an integer from 1"),
    ],
)
def test_what_gemma_has_beside_is_checked(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read_config(write_config(GEMMA) | changes)


def test_the_base_of_one_kind_of_layers_alone_counts():
    text = write_config(GEMMA)
    for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
        del text[key]
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777}
    config = read_config(text | {"rope_parameters": {FULL: scaling}})
    assert (config.rope_theta, config.local_rope_theta) == (777.0, 1e4)
    assert config.rope_scaling == LinearRopeScaling(factor=2.0)
    config = read_config(text | {"rope_parameters": {LOCAL: {"rope_theta": 5}}})
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 5.0)


def test_a_model_without_windows_is_written_and_read():
    config = dataclasses.replace(GEMMA, windows=(0, 0, 0))
    assert read_config(write_config(config)) == config
