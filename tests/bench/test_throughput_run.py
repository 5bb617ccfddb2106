"""The throughput program end to end at toy size, and the parts that could lie."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.bench import throughput
from penstock.bench.accuracy_settings import parse_settings
from penstock.bench.overlapping_kvswap import OverlappingKVSwap
from penstock.bench.process_memory import anonymous_bytes, cached_file_bytes
from penstock.bench.result import Result, public_arguments
from penstock.bench.sessions import Room, pack
from penstock.bench.synthetic_kv import SyntheticKV
from penstock.bench.targets import Target, judge, step_ratio
from penstock.bench.throughput_rows import all_rows, chosen_rows
from penstock.bench.throughput_run import RowResult
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import CausalLM
from penstock.models.plain_model import (
    plain_cache,
    random_adapter,
    random_model,
    share_weights,
    tokens_of,
)
from penstock.policies import FlexGen

SHAPE = KVShape(
    num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model("tiny", max_positions=4096)


def test_a_run_measures_every_row_and_saves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "toy.json"
    arguments = [
        "--config=tiny", "--context=2200", "--batch=1", "--memory=1/2", "--steps=2", "--rounds=2",
        "--devices=real,emmc", "--prefill-tokens=128", "--prefill-chunks=64", "--json",
        "--prefill-rounds=1", "--disk-file-mib=64", f"--store={tmp_path}", f"--out={out}",
        "--methods=quest,loki:key_ratio=0.25",
    ]  # fmt: skip
    throughput.run(arguments)
    printed = capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == saved
    assert str(tmp_path) not in out.read_text()
    rows = {row["name"]: row for row in saved["figures"]["rows"]}
    methods = parse_settings(["quest,loki:key_ratio=0.25"])
    assert list(rows) == [row.name for row in all_rows(["real", "emmc"], methods)]
    assert "loki:key_ratio=0.25 (emmc, simulated)" in rows
    for row in rows.values():
        assert row["skipped"] is None
        assert [len(steps) for steps in row["rounds_ms"]] == [2, 2]
    full_context = 2200 * SHAPE.num_layers * SHAPE.token_bytes
    assert rows["flexgen"]["figures"]["read_bytes_per_token"] > 0.9 * full_context
    assert rows["kvswap, no reuse"]["figures"]["hit_rate"] == 0
    overlap = rows["kvswap, 77 % overlap"]["figures"]
    assert overlap["hit_rate"] == pytest.approx(0.77, abs=0.06)
    assert rows["kvswap, all resident"]["figures"]["read_bytes_per_token"] < full_context / 100
    assert rows["kvswap"]["figures"]["burst"]["bandwidth"] > 0
    assert rows["kvswap (emmc, simulated)"]["simulated"]
    assert len(saved["figures"]["prefill"]) == 3
    assert "[pass]" in printed or "[FAIL]" in printed
    assert Result.load(out).figures == saved["figures"]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="no budget of their own"):
        throughput.run(["--config=tiny", "--methods=quest@1/2", "--disk-file-mib=64"])
    with pytest.raises(ConfigError, match="no row"):
        chosen_rows(all_rows(["real"]), ["kvsnap"])
    names = [row.name for row in chosen_rows(all_rows(["real"]), ["flexgen"])]
    assert names == ["floor, DynamicCache", "floor, StaticCache", "flexgen"]


def test_synthetic_documents_are_the_same_in_every_cache(model: CausalLM) -> None:
    tokens = 300
    plain = plain_cache(model, "dynamic", tokens)
    SyntheticKV(SHAPE, 1, torch.device("cpu"), seed=3).fill(plain, tokens)
    with TieredCache(model, FlexGen(), store="memory", max_tokens=400) as cache:
        SyntheticKV(SHAPE, 1, torch.device("cpu"), seed=3).fill(cache, tokens)
        ids, position = torch.ones((1, 1), dtype=torch.int64), torch.tensor([[tokens]])
        ours = model(ids, past_key_values=cache, position_ids=position).logits
    theirs = model(ids, past_key_values=plain, position_ids=position).logits
    assert torch.allclose(ours.float(), theirs.float(), atol=0.05)
    keys, values = tokens_of(plain, 0)
    assert keys.shape == values.shape == (1, 2, tokens + 1, 64)
    assert keys.detach().float().std().item() == pytest.approx(1.0, abs=0.1)
    assert not torch.equal(keys, values)
    assert not torch.equal(keys, tokens_of(plain, 1)[0])


def test_chunks_of_a_document_differ() -> None:
    document = SyntheticKV(SHAPE, 1, torch.device("cpu"))
    first = document.chunk(64)[0].clone()
    assert not torch.equal(first, document.chunk(64)[0])


def test_a_simulated_device_takes_the_document_for_nothing(model: CausalLM) -> None:
    with TieredCache(model, FlexGen(), store="emmc", max_tokens=400) as cache:
        SyntheticKV(SHAPE, 1, torch.device("cpu")).fill(cache, 300)
        store = cache._runtime._store
        assert store is not None
        assert store.throttle is not None
        assert store.throttle.profile.name == "emmc"
        assert store.throttle.profile.bandwidth == 250e6


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_the_stream_overlaps_as_much_as_it_says(model: CausalLM, overlap: float) -> None:
    policy = OverlappingKVSwap(overlap=overlap, selected_tokens=160, reuse_tokens=160)
    adapter = random_adapter(model)
    with TieredCache(
        model, policy, store="memory", max_tokens=2400, memory="1/1", adapter=adapter
    ) as cache:  # fmt: skip
        SyntheticKV(SHAPE, 1, torch.device("cpu")).fill(cache, 2200)
        held = []
        layer = cache._runtime.layers[1]
        for step in range(3):
            ids, position = torch.ones((1, 1), dtype=torch.int64), torch.tensor([[2200 + step]])
            model(ids, past_key_values=cache, position_ids=position)
            held.append(set(np.asarray(layer.index.last)[0].tolist()))  # type: ignore[union-attr]
    for before, after in pairwise(held):
        assert len(after) == 40
        assert len(before & after) / 40 == pytest.approx(overlap, abs=0.02)


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
        store = cache._runtime._store
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


def test_a_target_knows_its_side() -> None:
    low = Target(name="x", batch=1, value=2.0, bound=2.0, at_least=True)
    assert low.passed
    assert not Target(name="x", batch=1, value=1.26, bound=1.25, at_least=False).passed
