"""`penstock generate --config` names the solution that ran, lets options win, refuses in a line."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.evaluate.tasks.recall import make_sample
from penstock.evaluate.tasks.sample import Sample
from penstock.methods.tuned_config import Figures, Solution, TunedConfig
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import load

LIMIT_BYTES = 2_000_000
FIGURES: Figures = {
    "tokens_per_s": 1.0, "first_token_s": 1.0, "resident_bytes": 1, "read_bytes_per_token": 1.0,
    "kl": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def digest() -> str:
    return fingerprint(load("recall").model)


@pytest.fixture(scope="module")
def sample() -> Sample:
    tokenizer = load("recall").tokenizer
    assert tokenizer is not None
    return make_sample("multi_key_few", 600, random.Random(1), tokenizer.get_vocab())


@pytest.fixture
def config(digest: str) -> TunedConfig:
    fields = {"group_tokens": 2, "selected_tokens": 256}
    solution = Solution(
        batch=1, context=1200, policy="kvswap", fields=fields, limit_bytes=LIMIT_BYTES,
        predicted=FIGURES, measured=None, reason="Fast.", is_pick=True,
    )  # fmt: skip
    streamed = replace(solution, policy="flexgen", fields={}, is_pick=False)
    return TunedConfig(
        model="recall", fingerprint=digest, disk="nvme", simulated=True, max_context=1200,
        max_batch=1, limit_bytes=LIMIT_BYTES, floor=0.1, adapter=None, explanation="",
        versions={}, solutions=(solution, streamed),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path, config: TunedConfig) -> Path:
    config.save(tmp_path / "config.json")
    return tmp_path / "config.json"


def run(sample: Sample, *arguments: object) -> Any:
    words = ["generate", "recall", "--prompt", sample.prompt, *map(str, arguments)]
    return CliRunner().invoke(app, words)


def document(sample: Sample, *arguments: object) -> Any:
    result = run(sample, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_config_gives_policy_memory_and_disk(path: Path, sample: Sample) -> None:
    result = run(sample, "--config", path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{sample.answer}\n"
    assert (
        "note: config: kvswap (group_tokens=2, selected_tokens=256) tuned for 1 x 1200 tokens, "
        "disk nvme" in result.stderr
    )
    assert "simulated NVMe" in " ".join(result.stderr.split())
    found = document(sample, "--config", path, "--policy", "auto")
    assert found["memory"]["limit_bytes"] == LIMIT_BYTES
    assert found["simulated"] == "nvme"
    assert found["notices"][0].startswith("config: kvswap (group_tokens=2")


def test_options_win(path: Path, sample: Sample) -> None:
    found = document(
        sample, "--config", path, "--policy", "flexgen", "--memory", "1/2", "--disk", "memory",
        "--max-new-tokens", 2,
    )  # fmt: skip
    assert found["policy"] == "flexgen"
    assert found["memory"]["limit_bytes"] == found["memory"]["full_cache_bytes"] // 2
    assert found["simulated"] is None
    assert found["notices"][0].startswith("config: flexgen (defaults) tuned for 1 x 1200")


def test_mistakes_are_one_line(tmp_path: Path, path: Path, sample: Sample) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "penstock-config-0"}')
    for arguments, message in (
        (("--policy", "auto"), "policy auto needs a tuned config: run penstock tune MODEL"),
        (("--config", tmp_path / "none.json"), "there is no config"),
        (("--config", tmp_path), "is a folder; give the file"),
        (("--config", bad), "in format penstock-config-0, and this one reads"),
        (("--config", path, "--policy", "loki"), "no solution of loki"),
        (("--config", path, "--max-new-tokens", 999), "tuned for up to 1200 tokens"),
    ):  # fmt: skip
        result = run(sample, *arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_another_models_config_is_refused(path: Path, config: TunedConfig, sample: Sample) -> None:
    replace(config, model="mine", fingerprint="00" * 16).save(path)
    result = run(sample, "--config", path)
    assert result.exit_code == 2
    assert "tuned for another model: mine (fingerprint 000000000000), not recall" in result.stderr
