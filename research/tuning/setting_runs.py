"""Runs of tuned settings, what they come to, and their tables."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from penstock.core.byte_size import format_bytes
from penstock.evaluate.progress import Progress
from penstock.evaluate.text_table import format_table
from penstock.methods.search_space import fields_of
from penstock.tuner.block_profile import BlockProfile
from penstock.tuner.candidates import Candidate
from penstock.tuner.engine_run import EngineRun, StepFigures, as_dict, room_for, run_together
from penstock.tuner.kvswap_search import Spot
from penstock.tuner.solver import expect, keeps_quality
from penstock.tuner.tuning_task import TuningTask

# The best, the pick's share of it, errors, memory, targets ----------------------------------------

Row = dict[str, Any]

LEAST_SHARE = 0.95
"""Of the best throughput that a pick should reach."""
LEAST_SAVING = 20.0
"""Settings of a sweep for each that the tuner runs."""
MOST_MEDIAN_ERROR, MOST_WORST_ERROR = 0.10, 0.25
LEAST_SETTINGS = 200
TOP = 5
"""Fastest settings that are run again beside pick and best."""


def keeps_all(row: Row, floor: float) -> bool:
    """Whether a setting kept quality, as measured (within the limits where nothing was), and
    stayed within its planned memory."""
    good = row["kl"] <= floor if row.get("kl") is not None else row["within_limits"]
    return bool(good and keeps_memory(row))


def keeps_memory(row: Row) -> bool:
    """Whether a cache never held more than was planned."""
    return bool(row["peak_bytes"] <= row["predicted_bytes"])


def fastest(rows: Iterable[Row], floor: float, count: int = 1) -> list[Row]:
    """The fastest of those that keep quality and memory, fastest first."""
    good = [row for row in rows if keeps_all(row, floor)]
    return sorted(good, key=lambda row: -float(row["tokens_per_s"]))[:count]


def errors_of(rows: Iterable[Row], name: str = "error") -> Row:
    """Relative errors of predicted tokens/s. Median and worst are without sign; "bias" is the
    median with it, positive where too much was predicted."""
    errors = [float(row[name]) for row in rows]
    if not errors:
        return {"count": 0, "median": None, "worst": None, "bias": None}
    sizes = np.abs(errors)
    return {
        "count": len(errors), "median": float(np.median(sizes)), "worst": float(sizes.max()),
        "bias": float(np.median(errors)),
    }  # fmt: skip


def memory_of(rows: Sequence[Row]) -> Row:
    """How many stayed within the memory that was planned, and the most that one took of it."""
    return {
        "held": sum(keeps_memory(row) for row in rows), "of": len(rows),
        "most": max((row["peak_bytes"] / row["predicted_bytes"] for row in rows), default=0.0),
    }  # fmt: skip


def share_of(row: Row | None, best: Row | None) -> float | None:
    """A setting's throughput over another's."""
    if row is None or best is None:
        return None
    return float(row["tokens_per_s"] / best["tokens_per_s"])


def role(rows: Iterable[Row], name: str) -> Row | None:
    """The row of "pick", "best" or "paper"."""
    return next((row for row in rows if name in row["roles"]), None)


def sweep_summary(device: Row, floor: float) -> Row:
    """Of one device of a sweep, see `sweep`: shares, savings, errors, and what met its target."""
    rows, final = device["settings"], device["final"]
    best, again = role(rows, "best"), next(iter(fastest(final, floor)), None)
    tuner, sweep = device["tuner"], device["sweep"]
    pick = role(rows, "pick")
    share = {name: share_of(role(rows, name), best) for name in ("pick", "paper")}
    share_again = {name: share_of(role(final, name), again) for name in ("pick", "paper")}
    errors = errors_of(row for row in rows if not row["of_tuner"])
    memory = memory_of(rows)
    beside = tuner["fidelity_checks"] + tuner.get("surveys", 0)  # older results have none
    saving = sweep["runs"] / (tuner["runs"] + beside)
    return {
        "share": share, "share_again": share_again, "saving": saving,
        "saving_of_steps": sweep["decode_steps"] / max(1, tuner["decode_steps"]),
        "groups": {
            name: None if (row := role(rows, name)) is None else row["group_tokens"]
            for name in ("pick", "best", "paper")
        },
        "pick_keeps_all": pick is not None and keeps_all(pick, floor),
        "errors": errors, "memory": memory,
        "met": {
            "share": (share["pick"] or 0) >= LEAST_SHARE,
            "share_again": (share_again["pick"] or 0) >= LEAST_SHARE,
            "saving": saving >= LEAST_SAVING, "settings": len(rows) >= LEAST_SETTINGS,
            "memory": memory["held"] == memory["of"],
        },
    }  # fmt: skip


def predict_summary(rows: Sequence[Row]) -> Row:
    """Of all configurations and of each device's; and what the clock alone would have said."""
    names = dict.fromkeys(row["device"] for row in rows)
    by_device = {
        name: errors_of(row for row in rows if row["device"] == name) for name in names
    }  # fmt: skip
    errors, memory = errors_of(rows), memory_of(rows)
    met = {
        "median": errors["median"] is not None and errors["median"] <= MOST_MEDIAN_ERROR,
        "worst": errors["worst"] is not None and errors["worst"] <= MOST_WORST_ERROR,
        "memory": memory["held"] == memory["of"],
    }
    return {
        "errors": errors, "by_device": by_device, "clock_errors": errors_of(rows, "clock_error"),
        "memory": memory, "met": met,
    }  # fmt: skip


