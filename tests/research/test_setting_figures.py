"""Figures of settings A and B: rates at their batch, bars with their batch, parts of a block."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures import settings
from research.figures.chart import draw
from tests.research.drawn_figures import figures_drawn


def make(kind: str, settings: dict[str, Any], **figures: Any) -> Result:
    return Result(
        kind=kind, command="", settings=settings, seed=0, machine={"cores": 2, "gpu": None},
        libraries={}, commit="", date="", figures=figures,
    )  # fmt: skip


def titles(figure: Figure) -> list[str]:
    return [axes.get_title("left") or axes.get_title() for axes in figure.axes]


def panel(figure: Figure, title: str = "") -> Any:
    return figure.axes[titles(figure).index(title)]


def tick_labels(axes: Any, which: str) -> list[str]:
    return [label.get_text() for label in getattr(axes, f"get_{which}ticklabels")()]


def setting_row(method: str, device: str, context: int, batch: int, rate: float | None) -> Any:
    return {
        "method": method, "device": device, "context": context, "batch": batch,
        "whole_model_tokens_per_s": rate, "overlap": None, "breakdown_ms": None,
        "skipped": None if rate else "does not fit",
    }  # fmt: skip


def setting(letter: str, rows: list[Any]) -> Result:
    settings = {
        "setting": letter, "config": "llama-3.1-8b", "layers": 4, "on": "cpu",
        "memory": "1/13" if letter == "A" else "2000MiB",
    }  # fmt: skip
    return make("setting", settings, rows=rows, ratios=[])


def test_setting_a_has_a_line_for_each_method() -> None:
    rates = {("kvswap", "nvme"): 10, ("flexgen", "nvme"): 1, ("kvswap", "real"): 7}
    rows = [
        setting_row(method, device, context, batch, rate * batch * (1 if context == 16384 else 0.5))
        for (method, device), rate in rates.items()
        for context in (32768, 16384)
        for batch in (4, 1, 2)
    ]
    rows.append(setting_row("flexgen", "real", 16384, 1, None))
    figure = draw(settings.throughput(setting("A", rows)))
    near, far = panel(figure, "NVMe (simulated), 16K tokens"), "this disk, 32K tokens"
    lines = {str(line.get_label()): line.get_xydata() for line in near.get_lines()}
    assert lines["kvswap"][:, 1].tolist() == [10, 20, 40]
    assert lines["flexgen"][:, 1].tolist() == [1, 2, 4]
    assert [f"{x:.0f}" for x in lines["kvswap"][:, 0]] == ["0", "1", "2"]
    assert tick_labels(panel(figure, "this disk, 16K tokens"), "x") == ["1", "2", "4"]
    [only] = panel(figure, far).get_lines()
    assert only.get_xydata()[:, 1].tolist() == [3.5, 7, 14]
    assert near.get_yscale() == "log"
    ours, other = near.get_lines()
    assert ours.get_linewidth() > other.get_linewidth()
    names = {text.get_text(): text.get_position()[1] for text in near.texts}
    assert names["kvswap"] > names["flexgen"], "a name is at the height of its line"
    assert "simulated" in figure.get_suptitle()
    assert "4 layers" in figure.get_suptitle()


def test_names_of_many_lines_stay_in_their_panel() -> None:
    rows = [setting_row(f"method-{n}", "nvme", 16384, 1, 100.0 + n) for n in range(10)]
    rows.append(setting_row("kvswap", "nvme", 16384, 1, 0.01))
    figure = draw(settings.throughput(setting("A", rows)))
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert len(axes.texts) == 11
        edge = axes.get_window_extent()
        for text in axes.texts:
            box = Text.get_window_extent(text)
            assert edge.y0 <= (box.y0 + box.y1) / 2 <= edge.y1
            assert box.x1 <= edge.x1 + 1


def test_a_measured_disk_is_not_called_simulated() -> None:
    figure = draw(settings.throughput(setting("A", [setting_row("kvswap", "real", 16384, 1, 2.0)])))
    assert "simulated" not in figure.get_suptitle()


def test_selections_that_are_made_up_have_a_line_of_their_own() -> None:
    plain = setting_row("kvswap", "nvme", 16384, 1, 2.0)
    figure = draw(
        settings.throughput(
            setting("A", [plain, {**plain, "overlap": 0.77, "whole_model_tokens_per_s": 4.0}])
        )
    )
    axes = panel(figure, "NVMe (simulated), 16K tokens")
    assert [line.get_label() for line in axes.get_lines()] == ["kvswap", "kvswap, 77 % overlap"]
    assert "synthetic selections: 77 %" in figure.get_suptitle()
    alone = draw(settings.throughput(setting("A", [{**plain, "overlap": 0.77}])))
    assert [line.get_label() for line in alone.axes[0].get_lines()] == ["kvswap"]
    assert "synthetic selections: 77 %" in alone.get_suptitle()


def test_setting_b_has_the_largest_batch_on_its_bars() -> None:
    rows = [
        setting_row("flexgen", "emmc", 16384, 3, 2.0),
        setting_row("kvswap", "emmc", 16384, 9, 12.0),
        setting_row("kvswap", "emmc", 16384, 16, 14.5),
        setting_row("full", "emmc", 16384, 1, None),
        setting_row("kvswap", "nvme", 16384, 16, 77.0),
        setting_row("kvswap", "emmc", 32768, 16, 88.0),
    ]
    figure = draw(settings.throughput(setting("B", rows)))
    axes = panel(figure, "eMMC (simulated), 16K tokens")
    assert tick_labels(axes, "y") == ["kvswap", "flexgen", "full, in memory"]
    bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in axes.patches}
    assert bars == {0: 14.5, 1: 2.0}
    texts = {round(text.xy[1]): text.get_text() for text in axes.texts}
    assert texts == {0: "14  (b = 16)", 1: "2.0  (b = 3)", 2: "does not fit"}
    assert "2000MiB in all, simulated devices" in figure.get_suptitle()
    for title, rate in (("NVMe (simulated), 16K tokens", 77), ("eMMC (simulated), 32K tokens", 88)):
        assert [bar.get_width() for bar in panel(figure, title).patches] == [rate]
        assert [text.get_text() for text in panel(figure, title).texts][1:] == ["not run"] * 2


def test_setting_b_has_a_bar_for_each_budget() -> None:
    wide, tight = {"budget": "2000MiB"}, {"budget": "800MiB"}
    rows = [
        {**setting_row("loki", "nvme", 16384, 7, 20.0), **wide},
        {**setting_row("loki", "nvme", 16384, 2, 5.0), **tight},
        {**setting_row("kvswap", "nvme", 16384, 9, 30.0), **tight},
        {**setting_row("kvswap", "nvme", 16384, 16, None), **wide, "predicted_tokens_per_s": 40.0},
    ]
    figure = draw(settings.throughput(setting("B", rows)))
    axes = panel(figure, "NVMe (simulated), 16K tokens")
    texts = {round(text.xy[1], 2): text.get_text() for text in axes.texts}
    assert texts == {
        -0.21: "about 40  (b = 16)", 0.21: "30  (b = 9)",
        0.79: "20  (b = 7)", 1.21: "5.0  (b = 2)",
    }  # fmt: skip
    assert [bar.get_width() for bar in axes.patches if bar.get_hatch()] == [40.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "2000MiB in all", "800MiB in all",
    ]  # fmt: skip
    assert "2000MiB in all or 800MiB in all" in figure.get_suptitle()


def test_what_was_too_slow_to_run_is_hollow() -> None:
    rows = [setting_row("loki", "emmc", 16384, 1, 0.5), setting_row("loki", "emmc", 16384, 2, None)]
    rows[1]["predicted_tokens_per_s"] = 0.8
    figure = draw(settings.throughput(setting("A", rows)))
    axes = panel(figure, "eMMC (simulated), 16K tokens")
    assert axes.get_lines()[0].get_xydata().tolist() == [[0, 0.5], [1, 0.8]]
    [hollow] = axes.collections
    assert hollow.get_offsets().tolist() == [[1, 0.8]]
    assert "hollow: not run" in figure.get_suptitle()


def test_methods_without_a_budget_do_not_name_one() -> None:
    free = {**block("flexgen", 8, io=9.0), "budget": "none"}
    both = setting("A", [free, {**block("kvswap", 8, io=1.0), "budget": "1/34"}])
    for figure in (draw(settings.throughput(both)), draw(settings.breakdown(both))):
        assert "KV budget 1/34 of the full cache" in figure.get_suptitle()
        assert "none" not in figure.get_suptitle()


def block(method: str, batch: int, device: str = "nvme", **parts: float) -> Any:
    names = {"io": "io wait", "select": "select", "rest": "compute and rest"}
    row = setting_row(method, device, 16384, batch, 1.0)
    return {**row, "breakdown_ms": {names[part]: ms for part, ms in parts.items()}}


def test_the_breakdown_stacks_the_parts_of_each_method() -> None:
    rows = [
        block("kvswap", 8, io=1.0, select=0.5, rest=3.0), block("quest", 8, io=4, select=1, rest=2),
        block("loki", 8, io=6.0, select=1.0, rest=2.0), block("flexgen", 8, io=90, rest=3.0),
        block("kvswap", 16, io=55.0, rest=1.0), block("kvswap", 8, "emmc", io=77.0, rest=1.0),
    ]  # fmt: skip
    figure = draw(settings.breakdown(setting("A", rows)))
    axes = panel(figure)
    assert len(figure.axes) == 1
    assert tick_labels(axes, "y") == ["flexgen", "loki", "quest", "kvswap"]
    stacks = {
        bars.get_label(): [(bar.get_x(), bar.get_width()) for bar in bars]
        for bars in axes.containers
    }
    assert list(stacks) == ["io wait", "select", "compute and rest"]
    assert [each[3] for each in stacks.values()] == [(0, 1.0), (1.0, 0.5), (1.5, 3.0)]
    assert stacks["compute and rest"][0] == (90, 3.0)
    totals = [text.get_text() for text in axes.texts if text.get_text().endswith("ms")]
    assert totals == ["93 ms", "9.0 ms", "7.0 ms", "4.5 ms"]
    assert 9 < axes.get_xlim()[1] < 20, "one long bar does not hide the others"
    assert [text.get_position()[1] for text in axes.texts if text.get_text() == "//"] == [0]
    assert "NVMe (simulated), 16,384 tokens, batch 8" in figure.get_suptitle()
    tied = draw(
        settings.breakdown(setting("A", [block("loki", 8, io=1), block("loki", 8, "emmc", io=1)]))
    )
    assert "NVMe" in tied.get_suptitle()
    with pytest.raises(ConfigError, match="breakdown"):
        draw(settings.breakdown(setting("A", [setting_row("loki", "nvme", 16384, 1, 1.0)])))
    with pytest.raises(ConfigError, match="breakdown"):  # batches differ from method to method
        settings.breakdown(setting("B", rows))


def test_results_and_their_figures(tmp_path: Path) -> None:
    rows = [block("kvswap", 1, io=1.0, rest=1.0), setting_row("loki", "nvme", 16384, 1, 2.0)]
    setting("A", rows).save(tmp_path / "s.json")
    setting("A", rows[1:]).save(tmp_path / "t.json")
    paths = [tmp_path / f"{name}.json" for name in "st"]
    assert figures_drawn(*paths) == ["s", "s-breakdown", "t"]


def test_nothing_to_draw_is_refused() -> None:
    for letter in "AB":
        for rows in ([], [setting_row("full", "nvme", 16384, 1, None)]):
            with pytest.raises(ConfigError, match="no row"):
                draw(settings.throughput(setting(letter, rows)))
