"""`python -m research.near_storage.decode`: rows, memory, splits, figures, going on."""

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.evaluate.process_memory import anonymous_bytes
from penstock.evaluate.result import Result
from penstock.methods.hillinfer.policy import HillInfer
from research.clusters.steps import MAIN
from research.figures import near_storage
from research.figures.chart import draw
from research.figures.report import charts_of
from research.near_storage import decode
from research.near_storage.decode import (
    beta_of,
    decode_table,
    pairs,
    smooth_minimum,
    speedups,
    splits,
    summary,
)
from research.near_storage.decode_run import (
    OURS,
    PLAIN,
    SPLIT,
    NearCase,
    anonymous_of,
    main_cases,
    resident_bytes,
    split_cases,
    with_budget,
    without_budget,
)
from tests.research.drawn_figures import figures_drawn

LENGTH, TOKEN_BYTES, LAYERS = 512, 1024, 4
METHODS = ("full", "h2o", "leoam", OURS, PLAIN, f"{OURS}:devices=2")
SMALL = (
    "--devices=ufs", "--alphas=0.2", f"--lengths={LENGTH}", "--memory=9/10", "--steps=4",
    "--rounds=2", "--warm=3", "--sizes=3", f"--methods={';'.join(METHODS)}",
)  # fmt: skip


