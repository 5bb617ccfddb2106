"""`penstock generate`: the answer on stdout, everything else on stderr, or one JSON document."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.evaluate.tasks.recall import make_sample
from penstock.evaluate.tasks.sample import Sample
from penstock.models.loader import load


@pytest.fixture(scope="module")
def sample() -> Sample:
    tokenizer = load("recall").tokenizer
    assert tokenizer is not None
    return make_sample("multi_key_few", 300, random.Random(1), tokenizer.get_vocab())


@pytest.fixture
def prompt_file(tmp_path: Path, sample: Sample) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(sample.prompt)
    return path


def run(*arguments: object, **extra: Any) -> Any:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], **extra)
    assert result.exit_code == 0, result.output
    return result


def test_the_answer_alone_is_on_stdout(prompt_file: Path, sample: Sample) -> None:
    result = run("recall", "--prompt-file", prompt_file, "--memory", "1/4")
    assert result.stdout == f"{sample.answer}\n"
    assert "prefill 100 %" in result.stderr
    for figure in ("KV cache", "weights", "process", "of the full", "hit rate", "stall share"):
        assert figure in result.stderr


def test_json_is_one_document(prompt_file: Path, sample: Sample) -> None:
    result = run("--prompt-file", prompt_file, "--memory", "1/4", "--json")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert document["answer"] == sample.answer
    assert document["finish_reason"] == "stop"
    assert document["prompt_tokens"] == 300
    assert document["new_tokens"] == len(document["token_ids"]) == sample.max_new_tokens
    memory = document["memory"]
    assert sum(memory["items"].values()) == memory["used_bytes"] <= memory["peak_bytes"]
    assert memory["peak_bytes"] <= memory["limit_bytes"] == memory["full_cache_bytes"] // 4
    assert document["decode"]["read_bytes"] > 0
    assert document["simulated"] is None
    assert document["weights_bytes"] > 10 << 20
    assert document["process_peak_bytes"] > document["weights_bytes"]
    assert document["device_peak_bytes"] is None


def test_a_simulated_disk_is_called_so(prompt_file: Path, sample: Sample) -> None:
    options = (
        "--prompt-file", prompt_file, "--memory", "1/3", "--disk", "nvme", "--max-new-tokens", 2,
    )  # fmt: skip
    document = json.loads(run(*options, "--json").stdout)
    assert document["simulated"] == "nvme"
    assert "simulated" in document["store"]
    assert "(simulated disk)" in run(*options).stderr


def test_the_prompt_may_come_through_a_pipe(sample: Sample) -> None:
    result = run("--prompt-file", "-", "--memory", "1/4", input=sample.prompt)
    assert result.stdout == f"{sample.answer}\n"
    bad = CliRunner().invoke(app, ["generate", "--prompt-file", "-"], input=b"\xff\xfe")
    assert bad.exit_code == 2
    assert bad.stderr == "error: the prompt on stdin is not UTF-8 text\n"


GRASS = "The grass is green . The sky is blue . " * 40


@pytest.fixture(scope="module")
def plain_tokens() -> list[int]:
    """What the plain model says behind `GRASS`."""
    loaded = load("recall", dtype="float32")
    model: Any = loaded.model
    assert loaded.tokenizer is not None
    inputs = loaded.tokenizer(GRASS, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    return list(tokens.tolist())


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("kvswap", ("--exact",)),
        ("full", ("--exact",)),
        ("flexgen", ("--exact",)),
        ("kvswap", ("--verify", 5)),
    ],
)
def test_exact_and_verified_give_the_plain_models_tokens(
    policy: str, how: tuple[object, ...], plain_tokens: list[int]
) -> None:
    memory = "auto" if policy == "full" else "1/2"
    options = (
        "--max-new-tokens", 8, "--policy", policy, "--memory", memory, *how, "--json",
        "--dtype", "float32",
    )  # fmt: skip
    answer = json.loads(run("--prompt", GRASS, *options).stdout)
    assert answer["token_ids"] == plain_tokens
    assert (answer["verified"] is not None) == ("--verify" in how)
    assert (answer["verify"]["steps"] > 0) == ("--verify" in how)


def test_trace_is_a_chrome_trace(prompt_file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    run("--prompt-file", prompt_file, "--memory", "1/3", "--trace", trace, "--max-new-tokens", 2)
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"compute", "disk read", "disk write"} <= tracks
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0, "times are from the first one"
    assert any(event["dur"] > 0 for event in spans)


def test_sampling_with_a_seed_repeats() -> None:
    options = (
        "--prompt", "The grass is green .", "--temperature", 3.0, "--max-new-tokens", 4, "--json",
        "--seed",
    )  # fmt: skip
    first, again, other = (json.loads(run(*options, seed).stdout) for seed in (1, 1, 2))
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"] != other["token_ids"]