# Settings of KVSwap run together on a device, by way of the journal; and their rows ---------------


def run_settings(
    task: TuningTask, spot: Spot, chosen: Sequence[Candidate], *, name: str, steps: int,
    rounds: int, progress: Progress | None = None,
) -> list[Row]:  # fmt: skip
    """What each setting takes, all of them open and taking turns; known ones are not run again.

    Steps are told at the task's pace, `clock_step_s` as the clock had it.

    Args:
        name: of this kind of run, for the journal.
        steps: of a round.
        progress: is moved on by as many as were chosen.

    Returns:
        `StepFigures` as plain data, with the memory that was planned and the most that was held,
        in bytes. [chosen]

    Raises:
        StorageError: the disk is full or cannot be used.
    """
    keys = [
        {
            "run": name, "batch": spot.batch, "context": spot.context, "limit": spot.limit_bytes,
            "steps": steps, "rounds": rounds, "fields": fields_of(each.policy),
        }
        for each in chosen
    ]  # fmt: skip
    journal, open_runs = task.journal, list[EngineRun]()
    is_known = all(journal.knows(key) for key in keys)
    if not is_known:  # together or not at all
        room = room_for(rounds, steps)
        try:
            for each in chosen:
                work = task.workpiece(spot.batch, spot.context, room)
                open_runs.append(
                    EngineRun(work, each.policy, store=task.store, limit_bytes=spot.limit_bytes)
                )
            found = run_together(open_runs, steps=steps, rounds=rounds)
            for key, run, figures in zip(keys, open_runs, found, strict=True):
                journal.note(key, as_dict(figures) | _memory(run))
        finally:
            for run in open_runs:
                run.close()
    if progress is not None:
        (progress.skip if is_known else progress.step)(len(keys))
    return [_paced(journal.recall(key), task.pace_s) for key in keys]


def _paced(row: Row, pace_s: float) -> Row:
    """A row of the journal at another pace."""
    names = [each.name for each in fields(StepFigures)]
    return {**row, **as_dict(StepFigures(**{name: row[name] for name in names}).at(pace_s))}


def middle_run(runs: Sequence[Row]) -> Row:
    """Of several runs of a setting the one whose step is the middle one, with the steps of all, in
    seconds, and the most memory that any held."""
    middle = sorted(runs, key=_step_s)[len(runs) // 2]
    most = {name: max(run[name] for run in runs) for name in ("used_bytes", "peak_bytes")}
    return {**middle, **most, "runs_step_s": [_step_s(run) for run in runs]}


def _step_s(run: Row) -> float:
    return float(run["step_s"])


def _memory(run: EngineRun) -> Row:
    report = run.memory
    return {
        "planned_bytes": run.plan.total_bytes, "used_bytes": report.used_bytes,
        "peak_bytes": report.peak_bytes,
    }  # fmt: skip


def setting_row(
    profile: BlockProfile, candidate: Candidate, found: Row, *, floor: float, of_tuner: bool
) -> Row:
    """One setting: what it is, what was predicted and what was measured.

    Args:
        profile: the tuner's last.
        found: of `run_settings`.
        of_tuner: the tuner had measured this setting itself.
    """
    kl, expected = candidate.kl, expect(profile, candidate)
    work = profile.merged(candidate.work)
    return {
        **name_of(candidate), "of_tuner": of_tuner,
        "predicted_step_s": expected.step_s, "predicted_stall_s": expected.stall_s,
        "predicted_tokens_per_s": expected.tokens_per_s,
        "predicted_missing": work.missing, "predicted_reads": work.reads,
        "predicted_read_bytes": work.read_bytes, "predicted_bytes": candidate.resident_bytes,
        "tokens_per_s": work.batch / found["step_s"],
        "clock_tokens_per_s": work.batch / found["clock_step_s"],
        "missing": found["units_wanted"] - found["units_hit"],
        "error": found["step_s"] / expected.step_s - 1,
        "clock_error": found["clock_step_s"] / expected.step_s - 1,
        "kl_predicted": kl if kl is None or kl < float("inf") else None,
        "within_limits": keeps_quality(candidate, floor), **found,
    }  # fmt: skip


def name_of(candidate: Candidate) -> Row:
    """Which setting it is."""
    policy, plan = candidate.policy, candidate.plan
    return {
        "fields": fields_of(policy), "group_tokens": plan.group_tokens,
        "selected_tokens": candidate.selected_tokens, "capacity_tokens": candidate.capacity_tokens,
        "rank": policy.rank, "index_bits": policy.index_bits,
    }  # fmt: skip


def short_name(row: Row) -> str:
    """A setting as tables and figures call it: "G=4 MG=400 C=800 r=64/8"."""
    return (
        f"G={row['group_tokens']} MG={row['selected_tokens']} C={row['capacity_tokens']} "
        f"r={row['rank']}/{row['index_bits']}"
    )


# Lines for devices, settings and targets ----------------------------------------------------------

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
