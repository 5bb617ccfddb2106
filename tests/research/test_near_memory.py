"""`python -m research.near_storage.memory`: bytes of all processes, and budgets that match them."""

import json
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, PromptError
from penstock.methods.kvswap.policy import KVSwap
from research.near_storage import memory
from research.near_storage.decode_run import OURS, PLAIN
from research.near_storage.memory import INT4, KVSWAP, case_of, total_of
from tests.research.drawn_figures import figures_drawn


def test_rows_hold_what_their_processes_hold(
    four_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "memory.json", tmp_path / "text.txt"
    text.write_text("the sky is blue . the grass is green . " * 80)
    memory.run([
        f"--model={four_layers}", f"--text={text}", "--lengths=512", "--budgets=9/10",
        "--alpha=0.2", "--steps=2", "--rounds=2", "--warm=2", f"--output={out}",
    ])  # fmt: skip
    assert "HillInfer, INT4 codes" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    rows = document["figures"]["rows"]
    assert [row["name"] for row in rows] == ["full", OURS, INT4, PLAIN, KVSWAP, KVSWAP, KVSWAP]
    assert not any("error" in row for row in rows)
    for row in rows:
        assert row["total_bytes"] == total_of(row) == row["main_bytes"] + sum(row["device_bytes"])
        assert len(row["device_bytes"]) == (row["name"] in (OURS, INT4))
        assert 0 < row["loss"] < 30
    near, matched = rows[1], rows[3]
    assert near["total_bytes"] > near["main_bytes"] + (4 << 20), "a process of its own"
    assert figures_drawn(out) == ["memory"]
    assert matched["method"] != f"{PLAIN}@9/10", "its budget is what the device cost, too"


def test_kvswap_selects_what_a_user_gets() -> None:
    assert case_of(KVSWAP, "1/4", length=4096, alpha=0.1).policy == KVSwap()
    near = case_of(INT4, "1/4", length=4096, alpha=0.1)
    assert near.method == "hillinfer@1/4:bits=4"
    assert near.policy.selected_tokens == 410  # type: ignore[attr-defined]


def test_bad_input_is_refused(four_layers: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the sky is blue .")
    few = [f"--model={four_layers}", f"--text={tmp_path / 'text.txt'}", "--lengths=512"]
    with pytest.raises(PromptError, match="give more --text"):
        memory.run(few)
    with pytest.raises(ConfigError, match="--alpha"):
        memory.run([*few, "--alpha=1"])
