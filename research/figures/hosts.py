"""Figures of many hosts, simulated: first tokens by load, popularity, network and losses."""

from collections.abc import Callable

from penstock.evaluate.figure_style import FAINT, SERIES
from penstock.evaluate.result import Result
from research.figures.chart import PERCENT, Axis, Chart, Look, Panel, Row, curves, required
from research.hosts.program import GBIT_S, NAMES

_COLOURS = dict(zip(NAMES, (SERIES[0], SERIES[3], SERIES[1], FAINT), strict=True))
_SECONDS = "first token, p99, s (log scale)"


def _of_policy(name: str) -> Look:
    return {"color": _COLOURS[name], "label": NAMES[name], "markersize": 4, "linewidth": 1.6}


def _panel(
    rows: list[Row], x: str, y: str, title: str, axis: Axis, *, form: Axis,
    by: str = "policy", look: Callable[[str], Look] = _of_policy, legend: bool = False,
) -> Panel:  # fmt: skip
    return Panel(
        title=title, marks=curves(rows, by, x, y, look), x=axis, y=form, grid="both",
        legend={"loc": "upper left", "fontsize": 9} if legend else None,
    )  # fmt: skip


def tails(result: Result) -> Chart:
    """The 99th percentile over load, popularity and the network; hits over popularity.

    Raises:
        ConfigError: a part was not simulated.
    """
    rows = {
        part: required([row for row in result.figures["rows"] if row["part"] == part],
                       f"this result of hosts has no part {part}")
        for part in ("load", "skew", "network")
    }  # fmt: skip
    network = [row | {"gbit_s": row["network_bytes_s"] / GBIT_S} for row in rows["network"]]
    cards = sorted({row["gbit_s"] for row in network})
    seconds = Axis(label=_SECONDS, log=10)
    settings = result.settings
    return Chart(
        title=f"{settings['hosts']} hosts, {settings['documents']:,} documents, simulated from "
              f"{settings['single']['settings']['model']} on one host",
        size=(13.2, 8.6), panels=[
            [
                _panel(rows["load"], "load", "first_p99_s", "Load (Zipf 0.6)",
                       Axis(label="share of the workers' time", form=PERCENT), form=seconds,
                       legend=True),
                _panel(rows["skew"], "skew", "first_p99_s", "Popularity (load 60 %)",
                       Axis(label="Zipf's exponent"), form=seconds),
            ],
            [
                _panel(network, "gbit_s", "first_p99_s", "Network (load 70 %, Zipf 0.9)",
                       Axis(label="a host's card, Gb/s", log=10, ticks=cards,
                            names=[f"{card:g}" for card in cards]), form=seconds),
                _panel(rows["skew"], "skew", "hit_rate", "Requests that meet their document",
                       Axis(label="Zipf's exponent"), form=Axis(low=0, high=1.03, form=PERCENT)),
            ],
        ],
    )  # fmt: skip
