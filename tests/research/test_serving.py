"""`python -m research.serving`: clients at once beside one after another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from penstock.core.errors import PenstockError
from penstock.evaluate.result import Result
from penstock.generation.serving.request import Request
from research.serving.paged import paged
from research.serving.program import run
from tests.ready_process import forks


def test_a_run_compares_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = forks()  # processes that have made their imports
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: ready)
    out, text = tmp_path / "result.json", tmp_path / "text.txt"
    text.write_text("the sky is blue . the grass is green . " * 80)
    options = [
        "--text", str(text), "--tokens", "40", "60", "--answer", "6", "--memory", "64MiB",
        "--running", "2", "--alone", "2", "--disk", "memory", "--dtype", "float32",
        "--output", str(out),
    ]  # fmt: skip
    run(["--clients", "1", *options])
    run(["--clients", "3", "--reopen", "200", "--resume", *options])
    figures = Result.load(out).figures
    again = figures["reopened"]
    assert again["same_answer"]
    assert again["going_on_cached_tokens"] == again["reopened_cached_tokens"] == 200 + 5
    one, three = figures["rows"]
    assert (one["clients"], three["clients"]) == (1, 3)
    assert one["together"]["new_tokens"] == 6
    assert three["together"]["new_tokens"] == 18
    assert three["together"]["prompt_tokens"] == 140
    assert three["same_answers"] == three["alone_clients"] == 2
    assert 1 < three["together"]["rows_per_step"] <= 2
    assert 0 < three["together"]["promised_bytes"] <= three["together"]["budget_bytes"] == 64 << 20


def test_a_shape_with_random_weights_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    run([
        "--model", "tiny", "--clients", "2", "--tokens", "30", "40", "--answer", "3",
        "--memory", "8MiB", "--disk", "memory", "--output", str(out),
    ])  # fmt: skip
    [row] = Result.load(out).figures["rows"]
    assert row["together"]["prompt_tokens"] == 70
    assert row["together"]["new_tokens"] == 6


class Paged:
    """Stands for a model that transformers batches: two requests, told in another order."""

    def __init__(self, new_tokens: int) -> None:
        self.device, self.config = torch.device("cpu"), SimpleNamespace(_attn_implementation="x")
        self.generation_config, self.new_tokens = GenerationConfig(eos_token_id=5), new_tokens

    def generate_batch(self, inputs: list[list[int]], **given: Any) -> dict[str, Any]:
        assert inputs == [[3, 4], [5, 6, 7]]
        asked = given["generation_config"]
        assert (asked.max_new_tokens, asked.eos_token_id, asked.do_sample) == (2, -1, False)
        times = ([10.0, 13.0], [12.0, 13.5])
        return {
            str(number): SimpleNamespace(
                generated_tokens=[1] * self.new_tokens, created_time=9.0, timestamps=each
            )
            for number, each in enumerate(times)
        }


def test_what_transformers_batches_is_summed() -> None:
    requests = [Request(prompt=[3, 4]), Request(prompt=[5, 6, 7])]
    model: Any = Paged(2)
    found = paged(model, requests, 2)
    assert (found["seconds"], found["new_tokens"], found["tokens_per_s"]) == (4.5, 4, 4 / 4.5)
    assert (found["first_token_p50_s"], found["between_p50_s"]) == (2.0, 2.25)
    assert model.generation_config.eos_token_id == 5
    model.new_tokens = 1
    with pytest.raises(PenstockError, match="every request"):
        paged(model, requests, 2)
