"""Suite real at toy size: pairs, equal budgets, fidelity, going on, tables and the figure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.errors import ConfigError
from penstock.evaluate import accuracy, accuracy_fidelity, accuracy_jobs
from penstock.evaluate.accuracy_cells import Cell
from penstock.evaluate.accuracy_settings import at_fractions
from penstock.evaluate.answers import answer
from penstock.evaluate.real_table import fidelity_of, real_report
from penstock.evaluate.tasks.english.prompt_fit import TextTokenizer
from penstock.evaluate.tasks.real import passages
from research.figures.report import draw_all

STEPS = 8
FEW = ":selected_tokens=128"
OURS = f"kvswap@1/2{FEW}"
QUEST = f"quest@1/2{FEW}"
pytestmark = pytest.mark.usefixtures("shipped_once")


@pytest.fixture(scope="module")
def model(bpe: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template."""
    folder = tmp_path_factory.mktemp("real") / "toy"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=900, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    bpe.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "STEPS", STEPS)
    monkeypatch.setattr(accuracy_fidelity, "STEPS", STEPS)


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    return [
        "--suite=real", f"--model={model}", "--lengths=1000", "--samples=2", "--disk=memory",
        "--tasks=aggregation,fidelity_prose", "--fractions=1/2", f"--output={out}", *more,
    ]  # fmt: skip


def test_a_run_and_a_policy_more(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, picture = tmp_path / "real.json", tmp_path / "real.svg"
    accuracy.run(arguments(model, out, f"--policies=full,kvswap{FEW},kvswap@1/999"))
    first = {(c["setting"], c["task"]): c for c in json.loads(out.read_text())["figures"]["cells"]}
    full, ours = first["full", "aggregation"], first[OURS, "aggregation"]
    assert full["agreement"] == [1.0, 1.0]
    assert full["sparse_tokens"] == 0
    assert len(full["said"]) == len(ours["agreement"]) == 2
    assert ours["said"] == []
    assert 0 < ours["sparse_tokens"] <= ours["tokens"]
    assert ours["ledger_bytes"] <= ours["full_cache_bytes"] / 2
    assert "too little" in first["kvswap@1/999", "aggregation"]["refused"]

    asked: list[str] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[2].text)
        return answer(*args, **kwargs)

    monkeypatch.setattr(accuracy_jobs, "answer", counting)
    capsys.readouterr()
    more = (
        "--resume",
        f"--policies=full,kvswap{FEW},quest{FEW},kvswap@1/999",
        f"--figure={picture}",
    )
    result = accuracy.run(arguments(model, out, *more))
    assert asked == [QUEST], "full attention's answers were kept for the comparison"
    at = {(c["setting"], c["task"]): c for c in result.figures["cells"]}
    assert len(at[QUEST, "aggregation"]["agreement"]) == 2
    assert at[OURS, "aggregation"] == ours
    printed = capsys.readouterr().out
    assert "toy: prompts of 1,000 tokens, 1 tasks of 2 samples" in printed
    assert printed.count("kvswap@1/999") == 1
    assert "  refused: the smallest budget that would do is" in printed
    assert picture.read_text().startswith("<?xml")
    assert draw_all([out], tmp_path / "figures") == ["real"]


def test_fidelity_of_full_attention_and_of_a_selection(model: Path, tmp_path: Path) -> None:
    words = ["--tasks=fidelity_prose,fidelity_code", f"--policies=full,kvswap{FEW}"]
    result = accuracy.run(arguments(model, tmp_path / "real.json", *words))
    found = {(one["setting"], one["task"]): one for one in result.figures["fidelity"]}
    for text in ("fidelity_prose", "fidelity_code"):
        exact, dropped = found["full", text], found[OURS, text]
        assert exact["kl"] < 1e-6
        assert exact["same"] == 1.0
        assert exact["mass"] == pytest.approx(1.0)
        assert dropped["kl"] > exact["kl"]
        assert 0 < dropped["worst_mass"] <= dropped["mass"] < 1
    cells = [cell for cell in result.figures["cells"] if cell["setting"] == OURS]
    assert [len(cell["kl"]) for cell in cells] == [2, 2]
    assert [cell["sparse_tokens"] for cell in cells] == [2 * STEPS] * 2
    for cell in cells:
        assert 0 < cell["units_hit"] < cell["units_wanted"]
        assert cell["read_bytes"] > 0
    assert result.figures["summary"] == [], "no answer was asked for"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite=real"], "name one with --model"),
        (["--suite=real", "--model=x", "--haystack=book.txt"], "texts of its own"),
        (["--figure=a.png"], "--figure needs --suite real"),
        (["--suite=real", "--model=x", "--figure=a.gif"], "has to end in"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accuracy.parse_arguments(words)


def test_defaults() -> None:
    args = accuracy.parse_arguments(["--suite=real", "--model=x", "--device=cuda"])
    assert (args.samples, args.batch, args.tokens) == (24, 24, [4096, 8192, 16384, 30000])
    assert (args.chat, args.store) == (True, "memory")
    assert args.settings[:2] == ["full", "kvswap@1/13"]
    assert "louiskv@1/13:window_tokens=64,sink_tokens=4" in args.settings


def test_policies_get_every_fraction() -> None:
    texts = ["full,kvswap,quest@1/8,louiskv:tau=0.85"]
    assert at_fractions(texts, ["1/13", "1/34"]) == [
        "full", "kvswap@1/13", "quest@1/8", "louiskv@1/13:tau=0.85", "kvswap@1/34",
        "louiskv@1/34:tau=0.85",
    ]  # fmt: skip


def test_layers_are_means_over_samples_and_tables_rank() -> None:
    cell = Cell(length=9, task="fidelity_code", setting="a@1/2")
    for scores, mass in (([1.0], [0.9, 0.3]), ([0.5, 0.5, 0.5], [0.5, 0.7])):
        cell.merge(
            Cell(
                length=9, task=cell.task, setting="a@1/2", scores=scores, kl=scores, mass=mass,
                units_wanted=10, units_hit=6 + len(scores),
            )
        )  # fmt: skip
    [summary] = fidelity_of([cell])
    assert cell.mass == pytest.approx([0.6, 0.6])
    assert summary.samples == 4
    assert summary.same == pytest.approx(0.625)
    answers = [
        Cell(length=9, task="multi_hop", setting=name, scores=scores, any_order=scores)
        for name, scores in (("a@1/2", [0.0]), ("full", [1.0]), ("b@1/2:rank=8", [0.5]))
    ]
    lines = real_report([cell, *answers], "m").splitlines()
    names = [line.split()[0] for line in lines if "@1/2 " in line or line.startswith("full")]
    assert names == ["full", "b@1/2", "a@1/2"] * 2, "best first, full attention on top"
    assert lines[-1] == "b@1/2: rank=8"
    [fidelity, *_] = [line for line in lines if line.startswith("a@1/2")]
    assert "80%" in fidelity.split()
