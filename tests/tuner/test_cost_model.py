"""The cost model: bounds that hold by arithmetic, monotony, and the budgets it refuses."""

from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.core.errors import BudgetError, ConfigError
from penstock.devices.presets import EMMC, NVME
from penstock.methods.kvswap.policy import KVSwap
from penstock.tuner.advice import advise, everything_in_memory, largest_smaller_model
from penstock.tuner.cost_model import (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    READ_SUBMIT_S,
    Prediction,
    Workload,
    head_s,
    predict,
)
from penstock.tuner.hardware import hardware
from penstock.tuner.model_sizes import model_sizes
from penstock.tuner.step_work import PREDICTABLE, make_policy

GIB = 1 << 30


def workload(
    share: str = "1/13",
    *,
    model: str = "llama-3.1-8b",
    machine: str = "orin-agx",
    context: int = 32768,
    batch: int = 8,
) -> Workload:
    sizes = model_sizes(model)
    full = sizes.shape.full_cache_bytes(batch, context)
    return Workload(
        model=sizes, hardware=hardware(machine), disk=NVME, context=context, batch=batch,
        limit_bytes=int(full * Fraction(share)),
    )  # fmt: skip


def run(name: str, load: Workload) -> Prediction:
    return predict(make_policy(name), load)


def test_flexgen_takes_what_its_bytes_take() -> None:
    load = workload(batch=1)
    made = run("flexgen", load)
    full = load.model.shape.full_cache_bytes(1, 32768)
    assert made.read_bytes_per_token == full
    assert made.step_s == pytest.approx(full / NVME.bandwidth, rel=0.05)
    assert made.written_bytes == full


def test_everything_in_memory_takes_what_memory_takes() -> None:
    load = workload("1", batch=1)
    made = run("full", load)
    model = load.model
    moved = 2 * (32 * model.layer_weights + model.head_weights)
    moved += model.shape.full_cache_bytes(1, 32768)
    seconds = moved / (MEMORY_EFFICIENCY * load.hardware.memory_bandwidth)
    assert made.step_s == pytest.approx(seconds, rel=0.01)
    assert made.read_bytes_per_token == made.written_bytes == 0


ONE_SELECTION = KVSwap(selected_tokens=400, reuse_tokens=400)


def test_kvswap_reads_what_the_reuse_buffer_lacks() -> None:
    load = workload()
    made = predict(ONE_SELECTION, load)
    assert made.read_bytes_per_token == pytest.approx(32 * 0.23 * 400 * 4096)
    twice = predict(replace(ONE_SELECTION, reuse_tokens=800), load)
    assert twice.read_bytes_per_token == pytest.approx(made.read_bytes_per_token / 2)
    none = predict(KVSwap(reuse_tokens=0), load)
    assert none.read_bytes_per_token == 32 * 400 * 4096
    assert none.tokens_per_s < made.tokens_per_s
    assert made.resident_bytes <= load.limit_bytes


def test_reads_hide_behind_the_layer_before() -> None:
    load = workload()
    made = predict(ONE_SELECTION, load)
    layers = load.model.shape.num_layers
    assert made.io_s < made.block_s
    assert made.submit_s == pytest.approx(8 * 0.23 * 100 * READ_SUBMIT_S)
    first = made.io_s - made.submit_s  # the first layer's alone is waited for
    assert made.stall_share == pytest.approx(first / made.step_s)
    slow = run("kvswap", replace(load, disk=EMMC))
    assert slow.io_s > slow.block_s
    assert slow.step_s > layers * slow.io_s
    waiting = run("shadowkv", load)  # selects with the true query
    assert waiting.step_s > layers * (waiting.io_s + waiting.block_s)


def test_the_host_submits_every_read() -> None:
    load = workload()
    swift = replace(load, disk=replace(load.disk, iops=1e9, bandwidth=1e13, latency_s=0.0))
    made, layers = run("infinigen-star-reuse", swift), load.model.shape.num_layers
    assert made.submit_s > made.io_s
    assert made.stall_share == pytest.approx(0)
    step = layers * (made.rank_s + made.block_s + made.submit_s) + head_s(swift)
    assert made.step_s == pytest.approx(step)


