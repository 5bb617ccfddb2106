"""Hardware and model presets: every constant has a source, and sizes are those of the models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.errors import ConfigError
from penstock.devices.presets import PRESETS
from penstock.models.kv_shapes import known_kv_shapes
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import ARCHITECTURES
from penstock.models.recurrent_layers import HAS_RECURRENT_LAYERS
from penstock.models.state_sizes import measure_states
from penstock.testing.tiny_families import tiny_family
from penstock.tuner.cost_model import Workload, predict
from penstock.tuner.hardware import Hardware, hardware, known_hardware
from penstock.tuner.model_sizes import _from_entry, known_models, model_sizes
from penstock.tuner.step_work import make_policy

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "float16",
}  # fmt: skip


def write(folder: Path, **changes: object) -> str:
    content = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("name", known_hardware())
def test_every_constant_has_a_source(name: str) -> None:
    machine = hardware(name)
    constants = set(Hardware.__slots__) - {"name", "title", "source"}
    assert set(machine.source) == constants
    assert all(machine.source.values())
    assert machine.flops > machine.memory_bandwidth > machine.link_bandwidth


def test_unknown_names_say_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"toaster is not known.*orin-agx.*h200"):
        hardware("toaster")
    with pytest.raises(ConfigError, match=r"no known model.*llama-3\.1-8b"):
        model_sizes("gpt-9")


@pytest.mark.parametrize("name", sorted(known_models().keys() & known_kv_shapes().keys()))
def test_kv_shapes_agree(name: str) -> None:
    assert model_sizes(name).shape == known_kv_shapes()[name]


@pytest.mark.parametrize("name", sorted(known_models().keys() & ARCHITECTURES.keys()))
def test_weights_are_those_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[name](1024))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert model_sizes(name).weights == pytest.approx(count, rel=1e-3)  # but norms and biases


def test_folder(tmp_path: Path) -> None:
    sizes = model_sizes(write(tmp_path))
    assert sizes.shape.head_dim == 16
    assert sizes.shape.dtype == torch.float16
    assert sizes.layer_weights == 64 * (64 + 64 + 32 + 32) + 3 * 64 * 96
    assert sizes.weights == 2 * sizes.layer_weights + 2 * 64 * 500
    assert model_sizes(write(tmp_path, tie_word_embeddings=True)).weights < sizes.weights
    inner = write(tmp_path, text_config={"num_hidden_layers": 3})
    assert model_sizes(inner).shape.num_layers == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_local_experts": 8}, "experts"),
        ({"torch_dtype": "int3"}, "dtype int3"),
        ({"vocab_size": "many"}, "cannot be read"),
        ({"num_key_value_heads": "many"}, "cannot be read"),
        ({"num_key_value_heads": 3}, "no decoder has.*kv_heads 3"),
        ({"num_attention_heads": 0}, "no decoder has.*query_heads 0"),
        ({"num_hidden_layers": -2}, "no decoder has.*layers -2"),
        ({"hidden_size": float("inf")}, "cannot be read"),
        ({"torch_dtype": ["float16"]}, "dtype .*float16"),
        ({"model_type": "bert"}, "bert model's; only decoders with a gated MLP"),
        ({"model_type": "gpt_neox"}, "gpt_neox model's; only decoders with a gated MLP"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, "a sliding window"),
        ({"attention_chunk_size": 8192}, "a sliding window"),
    ],
)
def test_folders_that_cannot_be_predicted(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_sizes(write(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 32768, "use_sliding_window": False},
        {"sliding_window": 131072, "max_position_embeddings": 131072},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 4096},
    ],
)
def test_windows_that_hide_nothing_are_none(tmp_path: Path, changes: dict[str, object]) -> None:
    assert model_sizes(write(tmp_path, **changes)) == model_sizes(write(tmp_path))


def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be read"):
        model_sizes(str(tmp_path))


@pytest.mark.skipif(not HAS_RECURRENT_LAYERS, reason="this transformers has other states")
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_states_are_those_of_the_model(family: str) -> None:
    """The widths' arithmetic against what a small model's cache holds."""
    model = tiny_family(family)
    config: Any = model.config
    shape = inspect_model(model)
    if family == "nemotron_h":
        given = {
            "heads": config.mamba_num_heads, "head_dim": config.mamba_head_dim,
            "state": config.ssm_state_size, "groups": config.n_groups, "conv": config.conv_kernel,
        }  # fmt: skip
    else:
        given = {
            "key_heads": config.linear_num_key_heads, "key_dim": config.linear_key_head_dim,
            "value_heads": config.linear_num_value_heads,
            "value_dim": config.linear_value_head_dim, "conv": config.linear_conv_kernel_dim,
        }  # fmt: skip
    entry = {
        "layers": len(shape.tiered_layers), "hidden": config.hidden_size, "gated": True,
        "intermediate": config.intermediate_size, "vocabulary": config.vocab_size, "tied": False,
        "query_heads": shape.kv.num_query_heads, "kv_heads": shape.kv.num_kv_heads,
        "head_dim": shape.kv.head_dim, "dtype": "float32",
        "beside": {"recurrent": len(shape.states), **given},
    }  # fmt: skip
    sizes = _from_entry("small", entry)
    held, _ = measure_states(model, shape)
    assert sizes.beside.state_bytes == sum(held.values())
    if family == "qwen3_5_text":
        count = sum(parameter.numel() for parameter in model.parameters())
        assert sizes.weights == pytest.approx(count, rel=0.02)  # but norms and convolutions
    load = Workload(
        model=known_models()["qwen3.5-9b"], hardware=hardware("orin-agx"), disk=PRESETS["nvme"],
        context=32768, batch=1, limit_bytes=256 << 20,
    )  # fmt: skip
    assert load.full_bytes == 8 * 32768 * 2 * 4 * 256 * 2
    for policy in ("full", "kvswap"):
        found = predict(make_policy(policy, 4), replace(load, limit_bytes=2 << 30))
        assert found.resident_bytes > load.state_bytes == 2 * 24 * (32 * 128 * 128 + 8192 * 2) * 4
