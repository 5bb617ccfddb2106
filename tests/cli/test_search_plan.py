"""`penstock search plan`: the paper's figures before anything runs, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, Qwen3Config

from penstock.cli.search_plan import search_plan_command
from penstock.core.errors import (
    BudgetError,
    ConfigError,
    ModelLoadError,
    PenstockError,
    UnsupportedModelError,
)
from penstock.models.kv_shapes import known_kv_shapes, kv_shape
from penstock.models.plain_model import ARCHITECTURES
from penstock.testing.tiny_families import tiny_config
from penstock.tuner.model_sizes import model_sizes
from research.near_storage.smartssd_machine import SHAPES

FIGURE_7: dict[str, Any] = {"model": "opt-6.7b", "beams": 64, "memory": "7GiB"}


def plan(capsys: pytest.CaptureFixture[str], **settings: Any) -> dict[str, Any]:
    search_plan_command(**(FIGURE_7 | settings), as_json=True)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    search_plan_command(
        **FIGURE_7, step="32, 64,128", convention="paper-figure", bandwidth=12.5, seed=3
    )
    text = capsys.readouterr().out
    for figure in ("53,012", "2,052", "1,044", "540", "100.00 %", "3.87 %", "4,554 s"):
        assert figure in text
    assert "…" not in text  # nothing is cut off on a narrow terminal
    assert text.count("~") == 3 * 2 * 3 + 1
    assert "seed 3" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, step="32,64", max_new_tokens=384, bandwidth=2.0)
    rows = answer["strategies"]
    assert [row["step_tokens"] for row in rows] == [None, 32, 64, 32, 64, 32, 64]
    assert [row["is_estimate"] for row in rows] == [False] * 3 + [True] * 4
    loaded = [row["loaded_bytes"] for row in rows]
    assert loaded[0] > loaded[1] > loaded[3] > loaded[5] >= 0
    assert loaded[1] == answer["per_step_by_convention"]["start"]["32"]
    assert rows[1]["seconds"] == pytest.approx(loaded[1] / 2e9)
    assert rows[1]["share_of_baseline"] == pytest.approx(loaded[1] / loaded[0])
    assert answer["request"]["token_bytes"] == 16384


def test_everything_fits(capsys: pytest.CaptureFixture[str]) -> None:
    search_plan_command(model="qwen3-8b", beams=2, memory="7GiB")
    text = capsys.readouterr().out
    assert "%" not in text  # no share of nothing
    rows = plan(capsys, beams=2)["strategies"]
    assert [row["loaded_bytes"] for row in rows] == [0] * 4
    assert rows[0]["share_of_baseline"] is None


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "opt-66b"}, ConfigError, "known are opt-6.7b"),
        ({"dtype": "int8"}, ConfigError, "float16"),
        ({"memory": "lots"}, ConfigError, "cannot read"),
        ({"memory": "1023MiB"}, BudgetError, "give 1024MiB or more"),
        ({"beams": 0}, ConfigError, "beams=0"),
        ({"beams": 9}, ConfigError, "not a multiple of width=2"),
        ({"step": "32;64"}, ConfigError, "--step 32;64"),
        ({"step": "0"}, ConfigError, "--step 0"),
        ({"convention": "end"}, ConfigError, "paper-figure"),
        ({"bandwidth": -1.0}, ConfigError, "positive"),
        ({"bandwidth": float("nan")}, ConfigError, "--bandwidth nan"),
        ({"bandwidth": float("inf")}, ConfigError, "--bandwidth inf"),
        ({"seed": -1}, ConfigError, "--seed -1 must be 0 or more"),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[PenstockError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        search_plan_command(**(FIGURE_7 | settings))
    assert "\n" not in str(caught.value)


def test_dtype_doubles(capsys: pytest.CaptureFixture[str]) -> None:
    half, full = (
        plan(capsys, max_new_tokens=64, dtype=d)["request"] for d in ("float16", "float32")
    )
    assert full["token_bytes"] == 2 * half["token_bytes"]


def test_known_shapes_are_those_of_the_architectures() -> None:
    known = known_kv_shapes()
    for name in ("llama-3.1-8b", "qwen3-8b"):
        config: Any = ARCHITECTURES[name](1)
        assert known[name].num_layers == config.num_hidden_layers
        assert known[name].num_query_heads == config.num_attention_heads
        assert known[name].num_kv_heads == config.num_key_value_heads
        assert known[name].head_dim == 128
    for name in ("opt-6.7b", "qwen-7b"):
        assert known[name].num_layers == SHAPES[name].layers
        assert known[name].token_bytes == SHAPES[name].kv_bytes


def test_a_folder_says_its_shape(tmp_path: Path) -> None:
    config = OPTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64, vocab_size=32
    )
    config.save_pretrained(tmp_path)
    shape = kv_shape(tmp_path, "float16")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 4, 16)
    assert shape.dtype == torch.float16


def test_windowed_layers_count_too(tmp_path: Path) -> None:
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=64, vocab_size=32, use_sliding_window=True,
        sliding_window=8, layer_types=["full_attention", "sliding_attention"] * 2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert kv_shape(tmp_path).num_layers == 4


def test_a_search_with_latents_is_not_planned(tmp_path: Path) -> None:
    tiny_config("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="not as wide as its keys"):
        kv_shape(tmp_path)
    with pytest.raises(ConfigError, match="latent attention"):
        model_sizes(str(tmp_path))


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        kv_shape(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        kv_shape(tmp_path)
