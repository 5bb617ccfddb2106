"""What long outputs lose: the bench on a short one."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import BudgetError, ConfigError
from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.result import Result
from research.clusters import quality
from research.clusters.quality import FULL, PARTS, Trace, cell, parse_arguments, run, summary
from research.figures import clusters
from research.figures.chart import draw

SMALL = ["--prompt", "256", "--max-new-tokens", "16", "--documents", "1", "--selected", "48",
         "--window", "16"]  # fmt: skip


def test_a_short_walk(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    methods = "dynakv;dynakv:update=static,layout=tokens;full;quest:no_such=1"
    with pytest.raises(ConfigError, match="no_such"):
        run([*SMALL, "--methods", methods])
    methods = methods.rpartition(";")[0]
    result = run([*SMALL, "--methods", methods, "--out", str(out)])
    rows = Result.load(out).figures["rows"]
    assert rows == result.figures["rows"]
    assert next(row["method"] for row in rows) == FULL
    by_method = {row["method"]: row for row in rows}
    assert {row["steps"] for row in rows} == {15}, "of 16 tokens the prompt says the first"
    assert by_method[FULL]["as_full"] == 1
    assert by_method[FULL]["nats_over_full"] == 0
    assert by_method[FULL]["right"] > 0.8
    ours = by_method["dynakv"]
    assert len(ours["right_by_part"]) == PARTS
    assert 0.5 < ours["as_full"] <= 1
    assert ours["selected"] == 48
    assert ours["ledger_bytes"] < ours["full_bytes"] * 2
    assert str(tmp_path) not in out.read_text()
    names = [text.get_text() for text in draw(clusters.quality(result)).legends[0].get_texts()]
    assert names == ["DynaKV", "static update"]


def test_processes_share_what_was_said(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, out = tmp_path / "traces", tmp_path / "all.json"
    methods = ["full", "dynakv", "quest"]
    shared = [
        *SMALL[:2], "--max-new-tokens", "16", "--documents", "2", *SMALL[6:], "--model",
        str(shallow), "--traces", str(traces),
    ]  # fmt: skip
    parts = [
        run([*shared, "--document", str(number), "--methods", method]).figures["rows"]
        for number, method in ((1, "full"), (0, "dynakv"), (0, "full"), (1, "dynakv"))
    ]
    assert [[(row["document"], row["method"]) for row in part] for part in parts] == [
        [(1, "full")], [(0, "dynakv")], [(0, "full")], [(1, "dynakv")],
    ]  # fmt: skip
    assert "as_full" not in parts[1][0], "nothing to compare with"
    assert len(list(traces.iterdir())) == 4

    def refuse(loaded: object, text: object, setting: Setting, on_step: object) -> None:
        assert setting.text == "quest", "asked again"
        raise BudgetError("too small")

    monkeypatch.setattr(quality, "decode", refuse)
    result = run([*shared, "--methods", ";".join(methods), "--out", str(out)])
    rows = {(row["document"], row["method"]): row for row in result.figures["rows"]}
    assert set(rows) == {(number, method) for number in (0, 1) for method in methods}
    for number in (0, 1):
        assert rows[number, "quest"]["error"] == "too small"
        assert rows[number, "full"]["as_full"] == 1
        assert 0 <= rows[number, "dynakv"]["as_full"] <= 1
    for [row], key in zip(parts, ((1, "full"), (0, "dynakv")), strict=False):
        assert {k: rows[key][k] for k in row} == row
    assert str(tmp_path) not in out.read_text()
    found = run([*shared, "--methods", "full;dynakv", "--kept"]).figures["rows"]
    assert [(row["document"], row["method"]) for row in found] == [
        (number, method) for number in (0, 1) for method in ("full", "dynakv")
    ]  # fmt: skip
    assert run([*shared, "--methods", "full;quest", "--kept"]).figures["rows"] == []
    with pytest.raises(AssertionError, match="asked again"):
        run([*shared, "--methods", "dynakv", "--chunk", "64", "--document", "0"])
    for path in traces.iterdir():
        path.write_bytes(b"torn")
    torn = run([*shared, "--methods", "full"]).figures["rows"]
    assert all("delete it" in row["error"] for row in torn)


def test_cells_are_what_they_say() -> None:
    right = np.arange(16)
    full = Trace(right.copy(), np.full(16, 0.5))
    said = right.copy()
    said[8:] += 1
    found = cell(Trace(said, np.full(16, 1.5)), full, right)
    assert found["right"] == found["as_full"] == 0.5
    assert found["right_by_part"] == [1.0] * 4 + [0.0] * 4
    assert found["nats_over_full"] == 1.0
    means = summary([{"method": "a", **found}, {"method": "a", **cell(full, full, right)}])
    assert means[0]["right"] == 0.75
    assert means[0]["documents"] == 2
    assert summary([{"method": "b", "error": "too small"}]) == [
        {"method": "b", "error": "too small"}
    ]


def test_a_saved_command_still_counts_tokens_with_output() -> None:
    args = parse_arguments(["--output", "3072", "--out", "old.json"])
    assert (args.output, args.out) == (3072, "old.json")
    args = parse_arguments(["--max-new-tokens", "64", "--output", "new.json"])
    assert (args.output, args.out) == (64, "new.json")


@pytest.mark.parametrize(
    "wrong", [["--max-new-tokens", "4"], ["--prompt", "0"], ["--documents", "0"]]
)
def test_numbers_out_of_range(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="sizes count"):
        parse_arguments(wrong)
    with pytest.raises(ConfigError, match="not one of 2"):
        parse_arguments(["--document", "2"])
    with pytest.raises(ConfigError, match="name it"):
        parse_arguments(["--kept"])
