"""`device_tier.kernels` on a CPU, and the figures of both programs from what they wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.device_tier import kernels, speed
from research.device_tier.kernel_cases import SMALL, KernelCase
from research.figures import device_tier
from research.figures.chart import draw
from tests.research.drawn_figures import figures_drawn

SMALL_RUN = ["--on", "cpu", "--small", "--config", "tiny", "--most-seconds", "0.001"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    kernels.run([*SMALL_RUN, "--out", str(out)])
    return out


def test_every_kernel_is_measured_beside_its_twin(measured: Path) -> None:
    figures = Result.load(measured).figures
    assert all(rate > 0 for rate in figures["ceilings"].values())
    names = {row["kernel"] for row in figures["rows"]}
    assert names == {
        "gather_units", "gather_units beside", "gather_range", "store_tokens", "append_token",
        "pool_attention",
        "score_units", "select_tokens", "plan_slots", "find_boundaries, grow_units",
        "kmeans",
    }  # fmt: skip
    for row in figures["rows"]:
        assert "error" not in row
        assert row["us"] > 0
        alone = row["kernel"] == "gather_range"  # it is torch's own copy
        alone |= row["kernel"] == "kmeans" and "blocks of 512" in row["size"]
        assert ("twin_us" in row) is not alone
    gathers = [row for row in figures["rows"] if row["kernel"] == "gather_units"]
    assert len(gathers) == len(SMALL.unit_bytes) * len(SMALL.wanted)
    first, rate = gathers[0], figures["ceilings"]["pinned to GPU"]
    assert first["bytes_per_s"] == pytest.approx(2 * 4 * 512 / first["us"] * 1e6)
    assert first["of_ceiling"] == pytest.approx(first["bytes_per_s"] / rate)
    assert len(figures["clustering"]) == len(SMALL.cluster_blocks)
    one = figures["clustering"][0]
    assert one["of_prefill"] == pytest.approx(one["all_layers_s"] / one["prefill_s"])


def test_a_kernel_that_fails_says_why() -> None:
    def broken() -> None:
        raise ValueError("not so\nlong")

    case = KernelCase(kernel="one", size="small", calls=[broken], twins=[broken])
    row = kernels.measure(case, torch.device("cpu"), {}, 0.001)
    assert row["error"] == "ValueError: not so"
    assert "not so" in kernels.kernel_table({"ceilings": {"matmul": 1e12}, "rows": [row]})


def test_unknown_topics_are_refused() -> None:
    with pytest.raises(ConfigError, match="sorting"):
        kernels.run([*SMALL_RUN, "--topics", "sorting"])


def test_figures_are_drawn_from_the_files(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "fast.json"
    speed.run([
        "--config", "tiny", "--layers", "2", "--on", "cpu", "--patterns", "96/60", "--batches",
        "1,2", "--steps", "8", "--breakdown", "4", "--out", str(out), "--methods",
        "louiskv:selected_tokens=32,window_tokens=16,sink_tokens=4,full-dynamic",
    ])  # fmt: skip
    names = figures_drawn(out, measured)
    assert names == ["fast", "fast-breakdown", "kernels"]
    result = Result.load(out)
    upper, lower = draw(device_tier.speed(result)).axes
    assert upper.get_title("left") or upper.get_title() == "96 in, 60 out"
    heights = [bar.get_height() for bar in _bars(upper)]
    rates = [row["tokens_per_s"] for row in result.figures["rows"]]
    assert sorted(rates) == pytest.approx(sorted(h for h in heights if h > 0))
    assert not [bar for bar in _bars(lower) if bar.get_height() > 0], "no GPU, no GPU memory"
    assert len(draw(device_tier.breakdown(result)).axes) == 1
    kernels_figure = draw(device_tier.kernels(Result.load(measured)))
    assert len(kernels_figure.axes) == 5, "four ceilings, and the prefill"
    shares = [entry["of_prefill"] for entry in Result.load(measured).figures["clustering"]]
    assert [bar.get_width() for bar in _bars(kernels_figure.axes[-1])] == pytest.approx(shares)


def _bars(axes: Any) -> list[Any]:
    return [bar for container in axes.containers for bar in container]


def test_nothing_to_draw_is_said(measured: Path) -> None:
    result = Result.load(measured)
    result.figures = {"rows": [{"pattern": "1/1", "batch": 1, "method": "x", "error": "no"}]}
    for chart in (device_tier.speed, device_tier.breakdown, device_tier.kernels):
        with pytest.raises(ConfigError):
            chart(result)
