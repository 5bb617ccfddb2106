"""The throughput program end to end at toy size, and the parts that could lie."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import penstock.models
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.devices.presets import PRESETS
from penstock.evaluate import throughput
from penstock.evaluate.accuracy_settings import parse_settings
from penstock.evaluate.prefill_run import as_figures, run_prefill
from penstock.evaluate.process_memory import anonymous_bytes, cached_file_bytes
from penstock.evaluate.result import Result, public_arguments
from penstock.evaluate.sessions import Room, pack
from penstock.evaluate.targets import Target, judge, step_ratio
from penstock.evaluate.throughput import read_stream, without_folders
from penstock.evaluate.throughput_rows import FLOORS, all_rows, chosen_rows
from penstock.evaluate.throughput_run import RowResult, _predict
from penstock.evaluate.throughput_table import prefill_table
from penstock.methods import FlexGen
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import (
    plain_cache,
    random_adapter,
    random_model,
    share_weights,
    tokens_of,
)
from penstock.workloads.recorded_stream import Recording
from penstock.workloads.selection_streams import OverlapStream
from penstock.workloads.synthetic_kv import SyntheticKV

pytestmark = pytest.mark.usefixtures("quick_disk")
SHAPE = KVShape(
    num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
)  # fmt: skip
RECALL = Path(penstock.models.__file__).parent / "recall"


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model("tiny", max_positions=4096)


@pytest.fixture(scope="module")
def tiny_folder(model: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(RECALL).save_pretrained(folder)
    return folder


def test_a_run_measures_every_row_and_saves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "toy.json"
    arguments = [
        "--config=tiny", "--context=1300", "--batch=1", "--memory=2/3", "--steps=1", "--rounds=2",
        "--devices=real,emmc", "--prefill-tokens=128", "--prefill-chunks=64", "--json",
        "--prefill-rounds=1", "--disk-file-mib=64", f"--store={tmp_path}", f"--out={out}",
        "--methods=loki:key_ratio=0.25",
    ]  # fmt: skip
    throughput.run(arguments)
    printed = capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == saved
    assert str(tmp_path) not in out.read_text()
    rows = {row["name"]: row for row in saved["figures"]["rows"]}
    methods = parse_settings(["loki:key_ratio=0.25"])
    assert list(rows) == [row.name for row in all_rows(["real", "emmc"], methods)]
    assert "loki:key_ratio=0.25 (emmc, simulated)" in rows
    on_disk = {row.name for row in all_rows(["real", "emmc"], methods) if row.on_disk}
    for row in rows.values():
        assert row["skipped"] is None
        if row["is_floor"]:  # and more, beside the rows on a device
            assert len(row["rounds_ms"]) >= 2
        else:
            assert [len(steps) for steps in row["rounds_ms"]] == [1, 1]
        assert len(row["floors_ms"]) == (2 if row["name"] in on_disk else 0)
    full_context = 1300 * SHAPE.num_layers * SHAPE.token_bytes
    assert rows["flexgen"]["figures"]["read_bytes_per_token"] > 0.9 * full_context
    assert rows["kvswap, no reuse"]["figures"]["hit_rate"] == 0
    overlap = rows["kvswap, 77 % overlap"]["figures"]
    # Slots for more than one selection hit more than the overlap of two steps.
    assert 0.71 < overlap["hit_rate"] < 1
    assert rows["kvswap, all resident"]["figures"]["read_bytes_per_token"] < full_context / 100
    assert rows["kvswap, no reuse"]["figures"]["burst"]["bandwidth"] > 0
    assert rows["kvswap (emmc, simulated)"]["simulated"]
    assert len(saved["figures"]["prefill"]) == 3
    for row in saved["figures"]["prefill"]:
        assert row["ttft_s"] == min(row["ttfts_s"]) > min(row["seconds"]), "a step comes on top"
    floor_ms = min(rows[name]["figures"]["median_ms"] for name in FLOORS)
    on_a_device = [row["figures"] for row in rows.values() if "store" in row["figures"]]
    assert len(on_a_device) == 2 * (6 + len(methods))
    assert all(figures["predicted_ms"] >= floor_ms for figures in on_a_device)
    assert {row["stream"] for row in rows.values()} == {"own", "synthetic, 77 % overlap"}
    assert overlap["policy"]["stream"] == "synthetic, 77 % overlap"
    assert "[pass]" in printed or "[FAIL]" in printed
    assert Result.load(out).figures == saved["figures"]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no budget of their own"):
        throughput.run(["--config=tiny", "--methods=quest@1/2", "--disk-file-mib=64"])
    with pytest.raises(ConfigError, match="no row"):
        chosen_rows(all_rows(["real"]), ["kvsnap"])
    names = [row.name for row in chosen_rows(all_rows(["real"]), ["flexgen"])]
    assert names == ["floor, DynamicCache", "floor, StaticCache", "flexgen"]


def test_a_folder_and_a_recording_can_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    """Selections recorded on one model and context, played on another; no path is published."""
    out, played = tmp_path / "toy.json", tmp_path / "played.npz"
    first = np.arange(10, 110)[None] + np.arange(4)[:, None]  # 99 of 100 units repeat
    Recording(
        shares=(first * 4 / 1000)[:, None, None].astype(np.float32), context=1000, group_tokens=4,
        source={"model": "toy", "task": "drift"},
    ).save(played)  # fmt: skip
    throughput.run([
        f"--config={tiny_folder}", "--context=1300", "--batch=2", "--memory=1/2", "--steps=2",
        "--rounds=1", "--devices=real", "--rows=kvswap;flexgen", "--methods=infinigen-star-reuse",
        "--prefill-tokens=0", "--disk-file-mib=64", f"--store={tmp_path}", f"--out={out}",
        "--stream", str(played),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    text = out.read_text()
    assert str(tmp_path) not in text
    assert str(tiny_folder.parent) not in text
    saved = json.loads(text)
    assert saved["settings"]["config"] == tiny_folder.name
    assert saved["settings"]["weights"] == "stored"
    stream = "recorded (toy, drift, 1000 tokens, 99 % overlap)"
    assert saved["settings"]["stream"] == stream
    assert f"selections {stream}: kvswap; " in printed
    rows = {row["name"]: row for row in saved["figures"]["rows"]}
    assert rows["kvswap"]["stream"] == rows["infinigen-star-reuse"]["stream"] == stream
    assert rows["flexgen"]["stream"] == "own"
    assert rows["kvswap, 77 % overlap"]["stream"] == "synthetic, 77 % overlap"
    assert not rows["kvswap"]["synthetic_stream"]
    assert 0.985 < rows["kvswap"]["figures"]["hit_rate"] < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("overlap=much", "overlap=0.77"), ("overlap=1.5", "between 0 and 1"), ("x.npz", "penstock")],
)
def test_a_stream_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_stream(text)


def test_streams_are_read() -> None:
    assert read_stream("own") is None
    assert read_stream("overlap=0.5", 3) == OverlapStream(overlap=0.5, seed=3)
    assert read_stream("overlap") == OverlapStream()
    streams = {
        row.name: row.stream
        for row in all_rows(["real"], parse_settings(["quest,h2o"]), OverlapStream(overlap=0.5))
    }
    half, paper = "synthetic, 50 % overlap", "synthetic, 77 % overlap"
    assert streams["kvswap"] == streams["kvswap, no reuse"] == streams["quest"] == half
    assert streams["kvswap, 77 % overlap"] == streams["kvswap, 77 % overlap, G=8"] == paper
    for name in ("flexgen", "h2o", "full", "kvswap, all resident", *FLOORS):
        assert streams[name] == "own"


def test_a_row_that_reads_nothing_is_predicted_too() -> None:
    rows = rows_of({"floor, StaticCache": 10.0, "kvswap": 12.0, "h2o": 13.0, "full": 30.0})
    rows[1].figures |= {"store": "disk", "reads_per_token": 100.0, "read_bytes_per_token": 4e6}
    rows[2].figures |= {"store": "disk", "reads_per_token": 0.0, "read_bytes_per_token": 0.0}
    disk = PRESETS["nvme"]
    _predict(rows, disk)
    read_ms = disk.steady_read_time_s(100, 4e6) * 1e3
    assert rows[1].figures["predicted_ms"] == pytest.approx(max(10.0, read_ms))
    assert rows[2].figures["predicted_ms"] == 10.0
    assert "predicted_ms" not in rows[3].figures | rows[0].figures


def test_the_first_token_comes_after_the_prefill(model: CausalLM, tmp_path: Path) -> None:
    rows = run_prefill(
        model, random_adapter(model), tokens=192, context=1024, memory="1/2", store=str(tmp_path),
        chunks=[64], rounds=2, say=lambda text: None,
    )  # fmt: skip
    assert [row.label for row in rows] == [
        "DynamicCache, one piece", "DynamicCache, chunks of 64", "kvswap, chunks of 64",
    ]  # fmt: skip
    for row in rows:
        assert len(row.seconds) == len(row.ttfts_s) == 2
        assert all(0 < s < ttft for s, ttft in zip(row.seconds, row.ttfts_s, strict=True))
    assert [row["ttft_s"] for row in as_figures(rows)] == [min(row.ttfts_s) for row in rows]
    assert "first token s" in prefill_table(rows)
    line = next(x for x in prefill_table(rows).splitlines() if x.startswith("kvswap"))
    assert f"{rows[2].ttft_s:.2f}" in line


def test_paths_of_options_become_names() -> None:
    shown = without_folders(
        ["--config=/models/x-1b", "--stream", "a/b.npz", "--out", "c/d"], ("--config", "--stream")
    )
    assert shown == ["--config=x-1b", "--stream", "b.npz", "--out", "c/d"]


def test_synthetic_documents_are_the_same_in_every_cache(model: CausalLM) -> None:
    tokens = 300
    plain = plain_cache(model, "dynamic", tokens)
    SyntheticKV(SHAPE, 1, torch.device("cpu"), seed=3).fill(plain, tokens)
    with TieredCache(model, FlexGen(), store="memory", max_tokens=400) as cache:
        SyntheticKV(SHAPE, 1, torch.device("cpu"), seed=3).fill(cache, tokens)
        ids, position = torch.ones((1, 1), dtype=torch.int64), torch.tensor([[tokens]])
        ours = model(ids, **cache_argument(model, cache), position_ids=position).logits
    theirs = model(ids, **cache_argument(model, plain), position_ids=position).logits
    assert torch.allclose(ours.float(), theirs.float(), atol=0.05)
    keys, values = tokens_of(plain, 0, SHAPE)
    assert keys.shape == values.shape == (1, 2, tokens + 1, 64)
    assert keys.detach().float().std().item() == pytest.approx(1.0, abs=0.1)
    assert not torch.equal(keys, values)
    assert not torch.equal(keys, tokens_of(plain, 1, SHAPE)[0])


def test_chunks_of_a_document_differ() -> None:
    document = SyntheticKV(SHAPE, 1, torch.device("cpu"))
    first = document.chunk(64)[0].clone()
    assert not torch.equal(first, document.chunk(64)[0])


def test_a_simulated_device_takes_the_document_for_nothing(model: CausalLM) -> None:
    with TieredCache(model, FlexGen(), store="emmc", max_tokens=400) as cache:
        SyntheticKV(SHAPE, 1, torch.device("cpu")).fill(cache, 300)
        store = cache.tiers._store
        assert store is not None
        assert store.throttle is not None
        assert store.throttle.profile.name == "emmc"
        assert store.throttle.profile.bandwidth == 250e6


def test_models_that_share_weights_share_nothing_else(model: CausalLM) -> None:
    other = share_weights(model)
    assert other.config is not model.config
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    with TieredCache(other, "full", max_tokens=8):
        assert model.config._attn_implementation != other.config._attn_implementation


def test_memory_figures_see_what_is_allocated(model: CausalLM, tmp_path: Path) -> None:
    before = anonymous_bytes()
    block = torch.ones(40 << 20, dtype=torch.uint8)
    assert 35 << 20 < anonymous_bytes() - before < 60 << 20
    del block
    with TieredCache(model, FlexGen(), store=str(tmp_path), max_tokens=400) as cache:
        SyntheticKV(SHAPE, 1, torch.device("cpu")).fill(cache, 300)
        store = cache.tiers._store
        assert store is not None
        cached = cached_file_bytes(cache)
        assert cached is not None
        if store.is_direct:
            assert cached == 0


def rows_of(medians: dict[str, float], session: int = 1) -> list[RowResult]:
    return [
        RowResult(
            name=name,
            batch=1,
            device="real",
            simulated=False,
            synthetic_stream=False,
            session=session,
            rounds_ms=[[ms, ms], [ms, ms]],
            figures={
                "stall_share": 0.02,
                "ledger_bytes": 100,
                "growth_bytes": 105,
                "file_cache_bytes": 0,
            },
        )
        for name, ms in medians.items()
    ]


def test_targets_are_judged() -> None:
    floors = {"floor, DynamicCache": 11.0, "floor, StaticCache": 10.0}
    rows = rows_of({**floors, "StaticCache": 30.0, "kvswap": 12.0, "flexgen": 50.0})
    found = {target.name.split(" ")[0]: target for target in judge(rows)}
    assert {name: target.passed for name, target in found.items()} == {
        "(a)": True, "(b)": True, "(c)": False, "(e)": True, "(5)": True,
    }  # fmt: skip
    assert found["(a)"].value == pytest.approx(2.5)
    assert found["(b)"].value == pytest.approx(1.2)
    assert "FAIL" in found["(c)"].line()


def test_rows_of_two_sessions_are_compared_through_their_floors() -> None:
    one = rows_of({"floor, StaticCache": 10.0, "kvswap": 12.0})
    two = rows_of({"floor, StaticCache": 20.0, "flexgen": 240.0}, session=2)
    assert step_ratio(two[1], one[1], [*one, *two]) == pytest.approx(10.0)
    assert step_ratio(two[1], one[1], [one[1], two[1]]) is None


def test_a_drift_of_the_machine_cancels() -> None:
    rows = rows_of({"kvswap": 10.0, "flexgen": 50.0})
    for row in rows:
        row.rounds_ms[1] = [3 * ms for ms in row.rounds_ms[1]]
    assert step_ratio(rows[1], rows[0], rows) == pytest.approx(5.0)


def test_floors_beside_a_row_come_before_those_of_the_round() -> None:
    floor, row = rows_of({"floor, StaticCache": 10.0, "kvswap": 24.0})
    floor.is_floor = True
    assert step_ratio(row, floor, [floor, row]) == pytest.approx(2.4)
    row.floors_ms = [[19.0, 21.0] for _ in row.rounds_ms]  # the machine was slow just then
    assert step_ratio(row, floor, [floor, row]) == pytest.approx(1.2)


def test_rows_are_packed_into_what_the_machine_has() -> None:
    rows = all_rows(["real", "nvme"])
    tokens = 1 << 15
    full = SHAPE.full_cache_bytes(1, tokens)
    room = Room(memory=3 * full, disk=3 * full)
    sessions, refused = pack(
        rows, SHAPE, room, batch=1, max_tokens=tokens, memory="1/13",
        too_fast=frozenset({"nvme"}),
    )  # fmt: skip
    assert not refused
    assert len(sessions) > 1
    placed = [row.name for session in sessions for row in session.rows if not row.is_floor]
    assert placed == [row.name for row in rows if not row.is_floor]
    assert all(sum(row.is_floor for row in session.rows) == 2 for session in sessions)
    assert any("kvswap (nvme, simulated)" in session.in_memory for session in sessions)
    tight = Room(memory=full // 2, disk=3 * full)
    _, refused = pack(
        rows, SHAPE, tight, batch=1, max_tokens=tokens, memory="1/13", too_fast=frozenset()
    )  # fmt: skip
    assert set(refused) == {"StaticCache", "full", "kvswap, all resident"}
    assert refused["StaticCache"].startswith("does not fit")


def test_paths_stay_out_of_the_command() -> None:
    shown = public_arguments(["--store", "/mnt/x", "--out=a/b.json", "--store=auto", "--batch=1"])
    assert shown == "--store PATH --out=PATH --store=auto --batch=1"
    assert public_arguments(["--figure", "/mnt/a.svg"]) == "--figure PATH"


def test_a_target_knows_its_side() -> None:
    low = Target(name="x", batch=1, value=2.0, bound=2.0, at_least=True)
    assert low.passed
    assert not Target(name="x", batch=1, value=1.26, bound=1.25, at_least=False).passed
