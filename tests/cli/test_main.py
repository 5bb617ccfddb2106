"""What goes wrong is one line on stderr and an exit code; nothing of it is a traceback."""

import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from penstock.cli.calibrate import told_ranks
from penstock.cli.entry import main
from penstock.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, app, next_step
from penstock.core.errors import BudgetError, ConfigError
from penstock.engine.adapter import LayerAdapter, LowRankAdapter
from penstock.kernels.native import compiled

RECALL = Path(__file__).parents[2] / "src" / "penstock" / "models" / "recall"
PROMPT = "The grass is green . The sky is blue ."


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_line(result: Any, code: int = EXIT_BAD_INPUT) -> str:
    """The one line of a failed run."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    # Progress may have been shown before the error, and what to try stands behind it.
    [line] = [line for line in lines if not line.startswith(("prefill", "try: "))]
    assert line.startswith("error: ")
    return str(line)


@pytest.mark.parametrize("level", ["", "AVX512", "vnni "])
def test_an_unknown_level_of_the_kernels_is_one_line(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", level)
    line = error_line(run("devices"))
    assert line.startswith(f"error: PENSTOCK_KERNELS: the compiled kernels have no level '{level}'")


@pytest.mark.skipif(compiled.kernel("copy_runs") is None, reason="kernels may not be used")
def test_a_command_uses_the_kernels_that_the_environment_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    former = compiled.limited_to()
    try:
        monkeypatch.setenv("PENSTOCK_KERNELS", "off")
        assert run("config").exit_code == 0
        assert compiled.limited_to() == "off"
        assert compiled.kernel("copy_runs") is None
    finally:
        compiled.limit(former)


def save_model(folder: Path, model_type: str, **sizes: int) -> Path:
    """A tiny random model of a family, with the bundled tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=1472, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECALL / name, folder)
    return folder


def test_missing_model_folder() -> None:
    line = error_line(run("generate", "/no/such/model", "--prompt", PROMPT))
    assert "no model folder /no/such/model" in line


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
        ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    ],
)
def test_unsupported_family(tmp_path: Path, model_type: str, sizes: dict[str, int]) -> None:
    folder = save_model(tmp_path / model_type, model_type, **sizes)
    line = error_line(run("generate", folder, "--prompt", PROMPT))
    assert model_type in line.lower()


def test_budget_too_small_says_how_much_would_do() -> None:
    line = error_line(run("generate", "recall", "--prompt", PROMPT * 50, "--memory", "20KiB"))
    assert "smallest budget that would do" in line
    assert "1 sequence of" in line
    result = run("generate", "recall", "--prompt", PROMPT * 50, "--memory", "20KiB")
    step = result.stderr.splitlines()[-1]
    found = re.match(r"try: --memory (\S+iB)", step)
    assert found is not None, step
    again = run("generate", "--prompt", PROMPT * 50, "--memory", found[1], "--max-new-tokens", 1)
    assert again.exit_code == 0, again.output
    error = BudgetError("too little", needed_bytes=5 << 20)
    error.adapter_bytes, error.fitting = 4 << 20, ("quest", "loki", "leoam", "arkvale")
    assert next_step(error) == (
        "--memory 5MiB; or penstock calibrate, with whose --adapter 4MiB would do; or --policy "
        "quest or loki or leoam, which would fit"
    )
    assert next_step(BudgetError("?")) == next_step(ConfigError("?")) == ""


@pytest.mark.parametrize("memory", ["much", "0", "1/0", "-5", "2"])
def test_memory_that_is_no_size(memory: str) -> None:
    for words in (("generate", "none"), ("search", "none"), ("demo",), ("plan", "--model=none")):
        line = error_line(run(*words, f"--memory={memory}"))
        assert memory in line
    assert "write 2GiB" in error_line(run("generate", "--memory=2"))


def test_unknown_policy() -> None:
    line = error_line(run("generate", "recall", "--prompt", PROMPT, "--policy", "kvswop"))
    assert "kvswap" in line


def test_a_disk_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("generate", "recall", "--prompt", PROMPT, "--disk", tmp_path / "file")
    assert result.exit_code in (EXIT_FAILED, EXIT_BAD_INPUT)
    assert str(tmp_path / "file") in error_line(result, result.exit_code)


def test_a_disk_that_may_not_be_written() -> None:
    result = run("generate", "recall", "--prompt", PROMPT, "--disk", "/proc/penstock")
    assert result.exit_code in (EXIT_FAILED, EXIT_BAD_INPUT)
    assert "/proc/penstock" in error_line(result, result.exit_code)