def test_long_prompts_are_bound_by_arithmetic() -> None:
    load = workload(batch=1, context=8192)
    made = run("kvswap", load)
    assert made.first_token_s == pytest.approx(7.6, rel=0.1)  # KVSwap, footnote 4
    flops = load.model.prefill_flops(8192)
    assert made.first_token_s == flops / (COMPUTE_EFFICIENCY * load.hardware.flops)


@pytest.mark.parametrize("name", PREDICTABLE)
def test_worse_circumstances_are_never_faster(name: str) -> None:
    load = workload("1", batch=2) if name == "full" else workload(batch=2)
    base = run(name, load)
    assert base.tokens_per_s > 0
    assert run(name, replace(load, disk=EMMC)).tokens_per_s <= base.tokens_per_s
    slower = replace(load.hardware, memory_bandwidth=load.hardware.memory_bandwidth / 2)
    assert run(name, replace(load, hardware=slower)).tokens_per_s <= base.tokens_per_s
    assert run(name, replace(load, reuse_rate=0.0)).tokens_per_s <= base.tokens_per_s


def test_what_does_not_fit_at_once_runs_in_waves() -> None:
    load = workload("1")
    assert run("full", load).waves == 1
    tight = replace(load, limit_bytes=31 * GIB)  # 7 sequences and 1
    made = run("full", tight)
    assert made.waves == 2
    seven, one = (run("full", replace(load, batch=batch)).step_s for batch in (7, 1))
    assert made.tokens_per_s == pytest.approx(8 / (seven + one))


def test_budgets_that_do_not_fit() -> None:
    with pytest.raises(BudgetError, match="smallest budget") as error:
        run("kvswap", replace(workload(), limit_bytes=10 << 20))
    least = error.value.needed_bytes
    assert least is not None
    assert run("kvswap", replace(workload(), limit_bytes=least)).resident_bytes <= least
    with pytest.raises(BudgetError, match=r"room for 1 GiB") as error:
        run("full", replace(workload(), limit_bytes=GIB))
    assert error.value.needed_bytes == 4 * GIB
    with pytest.raises(BudgetError, match="smaller model"):
        run("kvswap", workload(model="qwen3-14b", machine="snapdragon-8-elite"))
    with pytest.raises(BudgetError, match=r"weights .* pass"):
        predict(KVSwap(reuse_tokens=32768), workload("1/2", machine="snapdragon-8-gen-3"))


def test_impossible_workloads() -> None:
    with pytest.raises(ConfigError, match="batch=0"):
        replace(workload(), batch=0)
    with pytest.raises(ConfigError, match="reuse_rate"):
        replace(workload(), reuse_rate=1.5)
    with pytest.raises(ConfigError, match=r"quest cannot be predicted.*kvswap"):
        make_policy("quest")


def test_advice_has_the_numbers() -> None:
    load = workload()
    made = run("kvswap", load)
    hidden, memory, recompute, smaller = advise(made, load)
    assert "hidden" in hidden
    plain = everything_in_memory(load)
    assert plain is not None
    assert f"{plain.tokens_per_s:.1f} tokens/s, against {made.tokens_per_s:.1f}" in memory
    assert "reading is faster" in recompute
    assert "qwen2.5-vl-3b with its whole cache fits" in smaller, "2 KV heads a layer"
    small = workload(model="qwen3-0.6b")
    assert "no known one" in advise(run("kvswap", small), small)[3]
    assert "sets the pace" in advise(run("kvswap", replace(load, disk=EMMC)), load)[0]


def test_advice_where_memory_is_short_and_a_smaller_model_fits() -> None:
    load = workload(machine="snapdragon-8-gen-3", batch=4)
    made = run("kvswap", load)
    assert everything_in_memory(replace(load, batch=1, context=131072)) is None
    short = replace(load, batch=1, context=131072)
    assert "not one sequence fits" in advise(made, short)[1]
    single = workload(batch=1)
    found = largest_smaller_model(run("kvswap", single), single)
    assert found is not None
    assert found[0].name == "qwen3-4b"
    assert found[1].tokens_per_s > 0
    assert "qwen3-4b" in advise(run("kvswap", single), single)[3]
