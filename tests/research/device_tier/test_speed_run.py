"""`device_tier.speed` on a CPU: rows, places, errors that do not end the run, going on."""

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.device_tier import device_layer
from penstock.engine.device_tier.streams import on_link
from penstock.evaluate.result import Result
from penstock.kernels.device import available
from penstock.methods import KVSwap
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.policy import LouisKV
from penstock.models import fused_step
from research.device_tier import decode_row, speed
from research.device_tier.methods import (
    ABLATION,
    Pattern,
    method_texts,
    parse_method,
    parse_patterns,
)
from research.device_tier.speed import ratio_lines, speed_table
from research.device_tier.timers import as_flagged, without_triton

SMALL = ":selected_tokens=48,window_tokens=16,sink_tokens=4"
METHODS = (
    f"louiskv{SMALL};arkvale{SMALL};kvswap{SMALL};quest{SMALL};flexgen;full-dynamic;full-static"
)


def run(out: Path, *more: str, methods: str = METHODS) -> Result:
    return speed.run([
        "--config", "tiny", "--layers", "2", "--on", "cpu", "--patterns", "160/90", "--batches",
        "2", "--steps", "8", "--methods", methods, "--out", str(out), *more,
    ])  # fmt: skip


def test_every_method_runs_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    run(out, "--steps", "4", "--breakdown", "2", "--places", "2")
    rows = {row["method"].partition(":")[0]: row for row in Result.load(out).figures["rows"]}
    assert set(rows) == {
        "louiskv", "arkvale", "kvswap", "quest", "flexgen", "full-dynamic", "full-static",
    }  # fmt: skip
    for row in rows.values():
        assert "error" not in row
        assert "skipped" not in row
        assert [place["length"] for place in row["places"]] == [160, 241]
        assert all(place["steps"] == 4 for place in row["places"])
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["answer_mean_ms"])
        assert row.get("graph", False) is False
    for name in ("louiskv", "arkvale", "kvswap", "quest"):
        assert rows[name]["streamed_layers"] == 2
        assert rows[name]["places"][0]["fetched_bytes"] > 0
        assert 0 < rows[name]["breakdown"]["retrieval_share"] < 1
    assert "streamed_layers" not in rows["full-dynamic"]
    assert rows["flexgen"]["breakdown"]["retrieval_share"] == 0
    said = capsys.readouterr().out
    assert "louiskv is" in said
    assert "times arkvale" in said


def test_a_failing_row_is_recorded_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, methods = tmp_path / "speed.json", f"arkvale{SMALL};louiskv{SMALL}"
    started: list[str] = []
    measure = decode_row.DecodeRow.run

    def failing(self: decode_row.DecodeRow) -> dict[str, Any]:
        started.append(self._method.text)
        if len(started) == 1:
            raise RuntimeError("no kernel\nmore of it")
        return measure(self)

    monkeypatch.setattr(decode_row.DecodeRow, "run", failing)
    first = run(out, methods=methods).figures["rows"]
    assert first[0]["error"] == "RuntimeError: no kernel"
    assert "tokens_per_s" in first[1]
    assert "no kernel" in speed_table(first)
    again = run(out, "--resume", methods=f"{methods};full-dynamic").figures["rows"]
    assert started == [f"arkvale{SMALL}", f"louiskv{SMALL}", "full-dynamic", f"arkvale{SMALL}"]
    assert [row["method"].partition(":")[0] for row in again] == [
        "louiskv", "full-dynamic", "arkvale",
    ]  # fmt: skip
    assert not any("error" in row for row in again)
    with pytest.raises(ConfigError, match="segment"):
        run(out, "--resume", "--segment", "4", methods=methods)


def test_time_that_is_up_ends_the_run(tmp_path: Path) -> None:
    found = run(tmp_path / "speed.json", "--minutes", "0").figures["rows"]
    assert found == []
    assert json.loads((tmp_path / "speed.json").read_text())["kind"] == "device_tier.speed"


def test_too_much_pinned_memory_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_row, "pinned_bytes", lambda _: 1 << 40)
    found = run(tmp_path / "speed.json", methods=f"louiskv{SMALL};full-dynamic").figures["rows"]
    assert "--host-gib" in found[0]["skipped"]
    assert "tokens_per_s" in found[1]


