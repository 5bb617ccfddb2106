"""`python -m research.search`: rows against the plan, places, totals, figures, going on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.engine.beams.file_tier import FileTier
from penstock.engine.beams.layer_tier import FileLayers
from penstock.evaluate.result import Result
from penstock.models.beam_decoder import make_decoder
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_model
from research.figures.report import charts_of
from research.search import plan, speed
from research.search.plan import FIG_7_CONVENTION, FIG_7_GIB
from research.search.search_row import SearchWalk, genealogy
from research.search.speed import speed_table
from research.search.variants import (
    BASELINE,
    IN_MEMORY,
    VARIANTS,
    Prediction,
    SearchCase,
    comparison,
    predict,
    request_totals,
)
from tests.research.drawn_figures import figures_drawn

TOKENS, BLOCK = 32, 8
SMALL = (
    "--config=tiny", "--layers=2", "--beams=8", "--steps=8,16", "--prompt-tokens=16",
    f"--tokens={TOKENS}", f"--block-tokens={BLOCK}", "--memory=450KiB",
)  # fmt: skip
SCHEDULED = [name for name in VARIANTS if name not in (BASELINE, IN_MEMORY)]
CASE = SearchCase(beams=8, width=2, step_tokens=32, prompt_tokens=32, new_tokens=96)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "small.json"
    speed.run([*SMALL, f"--out={out}"])
    return out


@pytest.fixture
def reserving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with room for blocks that were not written, as pinned memory has it."""

    def reserve(tier: Any, num_blocks: int) -> None:
        tier._blocks.region.reserve(num_blocks)

    def reserve_layers(tier: Any, num_blocks: int) -> None:
        for layer in tier._layers:
            layer.region.reserve(num_blocks)

    monkeypatch.setattr(FileTier, "reserve", reserve)
    monkeypatch.setattr(FileLayers, "reserve", reserve_layers)
    parse = speed.parse_arguments

    def places(arguments: Any) -> Any:
        args = parse(arguments)
        args.whole = ""
        return args

    monkeypatch.setattr(speed, "parse_arguments", places)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = Result.load(path).figures["rows"]
    return rows