@pytest.fixture(scope="module")
def result_file(four_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("near") / "small.json"
    decode.run([*SMALL, f"--model={four_layers}", f"--split-lengths={LENGTH}", f"--out={out}"])
    return out


def of(rows: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["section"] == section]


def test_rows(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    assert document["kind"] == "near_storage.decode"
    found = document["figures"]
    assert (found["model"], found["disk"]) == ("four", None)
    rows = of(found["rows"], MAIN)
    assert [without_budget(row["method"]) for row in rows] == [*METHODS, OURS, PLAIN]
    assert [row["hot"] for row in rows] == [0] * len(METHODS) + [205, 205]
    full_bytes = LENGTH * LAYERS * TOKEN_BYTES
    for row in rows:
        assert "error" not in row
        assert (row["steps"], len(row["round_ms"])) == (4, 2)
        assert 0 <= row["right"] <= 1
        if row["method"] == "full":
            continue
        assert row["selected_tokens"] * (16 if "leoam" in row["method"] else 1) >= 96
        if "@" in row["method"]:
            assert row["ledger_bytes"] <= 0.9 * full_bytes
    budgeted = rows[3:6]
    for row in [*budgeted, *rows[6:]]:
        assert row["selected_tokens"] == 102
        missed = (1 - row["hit_rate"]) * LAYERS * 102
        assert row["promoted"] * TOKEN_BYTES == row["promoted_bytes"]
        assert row["promoted"] >= missed > 0
        # Whatever was missed is read; what is promoted from the window is not.
        assert row["read_bytes"] <= row["promoted_bytes"] + TOKEN_BYTES
        assert row["read_bytes"] >= missed * TOKEN_BYTES - 1
        assert row["hot_tokens"] <= row["slots"]
        assert row["main_bytes"] == row["grown_bytes"] + row["shared_bytes"]
    near, plain, two = budgeted
    assert (len(near["device_bytes"]), len(plain["device_bytes"])) == (1, 0)
    assert len(two["device_bytes"]) == 2
    assert near["shared_bytes"] > 0 == plain["shared_bytes"]
    assert near["device_bytes"][0] > 4 << 20, "a Python process"
    assert two["slots"] < near["slots"], "two memories are shared"
    assert plain["slots"] < near["slots"], "its codes are in the budget"
    assert [row["slots"] for row in rows[6:]] == [205, 205]
    assert rows[6]["ledger_bytes"] < rows[7]["ledger_bytes"]


def test_hot_pools_of_many_sizes(result_file: Path) -> None:
    figures = Result.load(result_file).figures
    solved, *fixed = of(figures["rows"], SPLIT)
    assert [row["hot"] for row in fixed] == [102, 256, 410]
    assert [row["slots"] for row in [solved, *fixed]] == [408, 102, 256, 410]
    hits = [row["hit_rate"] for row in fixed]
    assert hits == sorted(hits)
    assert not any("rates" in row for row in fixed)
    assert solved["solved"] >= 1
    assert len(solved["round_capacity"]) == 2
    assert all(102 <= capacity <= 408 for capacity in solved["round_capacity"])
    assert {"host_scores", "device_scores"} <= set(solved["rates"])
    assert 102 <= solved["eq4"]["hot_tokens"] <= 408
    [one] = figures["splits"]
    assert one["best"]["ms"] == min(row["median_ms"] for row in fixed)
    assert one["solved_ms"] == solved["median_ms"]
    assert one["solved"]["hot_tokens"] == np.median(solved["round_capacity"])
    assert one["total_tokens"] > 512 - 64 - 24


def test_its_figures(result_file: Path, tmp_path: Path) -> None:
    assert figures_drawn(result_file) == ["small", "small-split"]
    result = Result.load(result_file)
    steps, memory = draw(near_storage.decode(result)).axes
    rows = of(result.figures["rows"], MAIN)
    assert len(rows) > len(METHODS), "and the pair with one hot pool"
    bars = [bar.get_width() for bar in steps.patches]  # type: ignore[attr-defined]
    assert bars == pytest.approx([row["mean_ms"] for row in rows])
    wide = [bar.get_width() for bar in memory.patches]  # type: ignore[attr-defined]
    for row in rows:
        assert max(0.0, row["grown_bytes"]) / 2**20 in wide
        assert sum(row["device_bytes"]) / 2**20 in wide
    [axes] = draw(near_storage.split(result)).axes
    best, *_ = axes.get_lines()
    drawn: Any = best.get_ydata()
    assert list(drawn) == [row["median_ms"] for row in of(result.figures["rows"], SPLIT)[1:]]
    result.figures = {"rows": [], **summary([])}
    assert charts_of(result, "a") == {}
    for chart in (near_storage.decode, near_storage.split):
        with pytest.raises(ConfigError):
            chart(result)


def test_it_goes_on(
    result_file: Path, four_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former, out = Result.load(result_file), tmp_path / "again.json"
    few = [*METHODS[:2], OURS, PLAIN]
    former.figures["rows"] = [
        row for row in former.figures["rows"] if row["section"] == SPLIT or row["method"] in few
    ]
    main = of(former.figures["rows"], MAIN)
    assert [row["method"] for row in main] == ["full", OURS, PLAIN], "h2o is missing"
    kept = of(former.figures["rows"], SPLIT)
    former.save(out)
    asked = [f"--methods={';'.join(few[:2])}", f"--split-lengths={LENGTH}"]
    arguments = [*SMALL, f"--model={four_layers}", *asked, f"--out={out}", "--resume"]
    again = decode.run([*arguments, "--json"])
    said = capsys.readouterr()
    *_, last = said.out.splitlines()
    assert json.loads(last) == again.as_dict() == json.loads(out.read_text())
    assert "% " in said.err
    assert of(again.figures["rows"], SPLIT) == kept, "what was whole is not measured again"
    fresh = of(again.figures["rows"], MAIN)
    assert [without_budget(row["method"]) for row in fresh] == few
    others = [fresh[0], *fresh[2:]]
    assert all(one != former for one, former in zip(others, main, strict=True)), "the whole group"
    with pytest.raises(ConfigError, match="memory=9/10"):
        decode.run([*arguments, "--memory=1/2"])
    time_up = decode.run([*SMALL, "--split-lengths=", "--minutes=0"])
    assert time_up.figures["rows"] == []


def test_slow_rows_and_rows_that_fail(
    four_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the sky is blue . the grass is green . " * 80)
    result = decode.run([
        *SMALL, "--split-lengths=", "--methods=full;hillinfer@1KiB", "--hot-share=0",
        "--row-seconds=1e-6", f"--prompt-file={path}", f"--model={four_layers}",
    ])  # fmt: skip
    assert str(tmp_path) not in json.dumps(result.as_dict())
    slow, failed = result.figures["rows"]
    assert (slow["steps"], slow["decoded"]) == (2, 2 + 1 + 2 * 2), "one a round, after one each"
    assert "too little" in failed["error"]
    assert failed["error"] in capsys.readouterr().out
    result.save(tmp_path / "out.json")
    path.write_text("the grass is green . the sky is blue . " * 80)
    again = [*SMALL, "--hot-share=0", f"--prompt-file={path}", f"--out={tmp_path}/out.json",
             f"--model={four_layers}"]  # fmt: skip
    with pytest.raises(ConfigError, match="digest="):
        decode.run([*again, "--resume"])


def test_memory_of_another_process() -> None:
    here = anonymous_of(os.getpid())
    assert here == pytest.approx(anonymous_bytes(), rel=0.05)


def test_only_written_pages_are_in_memory() -> None:
    # A mapping of its own: `np.zeros` may be given memory that the heap kept, and then writes it.
    array = np.frombuffer(mmap.mmap(-1, 64 << 20), dtype=np.uint8)
    assert resident_bytes(array) == 0
    array[: 16 << 20] = 1
    assert resident_bytes(array) == pytest.approx(16 << 20, abs=4 << 20)
    assert resident_bytes(np.zeros(0, dtype=np.uint8)) == 0


# Cases --------------------------------------------------------------------------------------------


def test_cases() -> None:
    args = decode.parse_arguments(["--devices=auto,emmc", "--split-devices=ufs"])
    cases = decode.all_cases(args)
    assert len({case.key for case in cases}) == len(cases)
    assert len([case for case in cases if case.section == MAIN]) == 3 * 2 * 2 * (9 + 2)
    assert len([case for case in cases if case.section == SPLIT]) == 1 + 9
    assert {case.device for case in cases if case.section == SPLIT} == {"ufs"}
    for case in cases:
        row = {**case.row, "mean_ms": 1.0}
        assert tuple(row[name] for name in decode.Decode.KEY) == case.key
    assert with_budget("leoam:fine_tokens=32", "1/2") == "leoam@1/2:fine_tokens=32"
    assert with_budget("flexgen", "1/2") == "flexgen"
    assert with_budget("h2o@1/4", "1/2") == "h2o@1/4"
    assert without_budget("leoam@1/2:fine_tokens=32") == "leoam:fine_tokens=32"
    place: Any = {"device": "ufs", "length": 1000, "alpha": 0.2}
    h2o, infinigen, budgeted, near, plain = main_cases(
        ["h2o", "infinigen", OURS], **place, memory="1/2", hot_share=0.1
    )
    policies: list[Any] = [case.policy for case in (h2o, infinigen, budgeted, near, plain)]
    assert [policy.selected_tokens for policy in policies] == [200] * 5
    assert [policy.reuse_tokens for policy in policies[:2]] == [None, 1000]
    assert [policy.hot_tokens for policy in policies[2:]] == [None, 200, 200]
    assert isinstance(policies[4], HillInfer)
    assert not policies[4].near
    solved, *fixed = split_cases(**place, sizes=4, most=0.8)
    assert [case.hot for case in fixed] == [200, 400, 600, 800]
    first: Any = solved.policy
    assert (first.hot_tokens, first.reuse_tokens) == (None, 800)
    with pytest.raises(ConfigError, match="does not hold"):
        split_cases(**place, sizes=4, most=0.1)


def test_bad_input() -> None:
    for arguments, said in (
        (["--lengths=a"], "takes numbers"), (["--lengths=64"], "at least"),
        (["--devices=tape"], "tape"), (["--alphas=1.5"], "below 1"),
        (["--methods=none"], "no policy"), (["--steps=2"], "--steps from"),
        (["--sizes=2"], "--sizes 3"), (["--hot-share=1"], "below 1"), (["--warm=1"], "--warm"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            decode.parse_arguments(arguments)
    with pytest.raises(ConfigError, match="--output; name it"):
        decode.run(["--resume"])


# Sums ---------------------------------------------------------------------------------------------


def row(method: str, ms: float, **more: Any) -> dict[str, Any]:
    case = NearCase(section=MAIN, device="ufs", length=1000, ratio=0.2, method=method)
    near = method.startswith(OURS) and "near=false" not in method
    return {
        **case.row, "mean_ms": ms, "median_ms": ms, "p90_ms": ms, "tokens_per_s": 1e3 / ms,
        "stall_ms": 1.0, "select_ms": 1.0, "hit_rate": 0.5, "promoted": 3.0, "demoted": 2.0,
        "promoted_bytes": 3072.0, "demoted_bytes": 2048.0, "reads": 3.0, "read_bytes": 3072.0,
        "slots": 400, "hot_tokens": 400.0, "main_bytes": 1 << 20, "ledger_bytes": 1 << 20,
        "device_bytes": [1 << 20] if near else [], "right": 1.0, **more,
    }  # fmt: skip


def test_speedups_and_pairs() -> None:
    rows = [
        row("h2o@1/2", 10.0), row(f"{OURS}@1/2", 20.0), row("hillinfer@1/2:near=false", 60.0),
        row(OURS, 25.0, hot=400), row(PLAIN, 20.0, hot=400, main_bytes=2 << 20),
    ]  # fmt: skip
    gains = {one["method"]: one["times"] for one in speedups(rows)}
    assert gains == {"h2o@1/2": 0.5, "hillinfer@1/2:near=false": 3.0}
    budget, pool = pairs(rows)
    assert (budget["same"], budget["faster"], budget["memory"]) == ("budget", 3.0, 1.0)
    assert (pool["same"], pool["faster"], pool["memory"]) == ("hot pool", 0.8, 0.5)
    assert pool["tokens_per_s"] == [40.0, 50.0]
    assert pairs(rows[:2]) == []
    table = decode_table({"rows": rows, **summary(rows)})
    for word in ("H2O", "without a device, 400 hot", "hot pool", "0.80"):
        assert word in table


def test_splits() -> None:
    def spot(hot: int) -> dict[str, float]:
        return {"hot_tokens": hot, "cold_tokens": 1000 - hot, "step_ms": 1.0}

    fixed = [
        row(OURS, ms, hot=hot, section=SPLIT) for hot, ms in ((200, 30.0), (500, 20.0), (800, 26.0))
    ]
    solved = row(
        OURS, 21.0, section=SPLIT, split=spot(600), eq4=spot(350), eq4_skewed=spot(500),
        eq4_beta=0.4, most_hot=800, rates={"host_scores": 1.0}, round_capacity=[600, 500, 800],
    )  # fmt: skip
    [one] = splits([solved, *fixed])
    assert one["best"] == {"hot_tokens": 500.0, "beta": 1.0, "ms": 20.0}
    assert one["solved"]["hot_tokens"] == 600, "the median of its rounds"
    assert one["solved"]["ms"] == pytest.approx(22.0), "a third of the way to 26"
    assert one["latency_off"] == pytest.approx(0.1)
    assert one["own_latency_off"] == pytest.approx(0.05)
    assert one["eq4_latency_off"] == pytest.approx(0.25)
    assert one["beta_off"] == pytest.approx(1 / 1.5 - 1)
    assert 500 < one["smooth"]["hot_tokens"] < 600
    table = decode_table({"rows": [solved, *fixed], **summary([solved, *fixed])})
    for word in ("measured best", "+10%", "-33%", "Eq. 4"):
        assert word in table
    assert splits(fixed) == [], "no row solved"
    assert splits([solved, *fixed[:2]]) == [], "two points are no curve"


def test_betas_and_parabolas() -> None:
    assert beta_of(250, 1000) == pytest.approx(1 / 3)
    assert beta_of(1000, 1000) == float("inf")
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert smooth_minimum(x, (x - 2.5) ** 2) == pytest.approx(2.5)
    assert smooth_minimum(x, (x - 9.0) ** 2) == 4.0
    assert smooth_minimum(x, -x) == 4.0
    assert smooth_minimum(x, 5 - (x - 2.4) ** 2) == 4.0
