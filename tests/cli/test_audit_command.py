"""`penstock audit`: tables on stdout, progress on stderr, what goes wrong as one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from penstock.cli.main import EXIT_BAD_INPUT, app

RECALL = Path(__file__).parents[2] / "src" / "penstock" / "models" / "recall"


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("The grass is green . The sky is blue . " * 30)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_a_folder_of_a_model_with_sliding_layers(tmp_path: Path, prompt_file: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma2", vocab_size=1472, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=24,
    )  # fmt: skip
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECALL / name, folder)
    result = run(
        folder, "--prompt-file", prompt_file, "--policies", "full,kvswap:selected_tokens=32",
        "--max-new-tokens", 4, "--past-end", "--disk", "memory", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "full attention decodes" in result.stderr
    *shown, last = result.stdout.splitlines()
    figures = json.loads(last)["figures"]
    assert (figures["layers"], figures["left_out_layers"]) == ([1], [0])
    full, kvswap = figures["policies"]
    assert full["mean_mass"] == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < kvswap["mean_mass"] < 1.0
    text = "\n".join(shown)
    assert "layers with a window of their own, always whole: 0" in text
    assert "no low-rank adapter" in text
    assert json.loads(last)["settings"]["model"] == "model"
    assert str(tmp_path) not in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model", "--prompt-file", "{prompt}"], "no model folder /no/such/model"),
        (["recall", "--prompt-file", "/no/such/file"], "cannot read prompt file"),
        (["recall", "--prompt-file", "{prompt}", "--policies", "kvswop@1/2"], "kvswap"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, prompt_file: Path) -> None:
    result = run(*(word.format(prompt=prompt_file) for word in arguments))
    assert result.exit_code == EXIT_BAD_INPUT, result.output
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if not line.startswith("loading")]
    assert line.startswith("error: ")
    assert message in line
