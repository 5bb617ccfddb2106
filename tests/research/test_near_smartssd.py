"""The simulated SmartSSD PC: its steps against cases done by hand, and what must hold of any."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from research.near_storage.smartssd_machine import (
    ASSUMED_LOCALITY,
    GIB,
    NO_LOCALITY,
    SHAPES,
    Constants,
    Locality,
    Places,
    Shape,
    Workload,
    divide,
)
from research.near_storage.smartssd_step import (
    ABLATIONS,
    BASELINES,
    FP16,
    FULL,
    H2O,
    INT4,
    INT8,
    LEOAM,
    PREFETCH,
    Variant,
    baseline_step,
    device_scan_s,
    hillinfer_step,
    layer_gpu_s,
)

# Two layers, keys of 100 bytes, KV of 200: weights 1,000 bytes a layer, 400 bytes of words.
TINY = Shape(name="tiny", layers=2, heads=1, kv_heads=1, head_dim=50, parameters=1200,
             embedding_parameters=200, vocabulary=4)  # fmt: skip
SMALL = Workload(shape=TINY, tokens=500, batch=2, alpha=0.2)  # 1,000 tokens a layer
"""Its KV takes 200 KB a layer."""
PC = replace(
    Constants(), vram_bytes=2400 + 2 * 0.2 * 1000 * 200 + 100 * 400 + 1000,
    vram_reserve_bytes=1000, gpu_flops=1e12, gpu_bandwidth=1e6, layer_overhead_s=0.001,
    host_bytes=400 * 400 + 50, host_reserve_bytes=50, host_scoring=1e6, host_link=1e6,
    ssd_bandwidth=1e5, device_internal=1e5, device_link=5e4, device_write=1e5,
    device_memory_bytes=0, device_memory_bandwidth=1e12, fpga_macs=1e12, score_bytes=4,
    block_tokens=100, partial_share=0.5, chunk_tokens=8, chunk_waste=1.5,
)  # fmt: skip
"""Room for 100 tokens of a layer in GPU memory, 400 in host memory; 500 are stored."""
QWEN = SHAPES["qwen-7b"]
LONG = Workload(shape=QWEN, tokens=36 * 1024)


def head_s(pc: Constants = PC) -> float:
    return 2 * 4 * 50 / pc.gpu_bandwidth


# Sizes --------------------------------------------------------------------------------------------


def test_memory_is_divided_by_size() -> None:
    assert divide(PC, SMALL) == Places(gpu=100, host=400, storage=500)
    assert divide(PC, SMALL, host_index_bytes=100 * 400) == Places(gpu=100, host=300, storage=600)
    few = replace(SMALL, tokens=50)
    assert divide(PC, few).storage == 0
    assert divide(PC, few).total == 100
    with pytest.raises(ConfigError, match="tiny does not fit"):
        divide(replace(PC, vram_bytes=3000), SMALL)


def test_the_papers_sizes() -> None:
    # 8 sequences of 4K: 16 GiB of KV, about 30 GB with the weights (introduction).
    work = Workload(shape=QWEN, tokens=4096)
    assert work.kv_bytes == 16 * GIB
    assert work.kv_bytes + 2 * QWEN.parameters == pytest.approx(32.6e9, rel=0.01)
    places = divide(Constants(), LONG)
    assert places.total == 8 * 36 * 1024
    assert places.host * QWEN.kv_bytes * QWEN.layers == pytest.approx(56 * GIB, rel=1e-4)
    assert places.storage > places.host > places.gpu > 0


# Steps by hand ------------------------------------------------------------------------------------


def test_the_gpu_reads_weights_and_what_it_attends_to() -> None:
    assert layer_gpu_s(PC, SMALL, 200) == pytest.approx(0.001 + (1000 + 200 * 200) / 1e6)
    scored = layer_gpu_s(PC, SMALL, 200, 100)
    assert scored == pytest.approx(0.001 + (1000 + 200 * 200 + 100 * 100) / 1e6)
    slow = replace(PC, gpu_flops=1e4)
    assert layer_gpu_s(slow, SMALL, 0) == pytest.approx(0.001 + 2 * 1000 / 1e4)


def test_full_moves_everything_under_the_layer_before() -> None:
    step = baseline_step(FULL, PC, SMALL)
    gpu = 0.001 + (1000 + 1000 * 200) / 1e6
    ssd = 500 * 200 / 1e5  # 1 s, longer than 900 * 200 / 1e6
    assert step.layer.seconds == pytest.approx(ssd)
    assert step.layer.storage_read_bytes == 500 * 200
    # The first layer waits for all of it; the second's went on under the first.
    assert step.gpu_s == pytest.approx(2 * gpu + head_s())
    assert step.step_s == pytest.approx(ssd + (ssd - gpu) + 2 * gpu + head_s())
    assert step.stall_share == pytest.approx(1 - step.gpu_s / step.step_s)


def test_h2o_reads_all_stored_keys_and_overlaps_nothing() -> None:
    step = baseline_step(H2O, PC, SMALL)
    keys = 500 * 100 / 1e5  # longer than scoring 900 * 100 / 1e6 on the host
    # 200 selected: 20 in the GPU, 80 in the host, 100 stored.
    values = 100 * 100 / 1e5
    assert step.layer.scoring_s == pytest.approx(keys)
    assert step.layer.fetch_s == pytest.approx(values)
    gpu = 0.001 + (1000 + 200 * 200 + 100 * 100) / 1e6
    assert step.step_s == pytest.approx(2 * (keys + values + gpu) + head_s())
    assert step.scoring_s == pytest.approx(2 * keys)
    assert step.fetch_s == pytest.approx(2 * values)
    assert baseline_step(H2O, PC, SMALL, Locality((0.5,), (0.9,), (0.9,), (0.0,))).layer.fetch_s \
        == pytest.approx(180 * 200 / 1e6 - 180 * 0.2 * 200 / 1e6 + 20 * 200 / 1e6)  # fmt: skip


def test_partial_keys_lie_where_that_is_faster() -> None:
    beside = baseline_step(PREFETCH, PC, SMALL, index_in_memory=False)
    # Half keys of 500 from the SSD; then KV of 100.
    assert beside.layer.scoring_s == pytest.approx(500 * 50 / 1e5)
    assert beside.layer.fetch_s == pytest.approx(100 * 200 / 1e5)
    inside = baseline_step(PREFETCH, PC, SMALL)
    # 100 KB of index leave room for 60 KB: 150 tokens; 750 are stored.
    assert inside.places == Places(gpu=100, host=150, storage=750)
    assert inside.layer.scoring_s == pytest.approx(900 * 50 / 1e6)
    assert inside.layer.fetch_s == pytest.approx(150 * 200 / 1e5)
    assert inside.step_s < beside.step_s
    tight = replace(PC, host_bytes=50 + 50_000)
    assert baseline_step(PREFETCH, tight, SMALL).places == divide(tight, SMALL)


def test_leoam_scores_two_keys_a_chunk_and_fetches_chunks() -> None:
    step = baseline_step(LEOAM, PC, SMALL)
    # 25 bytes a token: 50 KB; 110 KB are left, 275 tokens.
    assert step.places == Places(gpu=100, host=275, storage=625)
    assert step.layer.scoring_s == pytest.approx(900 * 25 / 1e6)
    assert step.layer.fetch_s == pytest.approx(1.5 * 125 * 200 / 1e5)
    with pytest.raises(ConfigError, match="no baseline"):
        baseline_step("quest", PC, SMALL)


def test_hillinfer_by_hand() -> None:
    plain = Variant(bits=8, holds_codes=False)
    step = hillinfer_step(PC, SMALL, NO_LOCALITY, plain, hot_tokens=300)
    assert step.places == Places(gpu=100, host=300, storage=600)
    assert step.beta == 0.5
    # Selected: 20 with the GPU, 60 hot, 120 cold. A code has 50 bytes.
    scan, block = 600 * 50 / 1e5, 100 * 4 / 5e4
    cold_fetch = 120 * 200 / 5e4
    assert device_scan_s(PC, SMALL, 600, plain) == pytest.approx(scan)
    assert step.layer.scoring_s == pytest.approx(scan + block)
    assert step.layer.fetch_s == pytest.approx(cold_fetch)
    assert step.layer.seconds == pytest.approx(scan + block + cold_fetch)
    assert step.layer.storage_read_bytes == pytest.approx(120 * 200 + 600 * 4)
    gpu = 0.001 + (1000 + 200 * 200 + 100 * 100) / 1e6
    need = step.layer.seconds
    assert step.step_s == pytest.approx(need + (need - gpu) + 2 * gpu + head_s())
    serial = hillinfer_step(
        PC, SMALL, NO_LOCALITY, replace(plain, overlaps=False), hot_tokens=300
    )  # fmt: skip
    assert serial.step_s == pytest.approx(2 * (need + gpu) + head_s())


def test_what_the_device_reads_to_score() -> None:
    def scan(variant: Variant, pc: Constants = PC) -> float:
        return device_scan_s(pc, SMALL, 600, variant)

    assert scan(FP16) == pytest.approx(600 * 100 / 1e5)
    assert scan(INT4) == pytest.approx(600 * 25 / 1e5)
    # A third of a layer's codes in memory: 10 of 30 KB, of both layers.
    held = replace(PC, device_memory_bytes=20_000)
    assert scan(INT8, held) == pytest.approx(20_000 / 1e5)
    assert scan(replace(INT8, holds_codes=False), held) == pytest.approx(30_000 / 1e5)
    assert scan(INT8, replace(PC, fpga_macs=1e4)) == pytest.approx(600 * 50 / 1e4)
    assert scan(INT8, replace(held, device_memory_bandwidth=1e4)) == pytest.approx(3.0)


def test_each_side_sends_when_it_has_scored_if_it_may() -> None:
    apart = Variant(holds_codes=False, waits_for_all=False)
    pc = replace(PC, host_link=2e4, block_tokens=0)
    step = hillinfer_step(pc, SMALL, NO_LOCALITY, apart, hot_tokens=300)
    host = 300 * 100 / 1e6 + 60 * 200 / 2e4
    through = 180 * 200 / 2e4
    assert step.layer.seconds == pytest.approx(max(0.3 + 120 * 200 / 5e4, host, through))
    both = hillinfer_step(
        pc, SMALL, NO_LOCALITY, replace(apart, waits_for_all=True), hot_tokens=300
    )  # fmt: skip
    assert both.layer.seconds == pytest.approx(0.3 + through)


def test_naive_placement_keeps_the_device_busy() -> None:
    pools = Locality((0.4,), (0.9,), (0.6,), (0.3,))
    naive = Variant(holds_codes=False, places_by_hits=False)
    kept = hillinfer_step(PC, SMALL, pools, replace(naive, places_by_hits=True), hot_tokens=300)
    step = hillinfer_step(PC, SMALL, pools, naive, hot_tokens=300)
    # 10 % of 200 cold against 40 %, and 300 tokens come in: 220 more than were selected.
    assert kept.layer.fetch_s == pytest.approx(20 * 200 / 5e4)
    assert step.layer.fetch_s == pytest.approx(80 * 200 / 5e4)
    assert step.layer.seconds == pytest.approx(0.3 + 300 * 200 / 5e4)
    written = replace(naive, writes_demoted=True)
    slow = replace(PC, device_write=1e4)
    assert hillinfer_step(slow, SMALL, pools, written, hot_tokens=300).layer.seconds \
        == pytest.approx(300 * 200 / 1e4)  # fmt: skip


# What must hold of any ----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["device_internal", "device_link", "device_write", "fpga_macs",
                          "device_memory_bytes", "device_memory_bandwidth", "host_scoring",
                          "host_link", "gpu_bandwidth", "gpu_flops"]),
    factor=st.floats(1.0, 8.0), tokens=st.sampled_from([4, 12, 24, 36]),
    bits=st.sampled_from([4, 8, 16]), hot=st.floats(0.0, 1.0),
)  # fmt: skip
def test_nothing_that_is_faster_slows_hillinfer(
    name: str, factor: float, tokens: int, bits: int, hot: float
) -> None:
    pc, work = Constants(), replace(LONG, tokens=1024 * tokens)
    faster = pc.scaled(factor, name)
    fixed = int(hot * divide(pc, work).host)
    for variant in (replace(INT8, bits=bits), replace(FP16, places_by_hits=False)):
        before = hillinfer_step(pc, work, ASSUMED_LOCALITY, variant, hot_tokens=fixed)
        after = hillinfer_step(faster, work, ASSUMED_LOCALITY, variant, hot_tokens=fixed)
        assert after.step_s <= before.step_s * (1 + 1e-9)
    # Eq. 4 is right where its assumptions hold: a new split does not lose either.
    apart = Variant(bits=bits, holds_codes=False, waits_for_all=False)
    before = hillinfer_step(pc, work, NO_LOCALITY, apart)
    after = hillinfer_step(faster, work, NO_LOCALITY, apart)
    assert after.step_s <= before.step_s * 1.001


@pytest.mark.parametrize("method", BASELINES)
@pytest.mark.parametrize("tokens", [4, 12, 24, 36])
def test_parts_add_up_and_longer_takes_longer(method: str, tokens: int) -> None:
    pc, work = Constants(), replace(LONG, tokens=1024 * tokens)
    step = baseline_step(method, pc, work)
    assert step.gpu_s + step.scoring_s + step.fetch_s == pytest.approx(step.step_s)
    assert baseline_step(method, pc, replace(work, tokens=work.tokens + 1024)).step_s > step.step_s
    placed = baseline_step(method, pc, work, ASSUMED_LOCALITY)
    assert placed.step_s <= step.step_s
    for variant in (FP16, INT8, INT4, *ABLATIONS):
        ours = hillinfer_step(pc, work, ASSUMED_LOCALITY, variant)
        assert ours.gpu_s + ours.scoring_s + ours.fetch_s == pytest.approx(ours.step_s)


def test_every_part_of_hillinfer_helps() -> None:
    pc = Constants()
    for tokens in (12, 24):
        work = replace(LONG, tokens=1024 * tokens)
        whole = hillinfer_step(pc, work, ASSUMED_LOCALITY, INT8).step_s
        for variant in ABLATIONS:
            assert hillinfer_step(pc, work, ASSUMED_LOCALITY, variant).step_s > whole, variant.name
    steps = [hillinfer_step(pc, LONG, ASSUMED_LOCALITY, one).step_s for one in (FP16, INT8, INT4)]
    assert steps == sorted(steps, reverse=True)
