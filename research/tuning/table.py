"""What `python -m research.tuning` prints: lines for devices, settings and targets."""

from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.evaluate.text_table import format_table
from research.tuning.setting_runs import short_name
from research.tuning.summary import (
    LEAST_SAVING,
    LEAST_SETTINGS,
    LEAST_SHARE,
    MOST_MEDIAN_ERROR,
    MOST_WORST_ERROR,
)

Row = dict[str, Any]
_SWEEP_TARGETS = {
    "share": f"pick at least {LEAST_SHARE:.0%} of the best of the sweep",
    "share_again": f"pick at least {LEAST_SHARE:.0%} of the best, all run again together",
    "saving": f"at least {LEAST_SAVING:.0f}x fewer runs than the sweep",
    "settings": f"at least {LEAST_SETTINGS} settings run",
    "memory": "no cache held more than planned",
}
_PREDICT_TARGETS = {
    "median": f"median error at most {MOST_MEDIAN_ERROR:.0%}",
    "worst": f"worst error at most {MOST_WORST_ERROR:.0%}",
    "memory": "no cache held more than planned",
}


def sweep_table(figures: Row) -> str:
    """For each device its picks beside the best, then what the tuner saved and missed."""
    parts = [f"{figures['listed']} settings of kvswap; {figures['quality']['guard']}"]
    if closer := figures.get("closer_quality"):  # random weights and older results have none
        parts[0] += (
            f": {len(figures['quality']['texts'])} of them; picks and fastest on "
            f"{len(closer['texts'])}"
        )
    for name, device in figures["devices"].items():
        parts.append(_settings(name, device))
    header = ("device", "fit", "run", "by tuner", "fewer", "fewer steps", "pick/best", "again",
              "paper/best", "again", "median error", "worst", "memory held")  # fmt: skip
    lines = []
    for name, device in figures["devices"].items():
        found, tuner = device["summary"], device["tuner"]
        beside = tuner["fidelity_checks"] + tuner.get("surveys", 0)
        lines.append([
            name, str(device["fit"]), str(device["sweep"]["runs"]),
            f"{tuner['runs']}+{beside}",
            f"{found['saving']:.1f}x", f"{found['saving_of_steps']:.1f}x",
            _share(found["share"]["pick"]), _share(found["share_again"]["pick"]),
            _share(found["share"]["paper"]), _share(found["share_again"]["paper"]),
            _share(found["errors"]["median"]), _share(found["errors"]["worst"]),
            f"{found['memory']['held']}/{found['memory']['of']}",
        ])  # fmt: skip
    parts.append(format_table(header, lines))
    for name, device in figures["devices"].items():
        parts.append(_targets(name, device["summary"]["met"], _SWEEP_TARGETS))
    return "\n\n".join(parts)


def _settings(name: str, device: Row) -> str:
    """What was run again: in the sweep, and together."""
    swept = {short_name(row): row for row in device["settings"]}
    header = (f"{name}: the fastest, and the picks", "tokens/s", "again", "predicted", "stall",
              "KL", "expected", "is")  # fmt: skip
    lines = []
    for row in sorted(device["final"], key=lambda row: -row["tokens_per_s"]):
        before = swept[short_name(row)]
        lines.append([
            short_name(row), f"{before['tokens_per_s']:.2f}", f"{row['tokens_per_s']:.2f}",
            f"{row['predicted_tokens_per_s']:.2f}", f"{row['stall_s'] / row['step_s']:.0%}",
            _kl(row.get("kl")), _kl(row["kl_predicted"]), ", ".join(row["roles"]) or "-",
        ])  # fmt: skip
    return format_table(header, lines)


def predict_table(figures: Row) -> str:
    """A line for each configuration, then errors by device."""
    header = ("device, batch x context", "G", "MG", "C", "rank", "predicted", "measured", "error",
              "memory")  # fmt: skip
    lines = [
        [
            f"{row['device']}, {row['batch']} x {row['context']:,}", str(row["group_tokens"]),
            str(row["selected_tokens"]), str(row["capacity_tokens"]),
            f"{row['rank']}/{row['index_bits']}", f"{row['predicted_tokens_per_s']:.2f}",
            f"{row['tokens_per_s']:.2f}", f"{row['error']:+.1%}",
            f"{row['peak_bytes'] / row['predicted_bytes']:.1%}",
        ]
        for row in figures["rows"]
    ]  # fmt: skip
    found = figures["summary"]
    errors = {
        **found["by_device"], "all": found["errors"], "all, by the clock": found["clock_errors"]
    }  # fmt: skip
    sums = format_table(
        ("device", "configurations", "median error", "worst", "bias"),
        [[name, str(each["count"]), _share(each["median"]), _share(each["worst"]),
          "-" if each["bias"] is None else f"{each['bias']:+.1%}"]
         for name, each in errors.items()],
    )  # fmt: skip
    return "\n\n".join(
        [format_table(header, lines), sums, _targets("all", found["met"], _PREDICT_TARGETS)]
    )


def _targets(name: str, met: dict[str, bool], targets: dict[str, str]) -> str:
    return "\n".join(
        f"{name}: {'met   ' if met[key] else 'MISSED'}  {text}" for key, text in targets.items()
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _kl(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def auto_table(figures: Row) -> str:
    """For each budget and device every policy's solution, run side by side."""
    header = ("budget", "device", "policy", "tokens/s", "memory", "KL", "agreement", "is")
    lines, notes = [], []
    for case in figures["cases"]:
        lines += [
            [
                case["budget"], case["device"], row["policy"], f"{row['tokens_per_s']:.1f}",
                format_bytes(row["resident_bytes"]), f"{row['kl']:.4f}",
                f"{100 * row['agreement']:.0f} %", "the pick" if row["is_pick"] else "",
            ]
            for row in sorted(case["rows"], key=lambda row: -row["tokens_per_s"])
        ]  # fmt: skip
        notes.append(
            f"{case['budget']} on {case['device']}: the pick, {case['pick']}, has "
            f"{100 * case['pick_over_best']:.0f} % of the fastest, {case['best']}"
        )
    return "\n".join([format_table(header, lines), "", *notes])
