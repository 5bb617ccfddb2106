"""Settings A and B: plans of the whole model, steps put together, ratios, the program."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.methods import KVSwap, Quest
from research.settings import program as settings
from research.settings.cases import (
    Machine,
    cases_of_a,
    cases_of_b,
    part_of,
    plan_whole,
    planned,
    put_together,
)
from research.settings.program import rate_of, ratios_of, ratios_text

LLAMA = KVShape(
    num_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
)
MACHINE = Machine(shape=LLAMA, device_is_cpu=True, predictor_bytes=31 * 2**24, new_tokens=32)


def test_a_step_of_the_whole_model_has_one_first_and_one_last_layer() -> None:
    cost = put_together([0.050, 0.060], [[0.010, 0.001, 0.006, 0.008]] * 2, of_layers=32)
    assert cost.layer_ms == pytest.approx(6), "the second layer's reads ran beside the first's"
    assert cost.step_ms == pytest.approx(55)
    assert cost.whole_ms == pytest.approx(55 + 28 * 6)
    same = put_together([0.050], [[0.010, 0.004, 0.006, 0.008]], of_layers=4)
    assert same.whole_ms == pytest.approx(50)


def test_setting_a_gives_every_method_the_same_memory() -> None:
    cases = cases_of_a(["full", "kvswap", "loki"], ["nvme", "emmc"], [32768], [2], "1/13", MACHINE)
    full, nvme, emmc, loki = cases
    assert (full.limit_bytes, full.budget) == (None, "none")
    assert (nvme.devices, emmc.devices, loki.devices) == (("nvme",), ("emmc",), ("nvme", "emmc"))
    assert isinstance(nvme.policy, KVSwap)
    assert isinstance(emmc.policy, KVSwap)
    assert (nvme.policy.group_tokens, emmc.policy.group_tokens) == (4, 8)
    whole = LLAMA.full_cache_bytes(2, 32768 + 32)
    for case in (nvme, emmc, loki):
        assert case.limit_bytes == whole // 13
        assert case.plan is not None
        assert 0 < case.plan.total_bytes <= whole / 13
    assert nvme.limit_bytes == pytest.approx(2 * 310 * 2**20, rel=0.02), "Table 1 of the paper"


def test_setting_b_takes_the_largest_batch_of_each_method() -> None:
    cases = cases_of_b(
        ["full", "kvswap", "infinigen-star", "quest"], ["nvme"], [32768], ["2000MiB", "100MiB"],
        ["1/13", "1/34"], MACHINE,
    )  # fmt: skip
    assert [case.method for case in cases] == ["kvswap", "infinigen-star", "quest"] * 2
    ours, infinigen, _ = cases[:3]
    assert ours.batch == 6, "2000 / 315"
    assert infinigen.policy is not None
    assert infinigen.policy.key_ratio == 0.5  # type: ignore[attr-defined]
    for case in (ours, infinigen):
        assert case.plan is not None
        assert case.plan.total_bytes <= 2000 * 2**20
    more = cases_of_b(["infinigen-star"], ["nvme"], [32768], ["2600MiB"], ["1/13"], MACHINE)[0]
    assert more.batch >= infinigen.batch
    assert all(case.refused for case in cases[3:]), "nothing fits into 100 MiB"


@pytest.mark.parametrize("policy", [KVSwap(), KVSwap(reuse_tokens=0), Quest()])
def test_a_part_of_a_plan_keeps_its_choices(policy: Any) -> None:
    limit = LLAMA.full_cache_bytes(1, 32768) // 8
    chosen, plan = plan_whole(policy, 32768, 1, limit, MACHINE)
    part = part_of(plan, 4, 32)
    assert (part.num_slots, part.selected_units) == (plan.num_slots, plan.selected_units)
    assert part.index_bytes == -(-plan.index_bytes // 8)
    assert part_of(plan, 32, 32) == plan
    assert plan.is_coded == (policy == KVSwap())
    slots, kept = plan.num_slots * plan.slot_bytes, plan.kept_slots * plan.unit_bytes
    if plan.shared_pools:
        assert part.pool_bytes == plan.batch * (2 * slots + 6 * kept)
    else:
        assert part.pool_bytes == plan.batch * 4 * (slots + kept)
    again = planned(chosen, part)
    assert again.name == policy.name
    assert isinstance(again, type(policy))


def row(method: str, batch: int, rate: float | None, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "device": "nvme", "context": 1024, "batch": batch, "budget": "1/13",
        "whole_model_tokens_per_s": rate, **more,
    }  # fmt: skip


def test_ratios_are_to_the_best_retrieval_method_of_the_same_case() -> None:
    rows = [
        row("kvswap", 1, 8.0), row("loki", 1, 2.0), row("leoam", 1, 4.0), row("full", 1, 99.0),
        row("flexgen", 1, 50.0), row("kvswap", 2, 10.0), row("kvswap:group_tokens=16", 1, 12.0),
        row("quest", 2, None, predicted_tokens_per_s=2.5), row("loki", 4, 100.0),
    ]  # fmt: skip
    first, second, coarse = ratios_of(rows, same_batch=True)
    assert (first["best"], first["ratio"], first["ratio_of_paper"]) == ("leoam", 2.0, 4.0)
    assert (second["best"], second["ratio"], second["best_of_paper"]) == ("quest", 4.0, None)
    assert (coarse["method"], coarse["ratio"]) == ("kvswap:group_tokens=16", 3.0)
    assert rate_of(rows[7]) == 2.5
    assert ratios_of(rows, same_batch=False)[0]["best"] == "loki"


def test_ratios_by_floors_leave_out_the_drift_of_the_machine() -> None:
    rows = [
        row("kvswap", 1, 8.0, whole_ms=125.0, floor_ms=100.0),
        row("loki", 1, 4.0, whole_ms=250.0, floor_ms=200.0),
    ]
    [ratio] = ratios_of(rows, same_batch=True)
    assert (ratio["ratio"], ratio["by_floors"]) == (2.0, 1.0), "loki's machine was half as fast"
    rows[1]["batch"] = 2
    assert ratios_of(rows, same_batch=False)[0]["by_floors"] is None


def test_other_sittings_are_compared_in_floors() -> None:
    rows = [
        row("kvswap", 1, 8.0, whole_ms=125.0, floor_ms=20.0, sitting=2),
        row("loki", 1, 4.0, whole_ms=250.0, floor_ms=80.0, sitting=1),
        row("leoam", 1, 6.0, whole_ms=167.0, floor_ms=20.0, sitting=2),
        row("quest", 1, 7.0, whole_ms=143.0, floor_ms=None, sitting=1),
    ]
    [ratio] = ratios_of(rows, same_batch=True)
    assert (ratio["best"], ratio["of_other_sittings"]) == ("loki", ["loki", "loki"])
    assert ratio["ratio"] == pytest.approx(0.5), "four times as fast a machine for kvswap"
    assert ratio["by_floors"] == pytest.approx(0.5)
    text = ratios_text([ratio])
    assert text.count("loki, 1024 tokens, batch 1, of another sitting, by floors") == 4
    rows[1]["sitting"] = 2
    [ratio] = ratios_of(rows, same_batch=True)
    assert (ratio["best"], ratio["ratio"]) == ("leoam", pytest.approx(8 / 6))
    assert ratio["of_other_sittings"] == []
    rows[1].update(sitting=1, batch=2)
    assert ratios_of(rows, same_batch=False)[0]["best"] == "leoam", "no floors of one batch"


def test_a_run_and_going_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    arguments = [
        "--setting=A", "--config=tiny", "--contexts=4096", "--batches=1", "--memory=1/3",
        "--devices=nvme", "--steps=2", f"--out={out}",
    ]  # fmt: skip
    settings.run([*arguments, "--methods=kvswap,full"])
    result = settings.run([*arguments, "--methods=kvswap,full,infinigen-star", "--resume"])
    rows = {r["method"]: r for r in result.figures["rows"]}
    assert list(rows) == ["kvswap", "full", "infinigen-star"]
    assert [r["sitting"] for r in result.figures["rows"]] == [1, 1, 2]
    saved = json.loads(out.read_text())
    assert saved["figures"]["rows"] == result.figures["rows"]
    assert saved["settings"]["methods"] == "kvswap,full,infinigen-star"
    ours, star = rows["kvswap"], rows["infinigen-star"]
    # Slots for more than one selection hit more than the overlap of two steps.
    assert 0.72 < ours["hit_rate"] < 1
    assert star["hit_rate"] == 0
    assert star["reads_per_token"] > 3 * ours["reads_per_token"]
    assert ours["whole_model_tokens_per_s"] == pytest.approx(1e3 / ours["whole_ms"])
    assert ours["device_read_ms"] <= ours["predicted_ms"]
    assert set(ours["breakdown_ms"]) == {"io wait", "select", "compute and rest"}
    assert rows["full"].get("hit_rate") is None
    printed = capsys.readouterr()
    assert "nvme (simulated), kvswap over the best" in printed.out
    with pytest.raises(ConfigError, match="cannot resume"):
        settings.run([*arguments, "--resume", "--overlap=0.5"])
    with pytest.raises(ConfigError, match="steps=2, not 3"):
        settings.run([*arguments, "--resume", "--steps=3"])
    settings.run([*arguments, "--resume", "--methods=full"])
    left = json.loads(out.read_text())
    assert left["figures"]["rows"] == saved["figures"]["rows"]
    assert left["settings"]["methods"] == saved["settings"]["methods"]


def test_steps_that_would_take_too_long_are_predicted_instead() -> None:
    result = settings.run([
        "--setting=A", "--config=tiny", "--contexts=4096", "--batches=1", "--memory=1/3",
        "--steps=2", "--methods=infinigen", "--step-seconds=0.05",
    ])  # fmt: skip
    nvme, emmc = result.figures["rows"]
    assert nvme["whole_ms"] > 0
    assert "would read" in emmc["skipped"]
    assert emmc["predicted_tokens_per_s"] > 0
    assert "whole_ms" not in emmc


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices=floppy"], "no device 'floppy'"),
        (["--methods=magic"], "no policy 'magic'"),
        (["--config=llama-3.1-8b", "--layers=3"], "--layers must be 4 to 32"),
        (["--batches=0"], "--batches takes numbers from 1"),
        (["--contexts=x"], "--contexts takes"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.run(["--setting=A", *arguments])