def test_every_variant_runs_every_step(whole: Path) -> None:
    rows = rows_of(whole)
    keys = {(row["step_tokens"], row["variant"]) for row in rows}
    assert keys == {(n, name) for n in (8, 16) for name in SCHEDULED} | {
        (8, BASELINE), (8, IN_MEMORY)
    }  # fmt: skip
    for row in rows:
        assert "error" not in row, row
        assert row["way"] == "whole"
        steps = [entry["step"] for entry in row["steps"]]
        assert steps == list(range(TOKENS // row["step_tokens"]))
        assert sum(entry["tokens"] for entry in row["steps"]) == TOKENS
        assert not row["request"]["is_interpolated"]
        assert row["request"]["seconds"] >= sum(entry["seconds"] for entry in row["steps"])
        for entry in row["steps"]:
            assert sum(entry["groups"]) == 8


def test_bytes_are_those_of_the_plan(whole: Path) -> None:
    """Group by group exactly Eq. 4 and 5 or the estimate; layer-wise Eq. 1-3 of full blocks."""
    rows = rows_of(whole)
    loads = {}
    for row in rows:
        wanted = "full_block_bytes" if row["variant"] == BASELINE else "predicted_bytes"
        for entry in row["steps"]:
            assert entry["loaded_bytes"] == pytest.approx(entry[wanted], rel=0.02), row["variant"]
        loads[row["step_tokens"], row["variant"]] = row["request"]["loaded_bytes"]
    assert loads[8, BASELINE] > 5 * loads[16, "inter-token"] > 0
    assert loads[8, "inter-token"] > 1.9 * loads[16, "inter-token"]
    assert loads[16, "inter-token"] > 2 * loads[16, "+inter-beam"]
    assert loads[8, IN_MEMORY] == 0
    base = next(row for row in rows if row["variant"] == BASELINE)["compared"]
    assert base["measured_bytes"] < base["predicted_bytes"]
    assert base["explained_by_blocks"] == pytest.approx(1, abs=0.02)


def test_table_names_speedups_and_the_slow_tier(whole: Path) -> None:
    rows = rows_of(whole)
    table = speed_table(rows)
    assert "full blocks explain" in table
    assert "slow tier: " in table
    gain = rows[0]["request"]["seconds"] / rows[1]["request"]["seconds"]
    assert f"{gain:.2f}x" in table.splitlines()[3]
    failed = [*rows, {"beams": 64, "step_tokens": 16, "any_step": True, "variant": IN_MEMORY,
                      "skipped": "out of memory: 64 GiB"}]  # fmt: skip
    assert "out of memory: 64 GiB" in speed_table(failed)


def test_figures_come_from_the_file_alone(whole: Path, tmp_path: Path) -> None:
    names = figures_drawn(whole)
    assert names == ["small", "small-bytes", "small-time", "small-stall"]
    result = Result.load(whole)
    rows = [row for row in result.figures["rows"] if row["variant"] != BASELINE]
    assert charts_of(replace(result, figures={"rows": rows}), "x") == {}


def test_a_run_is_gone_on_with(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that was measured is kept, one that failed is tried again."""
    part = Result.load(whole)
    part.figures["rows"] = part.figures["rows"][:3]
    part.figures["rows"][1] = {k: part.figures["rows"][1][k] for k in (
        "beams", "step_tokens", "variant", "any_step")} | {"error": "lost"}  # fmt: skip
    part.save(tmp_path / "part.json")
    asked = ["--variants=layerwise,inter-token", "--steps=8", "--resume",
             f"--out={tmp_path / 'part.json'}"]  # fmt: skip
    tried: list[str] = []

    def measure(bench: object, case: object, name: str, *, whole: bool) -> dict[str, Any]:
        tried.append(name)
        return {"skipped": "not now"}

    monkeypatch.setattr(speed, "measure_row", measure)
    kept = speed.run([*SMALL, *asked]).figures["rows"]
    assert tried == ["inter-token"]
    assert [row["variant"] for row in kept] == [BASELINE, "+inter-beam", "inter-token"]
    with pytest.raises(ConfigError, match=r"cannot resume.*seed"):
        speed.run([*SMALL, *asked, "--seed=1"])


@pytest.mark.slow
@pytest.mark.usefixtures("reserving")
def test_places_load_what_the_whole_search_loads_there(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "places.json"
    speed.run([*SMALL, "--steps=8", "--lengths=32,40", f"--out={out}"])
    ran = {row["variant"]: row for row in rows_of(whole) if row["step_tokens"] == 8}
    for row in rows_of(out):
        assert row["way"] == "places", row
        assert row["request"]["is_interpolated"]
        assert [entry["length"] for entry in row["steps"]] == [16, 32, 40]
        every = {entry["step"]: entry for entry in ran[row["variant"]]["steps"]}
        for entry in (*row["steps"], *row["moved"]):
            assert entry["loaded_bytes"] == every[entry["step"]]["loaded_bytes"], row["variant"]
            assert entry["groups"] == every[entry["step"]]["groups"]
        moves_all = row["variant"] in SCHEDULED[1:]
        assert row["request"]["has_all_bytes"] == moves_all
        if row["variant"] in SCHEDULED:
            known = ran[row["variant"]]["request"]["loaded_bytes"]
            rel = 0 if moves_all else 0.1
            assert row["request"]["loaded_bytes"] == pytest.approx(known, rel=rel)


@pytest.mark.usefixtures("reserving")
def test_a_layerwise_step_is_cut_to_whole_blocks(tmp_path: Path) -> None:
    out = tmp_path / "cut.json"
    speed.run([*SMALL, "--steps=16", "--lengths=32", "--variants=layerwise",
               "--row-seconds=0.0001", f"--out={out}"])  # fmt: skip
    [row] = rows_of(out)
    assert [entry["tokens"] for entry in row["steps"]] == [16, 8]
    assert row["steps"][1]["loaded_bytes"] == row["steps"][1]["full_block_bytes"] > 0


def test_pretending_moves_what_a_step_moves() -> None:
    model = random_model("tiny", max_positions=128, dtype=torch.float32, layers=2)
    moved = []
    for pretend in (False, True):
        decoder = make_decoder(
            model, beams=8, width=2, max_tokens=CASE.max_tokens, memory="1200KiB",
            **VARIANTS["+prefetch"].arguments,
        )  # fmt: skip
        parents = genealogy(CASE.transfers(decoder._memory.shape.kv, 1 << 20), seed=3)
        walk = SearchWalk(decoder, decoder.prefill(range(32)), CASE, parents)
        each = []
        for step in range(CASE.num_steps):
            walk.expand()
            if pretend:
                result = decoder.pretend_step(walk._beams, CASE.tokens_of(step))
            else:
                result = walk.decode(CASE.tokens_of(step))
            traffic = result.traffic
            each.append((result.groups, traffic.loaded_bytes, traffic.written_bytes,
                         traffic.prefetched_bytes, traffic.copied_bytes))  # fmt: skip
        moved.append(each)
        walk.restart()
        assert walk.step == -1
        decoder.close()
    assert moved[0] == moved[1]
    assert sum(loaded for _, loaded, *_ in moved[0]) > 0


def entry_at(
    case: SearchCase, step: int, seconds: float, tokens: int = 16, groups: int = 1
) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("stall_s", "expand_s", "prefetched_bytes", "written_bytes", "copied_bytes"), 0
    )
    return {"step": step, "place": step, "length": case.start_of(step), "tokens": tokens,
            "groups": [1] * groups, "seconds": seconds, "loaded_bytes": 7, **counts}  # fmt: skip


def test_totals_go_in_lines_of_their_own_where_not_all_fits() -> None:
    """4 steps of a constant time, then 6 whose groups take longer the longer the beams are."""
    case = SearchCase(beams=2, width=2, step_tokens=16, prompt_tokens=16, new_tokens=160)
    groups = [1, 1, 1, 1, 2, 2, 3, 3, 5, 5]
    prediction = Prediction(case=case, groups=np.array(groups), step_bytes=np.arange(10))
    times = [2.0] * 4 + [groups[step] * (10.0 + 3 * step) for step in range(4, 10)]

    def at(steps: Sequence[int]) -> list[dict[str, Any]]:
        return [entry_at(case, step, times[step], groups=groups[step]) for step in steps]

    totals = request_totals(case, at((0, 6, 8)), prediction)
    assert totals["is_interpolated"]
    assert not totals["has_all_bytes"]
    assert totals["seconds"] == pytest.approx(sum(times))
    assert totals["tokens_per_s"] == pytest.approx(2 * 160 / sum(times))
    moved = [entry | {"loaded_bytes": 100} for entry in at(range(10))]
    totals = request_totals(case, at((0, 6, 8)), prediction, moved)
    assert totals["has_all_bytes"]
    assert totals["loaded_bytes"] == 1000
    totals = request_totals(case, at(range(10)), prediction)
    assert not totals["is_interpolated"]
    assert totals["seconds"] == pytest.approx(sum(times))


def test_a_step_that_was_cut_counts_at_its_own_tokens() -> None:
    """A token takes as many seconds as it has tokens before it."""
    case = SearchCase(beams=2, width=2, step_tokens=32, prompt_tokens=32, new_tokens=160)
    prediction = Prediction(
        case=case, groups=np.ones(5, dtype=np.int64), token_bytes=np.ones(160, dtype=np.int64)
    )
    some = []
    for step, tokens in ((0, 32), (2, 16), (4, 16)):
        start = case.start_of(step)
        some.append(entry_at(case, step, sum(range(start, start + tokens)), tokens))
    totals = request_totals(case, some, prediction)
    assert totals["seconds"] == pytest.approx(sum(range(32, 192)))
    assert comparison([e | {"predicted_bytes": 0, "full_block_bytes": None} for e in some])[
        "percent"
    ] is None  # fmt: skip


def test_layerwise_is_planned_by_tokens_and_by_full_blocks() -> None:
    kv = inspect_model(random_model("tiny", max_positions=256, layers=2)).kv
    made = predict(CASE, VARIANTS[BASELINE], kv, 600 << 10, [])
    # 8 beams of 64 tokens: a layer takes 256 KiB, and both stay; of 96 tokens 384 KiB: one.
    assert made.loaded(0, 32) == 0
    assert made.loaded(2, 1) == 8 * 96 * kv.token_bytes
    assert made.in_blocks(2, 5) == 5 * 8 * 96 * kv.token_bytes
    assert made.loaded(2, 5) == (5 * 96 + 0 + 1 + 2 + 3 + 4) * 8 * kv.token_bytes


def test_settings_that_make_no_sense_are_told() -> None:
    for arguments, message in (
        (["--variants=fast"], "'fast' is none of"),
        (["--beams=9"], "not a multiple of width"),
        (["--beams=0"], "--beams takes numbers"),
        (["--tokens=0"], "new_tokens=0 must be at least 1"),
        (["--repeat=0"], "at least 1"),
        (["--dtype=int8"], "--dtype int8"),
    ):
        with pytest.raises(ConfigError, match=message):
            speed.run([*SMALL, *arguments])
    with pytest.raises(ConfigError, match="places need whole steps"):
        replace(CASE, prompt_tokens=33).steps_at([64], 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_told() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        speed.run([*SMALL, "--device=cuda"])


def test_places_are_the_nearest_steps() -> None:
    case = replace(CASE, new_tokens=320)
    assert case.steps_at([64, 120, 1000], 1) == [[0], [1], [3], [9]]
    assert case.steps_at([64, 70], 2) == [[0], [1, 2]]


def test_memory_for_less_than_one_beam_is_a_row_that_says_so(tmp_path: Path) -> None:
    out = tmp_path / "none.json"
    speed.run([*SMALL, "--steps=16", "--memory=50KiB", "--variants=layerwise,inter-token",
               f"--out={out}"])  # fmt: skip
    assert ["room for 1 beam" in row["skipped"] for row in rows_of(out)] == [True, True]


def test_the_plan_is_the_papers_figure(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    rows = plan.run([f"--out={out}"]).figures["rows"]
    for row in rows:
        assert sum(row["loaded_bytes"]) == row["total_bytes"]
        if row["convention"] in (None, FIG_7_CONVENTION):
            gib = row["total_bytes"] / 2**30
            assert gib == pytest.approx(FIG_7_GIB[row["step_tokens"]], abs=0.5)
    assert figures_drawn(out) == ["plan"]
