"""What long outputs lose: the bench on a short one."""

from pathlib import Path

import numpy as np
import pytest

from penstock.bench.clusters.quality import FULL, PARTS, Trace, cell, parse_arguments, run, summary
from penstock.bench.figures.cluster_quality import draw_cluster_quality
from penstock.bench.result import Result
from penstock.core.errors import ConfigError

SMALL = ["--prompt", "256", "--output", "48", "--documents", "1", "--selected", "48",
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
    assert by_method[FULL]["as_full"] == 1
    assert by_method[FULL]["nats_over_full"] == 0
    assert by_method[FULL]["right"] > 0.8
    ours = by_method["dynakv"]
    assert len(ours["right_by_part"]) == PARTS
    assert 0.5 < ours["as_full"] <= 1
    assert ours["selected"] == 48
    assert ours["ledger_bytes"] < ours["full_bytes"] * 2
    assert str(tmp_path) not in out.read_text()
    names = [text.get_text() for text in draw_cluster_quality(result).legends[0].get_texts()]
    assert names == ["DynaKV", "static update"]


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


@pytest.mark.parametrize("wrong", [["--output", "4"], ["--prompt", "0"], ["--documents", "0"]])
def test_numbers_out_of_range(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="sizes count"):
        parse_arguments(wrong)
