"""Figure of `clusters.quality`: what clusters find of full attention, along an output."""

import numpy as np
from matplotlib.figure import Figure

from penstock.core.errors import ConfigError
from penstock.evaluate.figure_style import FAINT, SERIES
from penstock.evaluate.result import Result
from research.clusters.end_to_end_table import NO_CLUSTERS

NAMES = {
    "full": "all of the past", "dynakv": "DynaKV", NO_CLUSTERS: "no clusters (single tokens)",
    "dynakv:update=static,layout=tokens": "static update", "pqcache": "PQCache",
    "dynakv:update=local,layout=tokens": "local update", "clusterkv": "ClusterKV",
}  # fmt: skip
_COLOURS = {
    "dynakv": SERIES[0], NO_CLUSTERS: SERIES[1], "pqcache": SERIES[2], "clusterkv": SERIES[3],
    "dynakv:update=local,layout=tokens": "#b5375a",
    "dynakv:update=static,layout=tokens": "#3d9c98", "full": FAINT,
}  # fmt: skip


def draw_cluster_quality(result: Result) -> Figure:
    """Left: the likeliest token is that of full attention. Right: nats that a token costs more.

    Raises:
        ConfigError: there is no full attention to compare with.
    """
    rows = [row for row in result.figures.get("methods", []) if "as_full_by_part" in row]
    full = next((row for row in rows if row["method"] == "full"), None)
    if full is None:
        raise ConfigError("this result has no row of full attention to compare with")
    figure = Figure(figsize=(12.5, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = next(row["steps"] for row in result.figures["rows"] if "steps" in row)
    for row in rows:
        method = row["method"]
        if method == "full":
            continue
        same = np.array(row["as_full_by_part"])
        more = np.array(row["nats_by_part"]) - np.array(full["nats_by_part"])
        places = (np.arange(len(same)) + 0.5) * steps / len(same)
        look = {
            "color": _COLOURS.get(method), "label": NAMES.get(method, method), "marker": "o",
            "markersize": 4, "linewidth": 2.2 if method == "dynakv" else 1.4,
        }  # fmt: skip
        left.plot(places, 100 * same, **look)
        right.plot(places, more, **look)
    left.set_title("likeliest token as under full attention, %")
    right.set_title("what the text's next token costs more, nats")
    right.axhline(0, color=FAINT, linewidth=1)
    for axes in (left, right):
        axes.set_xlabel("tokens of the output")
        axes.set_xlim(0, steps)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=6, fontsize=10)
    selected = result.settings["selected"]
    figure.suptitle(
        f"Long outputs on {result.figures['model']}, {selected} tokens selected by every method",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    return figure