def test_adapter_of_another_model(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folder = save_model(tmp_path / "other", "llama", **sizes)
    (tmp_path / "text").write_text(PROMPT * 20)
    adapter = tmp_path / "adapter.safetensors"
    made = run("calibrate", folder, "--text", tmp_path / "text", "-o", adapter)
    assert made.exit_code == 0, made.output
    result = run("generate", "recall", "--prompt", PROMPT, "--adapter", adapter)
    assert "adapter" in error_line(result)
    assert "another model" in error_line(result)


def test_adapter_that_is_none(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "tensors")
    (tmp_path / "text").write_text("no tensors")
    for name in ("tensors", "text", "missing"):
        result = run("generate", "recall", "--prompt", PROMPT, "--adapter", tmp_path / name)
        assert name in error_line(result)


def test_prompt_longer_than_the_positions(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("grass " * 41_000)
    line = error_line(run("generate", "recall", "--prompt-file", tmp_path / "long"))
    assert "40,960 positions" in line


@pytest.mark.parametrize("prompt", ["", "   "])
def test_zero_tokens(prompt: str) -> None:
    assert "zero tokens" in error_line(run("generate", "recall", "--prompt", prompt))


def test_prompt_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "No such file"), ("", "a folder"), ("binary", "UTF-8")):
        assert said in error_line(run("generate", "recall", "--prompt-file", tmp_path / name))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of --prompt, --prompt-file and --messages"),
        (["--prompt", "a", "--prompt-file", "b"], "one of --prompt, --prompt-file"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1"),
        (["--prompt", "a", "--chunk", "0"], "prefill_chunk_size=0"),
        (["--prompt", "a", "--trace", "/no/such/folder/t.json"], "--trace"),
        (["--prompt", "a", "--device", "abacus"], "abacus"),
        (["--prompt", "a", "--device", "xla"], "has no such device; write cpu or cuda"),
        (["--prompt", "a", "--device", "mps"], "device=mps: Apple's GPUs are not supported"),
        (["--prompt", "a", "--n", "2"], "set a temperature above 0, or n=1"),
        (["--prompt", "a", "--min-p", "2"], "min_p=2"),
        (["--prompt", "a", "--device", "meta"], "device=meta computes nothing"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan must be 0"),
        (["--prompt", "a", "--seed", "99999999999999999999"], "seed=99999999999999999999"),
        (["--prompt", "a\udcff"], "the prompt is not UTF-8 text"),
    ],
)
def test_impossible_options(options: list[str], said: str) -> None:
    assert said in error_line(run("generate", "recall", *options))


def test_a_mistyped_option_is_the_parsers_business() -> None:
    result = run("generate", "--prompt-fil", "x")
    assert result.exit_code == EXIT_BAD_INPUT
    assert "--prompt-fil" in result.stderr


def test_what_nobody_foresaw_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr("penstock.generation.model_choice.load", explode)
    line = error_line(run("generate", "recall", "--prompt", PROMPT), EXIT_FAILED)
    assert line == "error: unexpected ZeroDivisionError: a b (--debug shows where)"
    result = run("--debug", "generate", "recall", "--prompt", PROMPT)
    assert isinstance(result.exception, ZeroDivisionError)


def test_version() -> None:
    assert run("--version").stdout.startswith("penstock 0.")


def test_calibrate_says_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(PROMPT * 30)
    adapter = tmp_path / "adapter.safetensors"
    result = run(
        "calibrate", "recall", "--text", tmp_path / "text", "--output", adapter, "--rank", 64
    )
    assert result.exit_code == 0, result.output
    assert str(adapter) in result.stderr.replace("\n", "")
    used = run(
        "generate", "recall", "--prompt", PROMPT, "--adapter", adapter, "--json",
        "--max-new-tokens", 2,
    )  # fmt: skip
    assert used.exit_code == 0, used.output
    assert not any("prompt" in notice for notice in json.loads(used.stdout)["notices"])


@pytest.mark.parametrize(("cost", "told"), [(0.0, "rank 32 is 32 32"), (9.0, "rank 32 is 40 24")])
def test_calibrate_says_what_each_layer_needs(cost: float, told: str) -> None:
    """Layers that need the same are not told."""
    basis = LayerAdapter(torch.eye(64), torch.ones(64))
    costs = (tuple(cost if units < 5 else 0.0 for units in range(1, 9)), (0.0,) * 8)
    said = told_ranks(LowRankAdapter([basis] * 2, "f", 9, selection_cost=costs))
    assert said == (f"\nby what each layer needs, {told}" if cost else "")


def test_calibrate_with_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    out = tmp_path / "adapter.safetensors"
    assert "zero tokens" in error_line(
        run("calibrate", "recall", "--text", tmp_path / "empty", "-o", out)
    )
    assert "text file" in error_line(
        run("calibrate", "recall", "--text", tmp_path / "none", "-o", out)
    )
    assert not out.exists()


@pytest.mark.parametrize(
    "command", ["generate --prompt-file -", "doc add recall - --name new"], ids=str
)
def test_stdin_that_is_closed(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it behind a shell's `<&-`
    with pytest.raises(SystemExit) as done:
        app(command.split())
    assert done.value.code == EXIT_BAD_INPUT
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("was to come on stdin, which is closed")


def test_what_stdouts_encoding_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which gets back what the entry point changes of it."""
    raw = io.BytesIO()
    words = ["penstock", "doc", "ls", "--library", str(tmp_path / "caf\xe9")]
    former = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii", write_through=True))
        try:
            with pytest.raises(SystemExit) as done:
                main()
        finally:
            signal.signal(signal.SIGINT, former)
        assert not done.value.code
        assert b"caf\\xe9;" in raw.getvalue()


def test_a_home_folder_that_is_not_there() -> None:
    line = error_line(run("fetch", "recall-7m", "--to", "~nobody-here/model"))
    assert "--to ~nobody-here/model: there is no such home folder" in line
    line = error_line(run("search", "plan", "--model", "~nobody-here/x", "--memory", "1GiB"))
    assert "~nobody-here/x is no folder" in line
    line = error_line(run("search", "--prompt", "x", "--scorer", "reward:~nobody-here/x"))
    assert "no config.json in ~nobody-here/x" in line
