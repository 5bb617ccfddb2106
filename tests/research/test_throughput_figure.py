"""The figure of step times: bars from zero, unless the rows are too far apart for that."""

import pytest
from matplotlib.patches import Rectangle

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.figures import measured
from research.figures.chart import draw


def result_with(medians: dict[str, float]) -> Result:
    made = Result.begin("throughput", [], {}, seed=0)
    made.settings = {"config": "tiny", "context": 2200, "memory": "1/2"}
    made.figures = {"rows": [
        {
            "name": name, "batch": 1, "simulated": False, "synthetic_stream": False,
            "is_floor": name.startswith("floor"), "figures": {
                "median_ms": ms, "p10_ms": 0.9 * ms, "p90_ms": 1.2 * ms, "tokens_per_s": 1e3 / ms,
            },
        }
        for name, ms in medians.items()
    ]}  # fmt: skip
    return made


@pytest.mark.parametrize(("slowest", "scale"), [(150.0, "linear"), (5000.0, "log")])
def test_bars_stand_on_zero_where_they_can(slowest: float, scale: str) -> None:
    rows = {"floor, StaticCache": 100.0, "kvswap": 125.0, "flexgen": slowest}
    panel = draw(measured.throughput(result_with(rows))).axes[0]
    assert panel.get_xscale() == scale
    assert ("log scale" in panel.get_xlabel()) == (scale == "log")
    bars = [bar for bar in panel.patches if isinstance(bar, Rectangle)]
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert sorted(ends) == pytest.approx(sorted(rows.values()))
    if scale == "linear":
        assert [bar.get_x() for bar in bars] == [0.0] * 3
    assert panel.get_xlim()[1] > 1.2 * slowest


def test_a_result_without_rows_has_no_figure() -> None:
    with pytest.raises(ConfigError, match="no row"):
        draw(measured.throughput(result_with({})))
