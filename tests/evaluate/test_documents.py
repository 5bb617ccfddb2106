"""`penstock bench documents`: its figures are of what it says, and its command line is checked."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.documents import program, rates
from penstock.evaluate.documents.table import documents_table, speedup
from penstock.evaluate.result import Result
from research.figures import measured
from research.figures.chart import draw

matplotlib.use("Agg")
SMALL = [
    "--lengths", "512", "--memory", "2/3", "--questions", "2", "--rounds", "1",
    "--gigabytes", "0.01", "--units", "4096",
]  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("documents")
    place = folder / "store"
    place.mkdir()
    out = folder / "result.json"
    whole = rates.read_units
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rates, "read_units", lambda *args, **by: whole(*args, **{**by, "seconds": 0.1})
        )
        patch.setattr(program, "ANSWER_TOKENS", 4)
        program.run([*SMALL, "--store", str(place), "--out", str(out)])
    assert not list(place.iterdir()), "nothing is left behind"
    assert str(folder) not in out.read_text(), "no path of this machine"
    return Result.load(out)


def test_documents_are_asked_without_prefill(result: Result) -> None:
    [row] = result.figures["reopen"]
    assert row["same_answers"] == row["questions"] == 2
    assert row["restored_tokens"] == 2 * row["tokens"]
    assert 0 < row["prefilled_tokens"] < row["tokens"] / 4
    assert row["grown_bytes"] == 0
    assert row["opens"][0]["opened_bytes"] < row["written_bytes"] / 50
    assert speedup(row) > 0
    times = {"fresh_first_token_s": 8.0, "opens": [{"first_token_s": s} for s in (1.0, 9.0, 2.0)]}
    assert speedup(times) == 4


def test_rates_are_there(result: Result) -> None:
    [encryption], [verify] = result.figures["encryption"], result.figures["verify"]
    for kind in ("random_bytes_per_s", "verify_bytes_per_s"):
        assert all(len(rates) == 1 and rates[0] > 0 for rates in encryption[kind].values())
    assert verify["total_bytes"] >= 10_000_000
    assert verify["verify_bytes_per_s"][0] > 0


def test_table_and_figure(result: Result) -> None:
    table = documents_table(result)
    assert "2/2" in table
    assert "plain reading MB/s" in table
    assert len(draw(measured.documents(result)).axes) == 2
    with pytest.raises(ConfigError, match="no verify"):
        draw(measured.documents(replace(result, figures={"reopen": [], "encryption": []})))


def test_a_result_is_gone_on_with(result: Result, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    result.save(out)
    again = program.run([*SMALL, "--out", str(out), "--resume"])
    assert {**again.figures, "minutes": 0} == {**result.figures, "minutes": 0}
    assert json.loads(out.read_text())["kind"] == "documents"
    for wrong, why in (("--questions=5", "questions=2, not 5"), ("--seed=9", "seed=0, not 9")):
        with pytest.raises(ConfigError, match=f"cannot resume.*{why}"):
            program.run([*SMALL, wrong, "--out", str(out), "--resume"])
    assert Result.load(out).settings == result.settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "reopen,close"], "no 'close'"),
        (["--lengths", "many"], "takes numbers"),
        (["--lengths", "100"], "512 at least"),
        (["--rounds", "0"], "above 0"),
        (["--gigabytes", "-1"], "above 0"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        program.parse_arguments(arguments)