def test_flags_hold_for_a_while() -> None:
    def state() -> tuple[object, ...]:
        layer = vars(device_layer)
        return layer["STAYING_GATHER"], layer["on_link"], fused_step.ENABLED

    before = state()
    assert before == (True, on_link, True)
    for flag, number, other in (
        ("filling", 0, False),
        ("inline", 1, nullcontext),
        ("parts", 2, False),
    ):
        with as_flagged({flag}):
            assert state() == (*before[:number], other, *before[number + 1 :])
        assert state() == before
    with suppress(RuntimeError), as_flagged({"filling", "inline", "parts"}):
        raise RuntimeError("what a row says")
    assert state() == before


def test_methods_have_the_papers_budgets() -> None:
    louis = parse_method("louiskv", Pattern(32768, 512)).policy
    assert isinstance(louis, LouisKV)
    assert (louis.tau, louis.sink_tokens) == (0.85, 32)
    assert (louis.window_tokens, louis.selected_tokens) == (512, 512)
    pages = parse_method("arkvale", Pattern(500, 16384)).policy
    assert isinstance(pages, ArkVale)
    assert (pages.group_tokens, pages.selected_tokens) == (16, 1024)
    assert (pages.sink_tokens, pages.window_tokens) == (500, 128)
    swap = parse_method("kvswap:selected_tokens=256", Pattern(32768, 16384)).policy
    assert isinstance(swap, KVSwap)
    assert (swap.selected_tokens, swap.reuse_tokens, swap.window_tokens) == (256, 256, 256)
    method = parse_method("louiskv@4GiB:boundaries=every!torch!eager", Pattern(32768, 512))
    assert method.memory == "4GiB"
    assert method.flags == {"torch", "eager"}
    assert parse_method("louiskv:predict=true!filling", Pattern(9, 9)).flags == {"filling"}
    with pytest.raises(ConfigError, match="end in !torch, !eager, !filling, !inline, !parts"):
        parse_method("louiskv!fast", Pattern(9, 9))
    for text in ABLATION:
        parse_method(text, Pattern(32768, 16384))


def test_lists_are_read() -> None:
    assert method_texts("a:x=1,y_z=2!torch, b ;c") == ["a:x=1,y_z=2!torch", "b", "c"]
    assert [pattern.text for pattern in parse_patterns("1/2, 30/4")] == ["1/2", "30/4"]
    for wrong in ("32768", "a/b", "", "5/0"):
        with pytest.raises(ConfigError):
            parse_patterns(wrong)
    with pytest.raises(ConfigError, match="fast"):
        parse_method("louiskv!fast", Pattern(10, 10))
    with pytest.raises(ConfigError, match="too short"):
        decode_row.places_of(Pattern(100, 10), 8, 8)


def test_places_lie_between_the_answer_s_beginning_and_its_end() -> None:
    answer = Pattern(500, 15_884)
    assert decode_row.places_of(answer, 32, 8) == [500, 8442, 16_344]
    five = [500, 4471, 8442, 12_413, 16_344]
    assert decode_row.places_of(answer, 32, 8, 5) == five
    assert decode_row.places_of(answer, 32, 8, 2) == [500, 16_344]
    few = decode_row.places_of(Pattern(100, 100), 32, 8, 5)
    assert few == [100, 150], "those that overlap are left out"
    with pytest.raises(ConfigError, match="--places"):
        speed.parse_arguments(["--on", "cpu", "--places", "1"])


def test_ratios_leave_ablations_out() -> None:
    rows = [
        {"pattern": "8/8", "batch": 1, "method": name, "tokens_per_s": rate}
        for name, rate in (("louiskv", 30.0), ("louiskv!torch", 5.0), ("arkvale", 10.0))
    ]
    assert ratio_lines(rows) == ["8/8, batch 1: louiskv is 3.00 times arkvale"]


def test_kernels_are_plain_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "_has_triton", lambda: True)

    class OnGpu:
        is_cuda = True

    tensor: Any = OnGpu()
    assert available.uses_triton(tensor)
    with suppress(RuntimeError), without_triton():
        assert not available.uses_triton(tensor)
        raise RuntimeError
    assert available.uses_triton(tensor)
