"""KVSwap's Table 4 predicted: how close, in which order, and that the count is honest."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.tuner import table4
from penstock.tuner.table4 import (
    TableCell,
    disks_of_table5,
    document,
    main,
    paper_table,
    predict_table,
    summary,
    wrong_orders,
)

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "plan-table4.json"


@cache
def known(disks: tuple[tuple[str, DeviceProfile], ...]) -> list[TableCell]:
    return predict_table(dict(disks))


def predicted(disks: Mapping[str, DeviceProfile] = PRESETS) -> list[TableCell]:
    return [*known(tuple(disks.items()))]


@pytest.fixture(autouse=True, scope="module")
def _predicted_once() -> Iterator[None]:
    """Each table takes a second, and the program asks for each twice."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table4, "predict_table", predicted)
        yield


def cell(policy: str, paper: float, predicted: float) -> TableCell:
    return TableCell(
        disk="nvme", policy=policy, context=16384, batch=1, paper=paper, predicted=predicted
    )


def test_the_table_is_whole() -> None:
    table = paper_table()
    assert {len(row) for rows in table["rows"].values() for row in rows.values()} == {10}
    assert table["rows"]["emmc"]["full"] == table["rows"]["nvme"]["full"]
    assert len(predicted()) == 2 * 7 * 10


def test_hits() -> None:
    assert cell("kvswap", 10.0, 12.9).is_hit
    assert not cell("kvswap", 10.0, 13.1).is_hit
    assert not cell("kvswap", 10.0, 6.9).is_hit
    assert not cell("flexgen", 0.1, 0.058).is_hit
    assert cell("flexgen", 0.1, 0.058).is_hit_as_printed
    assert not cell("flexgen", 0.1, 0.049).is_hit_as_printed


def test_orders() -> None:
    column = [cell("flexgen", 1.0, 1.0), cell("loki", 1.0, 0.5), cell("kvswap", 2.0, 0.9)]
    assert wrong_orders(column) == {"nvme 16K b=1": ["flexgen < kvswap"]}
    assert summary(column)["columns_in_order"] == 0
    assert summary(column[:2])["columns_in_order"] == 1


def test_memory_alone_is_predicted_closely() -> None:
    errors = [abs(made.error) for made in predicted() if made.policy == "full"]
    assert max(errors) < 0.1


def test_most_cells_of_kvswap_and_flexgen() -> None:
    total = summary(predicted())
    assert total["judged_cells"] == 40
    assert total["judged_hits_as_printed"] >= 32


def test_requests_of_table5_give_its_throughput() -> None:
    for name, profile in disks_of_table5().items():
        group_bytes = {"nvme": 4, "emmc": 8}[name] * 4096
        reads = 8 * 400 * 4096 / group_bytes * 32
        seconds = profile.steady_read_time_s(reads, reads * group_bytes)
        assert 8 / seconds == pytest.approx(paper_table()["no_reuse_tokens_per_s"][name])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table4.json"
    main(["--out", str(out)])
    text = capsys.readouterr().out
    assert "(46.8)" in text
    assert "of 40 cells within 30%" in text
    assert json.loads(out.read_text())["figures"]["summary"]["columns"] == 20


def test_the_committed_result_is_what_the_model_says() -> None:
    committed, figures = json.loads(RESULT.read_text())["figures"], document()["figures"]
    assert committed["summary"] == figures["summary"]
    kept = [made["predicted"] for made in committed["cells"]]
    assert kept == pytest.approx([made["predicted"] for made in figures["cells"]])
