"""`python -m research.clusters.end_to_end`: rows, sums, tables, figures, going on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.result import Result
from penstock.methods.dynakv.policy import DynaKV
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.plain_model import random_model
from research.clusters import end_to_end, steps
from research.clusters.end_to_end_table import (
    BOTH,
    FLASH,
    LAYER_WISE,
    LRU,
    NO_CLUSTERS,
    POLICY,
    VIRTUAL,
    cache_gains,
    end_to_end_table,
    exponent,
    growth,
    speedups,
    summary,
)
from research.clusters.steps import CACHE, DISK, MAIN, Case, LiveRow, Pace, ReadWatch, covered_ns
from research.figures import clusters
from research.figures.chart import draw
from research.figures.report import charts_of
from tests.research.drawn_figures import figures_drawn

SMALL = (
    "--devices=ufs", "--ratios=0.1", "--steps=4", "--rounds=2", "--warm=2", "--cache-length=0",
    f"--methods=dynakv;pqcache;{NO_CLUSTERS}",
)  # fmt: skip


def heights(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


@pytest.fixture(scope="module")
def result_file(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("end") / "small.json"
    end_to_end.run([*SMALL, f"--model={shallow}", "--lengths=256,320", f"--out={out}"])
    return out


def test_rows(result_file: Path) -> None:
    document = json.loads(result_file.read_text())
    assert document["kind"] == "clusters.end_to_end"
    assert document["command"].startswith("python -m research.clusters.end_to_end --dev")
    found = document["figures"]
    assert (found["model"], found["disk"]) == ("shallow", None)
    rows = found["rows"]
    assert [(row["length"], row["method"]) for row in rows] == [
        (length, method) for length in (256, 320) for method in ("dynakv", "pqcache", NO_CLUSTERS)
    ]
    for row in rows:
        assert "error" not in row
        selected = round(0.1 * row["length"])
        assert row["selected_tokens"] == row["slots"] == selected
        assert (row["steps"], len(row["round_ms"])) == (4, 2)
        assert sum(row["round_ms"]) / 2 == pytest.approx(row["mean_ms"])
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["mean_ms"])
        assert row["prompt_tokens"] <= row["length"] - 8
        # 2 layers of 4 heads want as many tokens each; what they miss is useful.
        missed = (1 - row["hit_rate"]) * 2 * 4 * selected
        assert row["useful_bytes"] == pytest.approx(missed * 2 * 64 * 2)
        assert row["read_bytes"] >= row["useful_bytes"] > 0
        assert row["read_kib"] * 1024 * row["reads"] == pytest.approx(row["read_bytes"])
        assert row["effective_bandwidth"] == pytest.approx(
            row["useful_bytes"] / row["read_ms"] * 1e3
        )
        assert 0 < row["read_ms"] < row["mean_ms"]
        assert row["ledger_bytes"] == sum(row["ledger_items"].values())
        assert 0 <= row["right"] <= 1
    ours, quantised, single = rows[3:]
    assert ours["read_kib"] > 2 * single["read_kib"]
    assert single["options"]["key_ratio"] == 1
    assert single["options"]["predict"] is False
    assert quantised["read_kib"] < 1.5


def test_its_figure(result_file: Path, tmp_path: Path) -> None:
    assert figures_drawn(result_file) == ["small"]


def test_it_goes_on(
    result_file: Path, shallow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former, small = Result.load(result_file), [*SMALL, f"--model={shallow}"]
    out = tmp_path / "again.json"
    broken = {"error": "gone", **{k: former.figures["rows"][1][k] for k in (
        "section", "device", "length", "ratio", "method", "reuse")}}  # fmt: skip
    kept = former.figures["rows"][3:]
    former.figures["rows"] = [former.figures["rows"][0], broken, *kept]
    former.save(out)
    again = end_to_end.run([*small, "--lengths=256", "--resume", f"--out={out}", "--json"])
    said = capsys.readouterr()
    *_, last = said.out.splitlines()
    assert json.loads(last) == again.as_dict() == json.loads(out.read_text())
    assert "% " in said.err
    rows = again.figures["rows"]
    assert rows[:3] == kept, "another length is not measured again"
    assert [row["method"] for row in rows[3:]] == ["dynakv", "pqcache", NO_CLUSTERS]
    assert rows[3] != former.figures["rows"][0], "the whole group is"
    assert again.settings["lengths"] == [256, 320]
    with pytest.raises(ConfigError, match="steps=4"):
        end_to_end.run([*small, "--lengths=256", "--steps=2", "--resume", f"--out={out}"])
    time_up = end_to_end.run([*small, "--lengths=256", "--minutes=0"])
    assert time_up.figures["rows"] == []


def test_pieces_become_one(result_file: Path, tmp_path: Path) -> None:
    whole, out = Result.load(result_file), tmp_path / "one.json"
    pieces = []
    for number, length in enumerate((320, 256, 320)):
        piece = Result.load(result_file)
        piece.settings["lengths"] = [length]
        piece.figures["rows"] = [
            row | {"mean_ms": 1.0 + number} for row in whole.figures["rows"]
            if row["length"] == length
        ]  # fmt: skip
        piece.machine["cpu"] = "another" if number == 1 else piece.machine["cpu"]
        pieces.append(str(tmp_path / f"{number}.json"))
        piece.save(pieces[-1])
    end_to_end.run([f"--out={out}", "--merge", *pieces])
    one = Result.load(out)
    assert one.settings == {**whole.settings, "lengths": [320, 256]}
    assert one.machine == whole.machine
    assert [(row["length"], row["method"], row["mean_ms"]) for row in one.figures["rows"]] == [
        (length, method, ms) for length, ms in ((256, 2.0), (320, 1.0))
        for method in ("dynakv", "pqcache", NO_CLUSTERS)
    ]  # fmt: skip
    cores = one.machine["cores"]
    assert [row.get("machine") for row in one.figures["rows"]] == [
        *[f"another, {cores} cores"] * 3, None, None, None,
    ]  # fmt: skip
    assert one.figures["minutes"] == pytest.approx(3 * whole.figures["minutes"])
    assert one.figures["growth"] == [], "no machine has two lengths"
    assert {gain["method"]: gain["lengths"] for gain in one.figures["speedups"]} == {
        "pqcache": [256, 320], NO_CLUSTERS: [256, 320],
    }  # fmt: skip
    assert "(another, " in end_to_end_table(one.figures)
    again = end_to_end.run([f"--out={out}", "--merge", str(result_file)])
    assert again.figures["rows"] == one.figures["rows"], "what is there stays"
    other = Result.load(result_file)
    other.settings["steps"] = 8
    other.save(pieces[0])
    with pytest.raises(ConfigError, match="cannot merge: the result was made with steps=8"):
        end_to_end.run([f"--out={out}", "--merge", pieces[0]])
    other.kind = "clusters.quality"
    other.save(pieces[0])
    with pytest.raises(ConfigError, match="is a result of clusters"):
        end_to_end.run([f"--out={out}", "--merge", pieces[0]])
    with pytest.raises(ConfigError, match="name it"):
        end_to_end.parse_arguments(["--merge", pieces[0]])


def test_a_row_that_fails_says_why(
    shallow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_round = LiveRow.run_round

    def failing(self: LiveRow, steps: int) -> None:
        if isinstance(self.cache.policy, DynaKV):
            raise RuntimeError("no such cluster\nand more")
        run_round(self, steps)

    monkeypatch.setattr(LiveRow, "run_round", failing)
    methods = "--methods=dynakv;pqcache@1KiB;clusterkv"
    result = end_to_end.run([*SMALL, f"--model={shallow}", methods, "--lengths=256"])
    first, second, third = result.figures["rows"]
    assert first["error"] == "RuntimeError: no such cluster"
    assert "too little" in second["error"]
    assert "mean_ms" in third
    said = capsys.readouterr()
    assert "RuntimeError: no such cluster" in said.out
    assert "Traceback" in said.err


def write_text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("the sky is blue . the grass is green . " * 40)
    return f"--prompt-file={path}"


def test_a_text_on_the_real_disk(shallow: Path, tmp_path: Path) -> None:
    few = [*SMALL, f"--model={shallow}", f"--devices={DISK}", "--methods=dynakv"]
    result = end_to_end.run([*few, "--lengths=200", write_text(tmp_path)])
    assert str(tmp_path) not in json.dumps(result.as_dict())
    assert result.settings["text"] == "file"
    assert result.figures["disk"]["bandwidth"] > 0
    [main] = result.figures["rows"]
    assert (main["section"], main["prompt_tokens"]) == (MAIN, 192)
    result.save(tmp_path / "out.json")
    (tmp_path / "text.txt").write_text("the grass is green . the sky is blue . " * 40)
    again = [*few, "--lengths=200", f"--prompt-file={tmp_path}/text.txt", "--resume"]
    with pytest.raises(ConfigError, match="digest="):
        end_to_end.run([*again, f"--out={tmp_path}/out.json"])
    with pytest.raises(PromptError, match="cannot read"):
        end_to_end.run([*SMALL, "--lengths=256", f"--prompt-file={tmp_path}/none.txt"])


@pytest.mark.slow
def test_caches_of_several_sizes(
    four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [POLICY, LRU]
    sizes = {0.0: ["dynakv"], 1.0: both, 8.0: [*both, *LAYER_WISE]}
    rows = [(method, reuse) for reuse, methods in sizes.items() for method in methods]
    monkeypatch.setattr(end_to_end, "cache_methods", lambda: rows)
    result = end_to_end.run([
        *SMALL, f"--model={four_layers}", "--lengths=", "--cache-length=224", "--steps=2",
        "--warm=1", write_text(tmp_path), f"--out={tmp_path}/text.json",
    ])  # fmt: skip
    caches = result.figures["rows"]
    assert not any("error" in row for row in caches)
    by_slots = {row["reuse"]: row for row in caches if row["method"] not in LAYER_WISE}
    assert by_slots[0.0]["shared_pools"]
    assert [by_slots[reuse]["slots"] for reuse in (1.0, 8.0)] == [22, 176]
    assert by_slots[8.0]["ledger_bytes"] > by_slots[1.0]["ledger_bytes"]
    *_, largest = result.figures["cache"]
    less = largest["layer_wise"]
    assert less[VIRTUAL]["memory"] > 1.05, "two pools instead of one for each of four layers"
    assert less[BOTH]["memory"] > less[VIRTUAL]["memory"]
    assert [gain["reuse"] for gain in result.figures["cache"]] == [1.0, 8.0]
    assert figures_drawn(tmp_path / "text.json") == ["text-cache"]
    bars = heights(draw(clusters.cache(result)).axes[0])
    held = by_slots[0.0]["ledger_items"]
    assert (held["slots and window"] + held["index"]) / 2**20 in bars


# Sums ---------------------------------------------------------------------------------------------


def row(method: str, length: int, ms: float, **more: Any) -> dict[str, Any]:
    case = Case(section=MAIN, device="ufs", length=length, ratio=0.1, method=method)
    return {
        **case.row, "mean_ms": ms, "median_ms": ms, "p90_ms": ms, "tokens_per_s": 1e3 / ms,
        "reads": 10.0, "read_bytes": 4096.0, "read_kib": 0.4, "read_ms": 1.0, "select_ms": 1.0,
        "effective_bandwidth": 1e9 / ms, "stall_share": 0.5, "hit_rate": 0.3,
        "ledger_bytes": 1 << 20, "ledger_items": {"slots and window": 1 << 19, "index": 1 << 18},
        "right": 1.0, **more,
    }  # fmt: skip


def test_speedups_and_growth() -> None:
    rows = [
        row("dynakv", 1024, 10.0), row("dynakv", 4096, 20.0), row("pqcache", 1024, 20.0),
        row("pqcache", 4096, 160.0), row("clusterkv", 1024, 30.0),
        {**row("clusterkv", 4096, 1.0, section=CACHE)},
    ]  # fmt: skip
    gains = {one["method"]: one for one in speedups(rows)}
    assert set(gains) == {"pqcache", "clusterkv"}
    assert gains["pqcache"]["mean"] == pytest.approx(4.0), "of 2 and 8"
    assert (gains["pqcache"]["low"], gains["pqcache"]["high"]) == (2.0, 8.0)
    assert gains["pqcache"]["bandwidth"] == pytest.approx(4.0)
    assert gains["clusterkv"]["lengths"] == [1024]
    assert gains["clusterkv"]["paper"] == 1.31
    powers = {one["method"]: one["exponent"] for one in growth(rows)}
    assert powers == {"dynakv": pytest.approx(0.5), "pqcache": pytest.approx(1.5)}
    assert exponent((1, 2, 4), (3, 6, 12)) == pytest.approx(1.0)
    text = end_to_end_table({"rows": rows, **summary(rows)})
    for word in ("PQCache", "4.00", "1.47", "0.50", "paper, Qwen-S"):
        assert word in text
    result = Result.begin("clusters.end_to_end", [], {}, seed=0)
    result.figures = {"model": "m", "rows": rows, **summary(rows)}
    speed, bandwidth, steps = draw(clusters.speed(result)).axes
    assert heights(speed) == pytest.approx([4.0, 3.0])
    assert len(bandwidth.patches) == 2
    [ours] = [line for line in steps.get_lines() if line.get_label() == "DynaKV"]
    assert list(ours.get_ydata()) == [10.0, 20.0]  # type: ignore[arg-type]
    assert set(charts_of(result, "a")) == {"a", "a-cache"}
    static = [*rows[:2], row("dynakv:update=static", 1024, 9.0)]
    result.figures = {"rows": static, **summary(static)}
    assert charts_of(result, "a") == {}, "nothing that the paper compares with"
    result.figures = {"rows": rows[:2], **summary(rows[:2])}
    for chart in (clusters.speed, clusters.cache):
        with pytest.raises(ConfigError):
            chart(result)


def test_gains_of_the_cache() -> None:
    figures = ((POLICY, 10.0, 300, 140), (LRU, 11.0, 300, 140), (VIRTUAL, 12.0, 200, 40),
               (FLASH, 11.5, 250, 140), (BOTH, 13.0, 150, 40))  # fmt: skip
    rows = [
        row(
            method, 4096, ms, section=CACHE, reuse=2.0, ledger_bytes=size,
            ledger_items={"slots and window": slots, "index": 100, "tables": size - slots - 100},
        )
        for method, ms, size, slots in figures
    ]  # fmt: skip
    [gain] = cache_gains(rows)
    assert gain["faster"] == pytest.approx(1.1)
    less = gain["layer_wise"]
    assert [less[method]["memory"] for method in (VIRTUAL, FLASH, BOTH)] == [1.5, 1.2, 2.0]
    # Slots and index were 240; what layers share counts, wherever the ledger books it.
    assert [less[method]["cache"] for method in (VIRTUAL, FLASH, BOTH)] == pytest.approx(
        [240 / 140, 240 / 190, 240 / 90]
    )
    assert less[BOTH]["slower"] == pytest.approx(1.3)
    text = end_to_end_table({"rows": rows, **summary(rows)})
    for word in (*LAYER_WISE.values(), "1/2.67", "1.30x", "1/2.22"):
        assert word in text
    result = Result.begin("clusters.end_to_end", [], {}, seed=0)
    result.figures = {"model": "m", "rows": rows}
    memory, time = draw(clusters.cache(result)).axes
    # In the order of the rows; what the ledger holds beside them is 60 everywhere.
    assert heights(memory) == pytest.approx([n / 2**20 for n in (240, 240, 140, 190, 90)])
    assert heights(time) == pytest.approx([ms for _, ms, _, _ in figures])
    [paper] = memory.get_lines()
    assert paper.get_ydata()[0] == pytest.approx(240 / 2**20 / 2.22)  # type: ignore[index]
    assert cache_gains([row("dynakv", 4096, 9.0, section=CACHE, reuse=0.0)]) == []


def test_spans_are_counted_once() -> None:
    assert covered_ns([(0, 10), (5, 12), (20, 30), (22, 25), (12, 13)]) == 23
    assert covered_ns([]) == 0


def test_all_reads_are_seen() -> None:
    model: Any = random_model("tiny", max_positions=512, dtype=torch.float32)
    policy = DynaKV(selected_tokens=32, tokens_per_cluster=8)
    ids = torch.arange(200)[None] % 512
    with TieredCache(model, policy, store="memory", max_tokens=256) as cache, torch.no_grad():
        model(ids, **cache_argument(model, cache), use_cache=True)
        watch = ReadWatch(cache)
        model(ids[:, :1], **cache_argument(model, cache), use_cache=True)
        watch.take()  # the first step reads the whole prompt
        before = cache.stats.decode.read_bytes
        for _ in range(6):
            model(ids[:, :1], **cache_argument(model, cache), use_cache=True)
        counted, seen = cache.stats.decode.read_bytes - before, watch.take()
    assert seen.read_bytes >= counted > 0
    assert seen.reads > 0
    assert seen.busy_s > 0
    assert (seen + seen).reads == 2 * seen.reads


def test_cases_and_bad_input() -> None:
    args = end_to_end.parse_arguments(["--lengths=1024", "--cache-length=2048"])
    cases = end_to_end.all_cases(args)
    assert len({case.key for case in cases}) == len(cases)
    assert [len([c for c in cases if c.section == part]) for part in (MAIN, CACHE)] == [42, 44]
    assert steps.pace_of(args) == Pace(warm=8, rounds=4, steps=12)
    case = Case(section=CACHE, device="ufs", length=1000, ratio=0.2, method="dynakv", reuse=2)
    policy: Any = case.policy
    assert (policy.selected_tokens, policy.reuse_tokens) == (200, 400)
    assert steps.key_of({**case.row, "mean_ms": 1.0}) == case.key
    for arguments, said in (
        (["--lengths=a"], "takes numbers"), (["--lengths=64"], "at least"),
        (["--devices=tape"], "tape"), (["--ratios=1.5"], "below 1"), (["--resume"], "--output"),
        (["--methods=none"], "no policy"), (["--steps=2"], "--rounds"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            end_to_end.parse_arguments(arguments)
    with pytest.raises(ConfigError, match="another --task"):
        end_to_end.run([*SMALL, "--lengths=256", "--task=single_noise"])
