"""What the simulated SmartSSD PC is asked: splits, sources, sensitivity; program and figures."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures.report import charts_of
from research.near_storage.smartssd import (
    LOCALITY,
    RIVALS,
    calibration,
    needed,
    parse_arguments,
    run,
    sensitivity,
    speedup,
    splits,
)
from research.near_storage.smartssd_machine import (
    ASSUMED,
    ASSUMED_LOCALITY,
    PAPER,
    SHAPES,
    SHEET,
    Constants,
    Workload,
    divide,
    listed,
    read_locality,
)
from research.near_storage.smartssd_step import ABLATIONS, INT8, JOINT, choose_split, hillinfer_step
from tests.research.drawn_figures import figures_drawn

RULES = ("both", "naive")
LONG = Workload(shape=SHAPES["qwen-7b"], tokens=36 * 1024)

# Splits -------------------------------------------------------------------------------------------


def test_the_split_of_the_model_is_eq_4s() -> None:
    middle = replace(LONG, tokens=12 * 1024)
    as_eq2, joint, skewed, bound = splits(Constants(), middle, LONG, ASSUMED_LOCALITY)
    for sweep in (as_eq2, skewed):
        assert sweep["eq4_beta"] == pytest.approx(sweep["best_beta"], rel=0.1)
        assert sweep["eq4_ms"] == pytest.approx(sweep["best_ms"], rel=0.01)
    assert skewed["eq4_beta"] < as_eq2["eq4_beta"]
    assert as_eq2["eq4_beta"] == pytest.approx(as_eq2["unbounded_beta"], rel=1e-3)
    # One selection over both pools is what Eq. 2 does not describe.
    assert joint["best_beta"] > 1.1 * joint["eq4_beta"]
    assert joint["best_ms"] < joint["eq4_ms"]
    assert bound["eq4_beta"] == bound["best_beta"] == bound["max_beta"] < bound["unbounded_beta"]
    shown = [point["ms"] for point in as_eq2["points"]]
    assert min(shown) >= as_eq2["best_ms"] * (1 - 1e-9)
    assert len(shown) > 100


@pytest.mark.parametrize("tokens", [8, 12, 16])
def test_one_selection_has_a_better_split_than_eq_4s(tokens: int) -> None:
    pc, work = Constants(), replace(LONG, tokens=1024 * tokens)
    most = divide(pc, work).host
    best = min(
        hillinfer_step(pc, work, ASSUMED_LOCALITY, INT8, hot_tokens=most * part // 200).step_s
        for part in range(201)
    )
    joint = hillinfer_step(pc, work, ASSUMED_LOCALITY, JOINT).step_s
    assert joint <= best * 1.005
    assert hillinfer_step(pc, work, ASSUMED_LOCALITY, INT8).step_s >= joint


def test_without_app_as_many_are_cold_as_hot() -> None:
    work = replace(LONG, tokens=12 * 1024)
    unbalanced = choose_split(Constants(), work, ASSUMED_LOCALITY, ABLATIONS[-1])
    assert unbalanced.hot_tokens == pytest.approx(unbalanced.cold_tokens, abs=1)


# What decides -------------------------------------------------------------------------------------


def test_every_constant_has_a_source() -> None:
    rows = listed(Constants())
    assert {row["name"] for row in rows} == {each.name for each in fields(Constants)}
    for row in rows:
        assert row["origin"] in (PAPER, SHEET, ASSUMED), row
        assert row["unit"]
        assert row["source"], row


def test_sensitivity_asks_every_constant() -> None:
    pc = Constants()
    rows = {row["name"]: row for row in sensitivity(pc, LONG, ASSUMED_LOCALITY, INT8)}
    assert set(rows) == {*(each.name for each in fields(Constants)), "alpha", LOCALITY}
    now = {name: speedup(pc, LONG, ASSUMED_LOCALITY, INT8, name) for name in RIVALS}
    for name in RIVALS:
        # A faster plain SSD is the baselines', a faster FPGA path HillInfer's.
        assert rows["ssd_bandwidth"]["0.8"][name] > now[name] > rows["ssd_bandwidth"]["1.2"][name]
        assert rows["device_internal"]["0.8"][name] < now[name]
        assert rows["device_internal"]["1.2"][name] > now[name]
        assert rows[LOCALITY]["0.8"][name] < now[name] < rows[LOCALITY]["1.2"][name]
    assert next(iter(rows)) in ("ssd_bandwidth", "device_internal")


def test_what_a_speedup_would_take_gives_it() -> None:
    pc, target = Constants(), 2.0
    rows = {row["constant"]: row for row in needed(pc, LONG, ASSUMED_LOCALITY, INT8, target)}
    ssd = rows["ssd_bandwidth"]["needed"]
    for name in RIVALS:
        assert ssd[name] < pc.ssd_bandwidth
        there = replace(pc, ssd_bandwidth=ssd[name])
        assert speedup(there, LONG, ASSUMED_LOCALITY, INT8, name) == pytest.approx(target, rel=1e-6)
    easy = needed(pc, LONG, ASSUMED_LOCALITY, INT8, 0.01)[0]
    assert easy["needed"] == dict.fromkeys(RIVALS, easy["now"])
    hard = needed(pc, LONG, ASSUMED_LOCALITY, INT8, 1e6)[0]
    assert hard["needed"] == dict.fromkeys(RIVALS)


def test_figure_3a() -> None:
    found = calibration(Constants())
    kv = 8 * 12288 * 32 * 2 * 8192
    assert found["ours_ms"] == pytest.approx([1e3 * share * kv / 6.5e9 for share in (0.2, 0.3)])
    low, high = found["bandwidth_for_2000_ms"]
    assert low < Constants().ssd_bandwidth < high, "20 or 30 % of it take the paper's 2,000 ms"


# Locality, program, figures -----------------------------------------------------------------------


def placement(**changes: Any) -> dict[str, Any]:
    return {
        "rule": "both", "hot_share": 0.4, "alpha": 0.2, "selected": 100.0,
        "hot_share_of_selected_later": 0.8, "promoted_later": {"mean": 20.0}, **changes,
    }  # fmt: skip


def recorded(path: Path, rows: list[dict[str, Any]]) -> str:
    Result(
        kind="near_storage.placement", command="", settings={}, seed=0, machine={}, libraries={},
        commit="", date="", figures={"streams": [{"rows": rows}]},
    ).save(path)  # fmt: skip
    return str(path)


def test_locality_is_read_from_recorded_pools(tmp_path: Path) -> None:
    rows = [
        placement(), placement(hot_share_of_selected_later=0.6),
        placement(rule="naive", hot_share_of_selected_later=0.5, promoted_later={"mean": 50.0}),
        placement(alpha=0.1, hot_share_of_selected_later=0.1),
        placement(hot_share=0.2, hot_share_of_selected_later=0.4),
        placement(rule="naive", hot_share=0.2, hot_share_of_selected_later=0.3),
        placement(hot_share=0.6), placement(rule="table", hot_share=0.6),
    ]  # fmt: skip
    found = read_locality(recorded(tmp_path / "near-placement-a.json", rows), 0.2)
    assert list(found.hot) == [0.2, 0.4]
    assert list(found.selected) == pytest.approx([0.4, 0.7])
    assert list(found.naive_selected) == pytest.approx([0.3, 0.5])
    assert list(found.naive_moved) == pytest.approx([20 / 500, 50 / 500])
    assert found.source == "recorded, near-placement-a"
    assert found.hot_share(0.3) == pytest.approx(0.55)
    assert (found.hot_share(0), found.hot_share(1)) == (0, 1)
    assert found.hot_share(0.4, naive=True) == pytest.approx(0.5)
    assert found.moved(0.7) == pytest.approx(0.05)
    with pytest.raises(ConfigError, match=r"alpha 0\.15"):
        read_locality(str(tmp_path / "near-placement-a.json"), 0.15)


def test_the_program_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "near-smartssd.json"
    result = run(["--lengths=8,24", "--models=qwen-7b", f"--out={out}", "--json"])
    printed = capsys.readouterr().out
    assert printed.startswith("Simulated, not measured.")
    assert "4.21 to 8.56x" in printed
    assert json.loads(printed.splitlines()[-1])["figures"]["simulated"] is True
    again = Result.load(out)
    assert again.kind == "near_storage.smartssd"
    assert again.figures["rows"] == result.figures["rows"]
    assert {row["tokens"] for row in again.figures["rows"]} == {8192, 24576}
    names = figures_drawn(out)
    assert names == ["near-smartssd", "near-smartssd-split", "near-smartssd-parts"]
    assert all("simulated" in chart.title for chart in charts_of(result, "x").values())


def test_each_recording_has_its_speedups(tmp_path: Path) -> None:
    paths = []
    for name, share in (("low", 0.5), ("high", 0.9)):
        rows = [placement(rule=rule, hot_share_of_selected_later=share) for rule in RULES]
        paths.append(recorded(tmp_path / f"{name}.json", rows))
    result = run(["--lengths=8,36", "--models=qwen-7b", "--locality", ",".join(paths)])
    assert str(tmp_path) not in result.command
    assert result.figures["locality"]["source"] == "recorded, low"
    rows = result.figures["by_locality"]
    assert {row["tokens"] for row in rows} == {36 * 1024}, "at 8K nothing is in storage"
    over = {(row["source"], row["method"]): row["speedups"][RIVALS[0]] for row in rows}
    assert over["recorded, high", INT8.name] > over["recorded, low", INT8.name]
    [own] = [row for row in result.figures["rows"]
             if (row["tokens"], row["method"]) == (36 * 1024, INT8.name)]  # fmt: skip
    rival = next(row for row in result.figures["rows"] if row["tokens"] == 36 * 1024
                 and row["method"] == RIVALS[0])  # fmt: skip
    gain = rival["step_ms"] / own["step_ms"]
    assert over["recorded, low", INT8.name] == pytest.approx(gain)


def test_a_result_without_rows_is_refused(tmp_path: Path) -> None:
    Result(
        kind="near_storage.smartssd", command="", settings={}, seed=0, machine={}, libraries={},
        commit="", date="", figures={},
    ).save(tmp_path / "a.json")  # fmt: skip
    with pytest.raises(ConfigError, match="no rows"):
        figures_drawn(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(["--lengths=a"], "lengths"), (["--lengths=0"], "lengths"), (["--alpha=1"], "alpha"),
     (["--models=gpt"], "gpt"), (["--batch=0"], "batch")],
)  # fmt: skip
def test_impossible_arguments(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_arguments(arguments)
