"""What `clusters.end_to_end` sums up, prints and merges, with the paper's figures beside it."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import check_same, grow
from penstock.evaluate.text_table import format_table
from research.clusters.steps import CACHE, DISK, MAIN, key_of

# Our figures with the paper's beside them ---------------------------------------------------------

OURS = "dynakv"
NO_CLUSTERS = "loki:key_ratio=1,predict=false"
"""Single tokens of each head by their whole keys, turned into a basis of the head's own: the exact
ranking but for the rounding to 16 bits, and with the step's true query."""
NAMES = {
    "full": "all in memory", OURS: "DynaKV", "dynakv:layout=tokens": "its clusters, token order",
    "dynakv:update=static": "same layout, static update", "pqcache": "PQCache",
    "clusterkv": "ClusterKV", NO_CLUSTERS: "no clusters",
}  # fmt: skip
PAPER_SPEEDUPS = {NO_CLUSTERS: 2.0, "pqcache": 1.47, "clusterkv": 1.31}
"""DynaKV, figure 10b: times faster, on average."""
PAPER_BANDWIDTHS = {NO_CLUSTERS: 2.10, "pqcache": 1.83, "clusterkv": 1.56}
"""DynaKV, figure 10c: times their effective bandwidth, on average."""
PAPER_LENGTHS = (1024, 2048, 4096, 8192, 16384)
PAPER_STEPS = {
    "Qwen-S": (84.6, 96.5, 123.5, 209.2, 376.3), "Qwen-M": (152.5, 167.5, 215.1, 326.3, 636.8),
    "Llama-S": (76.7, 97.6, 189.4, 346.7, 677.3),
    "Llama-M": (189.3, 289.6, 499.6, 1044.0, 1802.3),
}  # fmt: skip
"""DynaKV, table 6: milliseconds."""
PAPER_MEMORY, PAPER_POLICY = 2.22, 1.12
"""DynaKV, figure 14: times less memory with the virtual cache, times faster than LRU; at most."""
POLICY = "dynakv:prefers_small=true,updated_share=0.25"
LRU = "dynakv:prefers_small=false,updated_share=0"
VIRTUAL = "dynakv:virtual=true"
FLASH = "dynakv:representatives=flash"
BOTH = "dynakv:virtual=true,representatives=flash"
LAYER_WISE = {FLASH: "representatives from flash", VIRTUAL: "virtual slots", BOTH: "both"}
"""What is held for two layers and not for all (section 6.1), by the methods that do so."""
NOTE = """A step's mean; reads, MiB: all that went to the files; read ms: with a read under way;
eff. MB/s: bytes of selected tokens that were missing, in that time; stall: attention waiting for
reads (on a simulated device a step's own writes queue behind them, and are what is waited for);
right: forced tokens that the model would have said."""
Row = dict[str, Any]


def measured(rows: Sequence[Row], section: str = MAIN) -> list[Row]:
    """Rows of a section that have figures."""
    return [row for row in rows if row["section"] == section and "mean_ms" in row]


def name_of(method: str) -> str:
    """A method as it is spoken of."""
    return NAMES.get(method, method)


def device_name(device: str) -> str:
    """A device as it is spoken of."""
    return "real disk" if device == DISK else f"{device.upper()}, simulated"


def mean_ratio(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def exponent(lengths: Sequence[float], times: Sequence[float]) -> float:
    """By which power times grow with lengths: a straight line through the logarithms."""
    x, y = [math.log(v) for v in lengths], [math.log(v) for v in times]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    up = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return up / sum((a - mx) ** 2 for a in x)


# Summary ------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Speed-ups, growth and the cache's gains, for JSON."""
    return {"speedups": speedups(rows), "growth": growth(rows), "cache": cache_gains(rows)}


def speedups(rows: Sequence[Row]) -> list[Row]:
    """How many times faster DynaKV is than each other method, by device and ratio.

    The geometric mean over lengths, of all measured steps' time; `low` and `high` are the least and
    the most of a length. `bandwidth` is the same for effective bandwidth.
    """
    found = {(r["device"], r["ratio"], r["length"], r["method"]): r for r in measured(rows)}
    pairs: dict[tuple[str, float, str], list[tuple[Row, Row]]] = {}
    for (device, ratio, length, method), row in sorted(found.items()):
        ours = found.get((device, ratio, length, OURS))
        if ours is not None and method != OURS:
            pairs.setdefault((device, ratio, method), []).append((ours, row))
    out = []
    for (device, ratio, method), both in pairs.items():
        times = [row["mean_ms"] / ours["mean_ms"] for ours, row in both]
        medians = [row["median_ms"] / ours["median_ms"] for ours, row in both]
        bands = [
            ours["effective_bandwidth"] / row["effective_bandwidth"] for ours, row in both
            if ours["effective_bandwidth"] and row["effective_bandwidth"]
        ]  # fmt: skip
        out.append({
            "device": device, "ratio": ratio, "method": method, "mean": mean_ratio(times),
            "median": mean_ratio(medians), "low": min(times), "high": max(times),
            "bandwidth": mean_ratio(bands) if bands else None,
            "lengths": [ours["length"] for ours, _ in both], "paper": PAPER_SPEEDUPS.get(method),
        })  # fmt: skip
    return out


def growth(rows: Sequence[Row]) -> list[Row]:
    """How step time grows with the length: the power over all lengths, and from one to the next;
    on each machine by itself."""
    out = []

    def line(row: Row) -> tuple[Any, ...]:
        return row["device"], row["ratio"], row["method"], row.get("machine", "")

    order = sorted(measured(rows), key=lambda r: (*line(r), r["length"]))
    for (device, ratio, method, machine), some in groupby(order, key=line):
        found = list(some)
        lengths, times = [r["length"] for r in found], [r["mean_ms"] for r in found]
        if len(found) < 2:
            continue
        steps = [exponent(lengths[i : i + 2], times[i : i + 2]) for i in range(len(found) - 1)]
        out.append({
            "device": device, "ratio": ratio, "method": method, "lengths": lengths, "ms": times,
            "exponent": exponent(lengths, times), "exponents": steps,
            **({"machine": machine} if machine else {}),
        })  # fmt: skip
    return out


def cache_gains(rows: Sequence[Row]) -> list[Row]:
    """By device and slots: time with LRU and ours; memory and time without what is layer-wise and
    with it, in `layer_wise` by method.

    Of `layer_wise`: `memory`, all that is held; `cache`, slots, window and index; times less each,
    and times slower.
    """
    found = {(r["device"], r["reuse"], r["method"]): r for r in measured(rows, CACHE)}
    out = []
    for device, reuse in sorted({(device, reuse) for device, reuse, _ in found}):
        ours, lru = (found.get((device, reuse, method)) for method in (POLICY, LRU))
        others = {m: row for m in LAYER_WISE if (row := found.get((device, reuse, m))) is not None}
        gain: Row = {"device": device, "reuse": reuse}
        if ours is not None and lru is not None:
            gain |= {"faster": lru["mean_ms"] / ours["mean_ms"], "hit_rate": ours["hit_rate"],
                     "lru_hit_rate": lru["hit_rate"]}  # fmt: skip
        if ours is not None and others:
            gain["layer_wise"] = {method: _less(ours, row) for method, row in others.items()}
        if len(gain) > 2:
            out.append(gain)
    return out


def _less(ours: Row, row: Row) -> Row:
    """How much less memory a row takes than ours; what layers share counts as part of the cache."""
    return {
        "memory": ours["ledger_bytes"] / row["ledger_bytes"],
        "cache": cache_bytes(ours, ours) / cache_bytes(row, ours),
        "slower": row["mean_ms"] / ours["mean_ms"],
    }  # fmt: skip


def cache_bytes(row: Row, ours: Row) -> float:
    """Slots, window and index of a row, and the memory that layers share in their place, which the
    ledger books as scratch: what ours has without that, less what the row saves."""
    held = ours["ledger_items"]["slots and window"] + ours["ledger_items"]["index"]
    return float(held - ours["ledger_bytes"] + row["ledger_bytes"])


# Tables -------------------------------------------------------------------------------------------


def end_to_end_table(figures: dict[str, Any]) -> str:
    """All tables that the figures are enough for."""
    rows = figures["rows"]
    parts = [_rows(rows, MAIN), _speedups(figures["speedups"]), _growth(figures["growth"])]
    parts += [_rows(rows, CACHE), _cache(figures["cache"])]
    return "\n\n".join(part for part in parts if part)


def _rows(rows: Sequence[Row], section: str) -> str:
    header = ["device, tokens, share, method", "ms/step", "median", "p90", "tok/s", "reads",
              "MiB", "KiB/read", "read ms", "eff. MB/s", "stall", "select ms", "hits",
              "held MiB", "right"]  # fmt: skip
    lines: list[list[str]] = []
    for row in rows:
        if row["section"] != section:
            continue
        slots = f", {row['reuse']:g}x" if section == CACHE else ""
        name = f"{row['device']} {row['length']:6,} {row['ratio']:4.0%}  {name_of(row['method'])}"
        name += _elsewhere(row)
        if "error" in row:
            lines.append([name + slots, row["error"]])
            continue
        lines.append([
            name + slots, f"{row['mean_ms']:.2f}", f"{row['median_ms']:.2f}",
            f"{row['p90_ms']:.2f}", f"{row['tokens_per_s']:.1f}", f"{row['reads']:.0f}",
            f"{row['read_bytes'] / 2**20:.2f}", _number(row["read_kib"], 1),
            f"{row['read_ms']:.2f}", f"{row['effective_bandwidth'] / 1e6:.0f}",
            f"{row['stall_share']:.0%}", f"{row['select_ms']:.2f}",
            "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}",
            f"{row['ledger_bytes'] / 2**20:.1f}", f"{row['right']:.0%}",
        ])  # fmt: skip
    return f"{format_table(header, lines)}\n{NOTE}" if lines else ""


def _speedups(found: Sequence[Row]) -> str:
    header = ["DynaKV is so many times faster (fig. 10b)", "mean", "low", "high", "paper",
              "eff. bandwidth", "paper"]  # fmt: skip
    lines = [
        [f"{device_name(one['device'])}, {one['ratio']:.0%}: than {name_of(one['method'])}",
         f"{one['mean']:.2f}", f"{one['low']:.2f}", f"{one['high']:.2f}",
         _number(one["paper"], 2), _number(one["bandwidth"], 2),
         _number(PAPER_BANDWIDTHS.get(one["method"]), 2)]
        for one in found
    ]  # fmt: skip
    return format_table(header, lines) if lines else ""


def _growth(found: Sequence[Row]) -> str:
    lengths = sorted({length for one in found for length in one["lengths"]})
    header = ["ms a step (table 6)", *(f"{length:,}" for length in lengths), "power of length",
              "last doubling"]  # fmt: skip
    lines = []
    for one in found:
        times = dict(zip(one["lengths"], one["ms"], strict=True))
        name = f"{device_name(one['device'])}, {one['ratio']:.0%}: {name_of(one['method'])}"
        lines.append([
            name + _elsewhere(one),
            *(_number(times.get(length), 1) for length in lengths), f"{one['exponent']:.2f}",
            f"{one['exponents'][-1]:.2f}",
        ])  # fmt: skip
    for name, steps in PAPER_STEPS.items():
        times = dict(zip(PAPER_LENGTHS, steps, strict=True))
        lines.append([
            f"paper, {name}", *(_number(times.get(length), 1) for length in lengths),
            f"{exponent(PAPER_LENGTHS, steps):.2f}", f"{exponent((1, 2), steps[-2:]):.2f}",
        ])  # fmt: skip
    return format_table(header, lines) if found else ""


def _cache(found: Sequence[Row]) -> str:
    header = ["cache (fig. 14)", "faster than LRU", "hits", "LRU's", "all memory", "cache",
              "time"]  # fmt: skip
    lines = []
    for one in found:
        name = f"{device_name(one['device'])}, {one['reuse']:g} selections"
        lines.append([
            name, _number(one.get("faster"), 3), _share(one.get("hit_rate")),
            _share(one.get("lru_hit_rate")), "1", "1", "1",
        ])  # fmt: skip
        for method, less in one.get("layer_wise", {}).items():
            lines.append([
                f"{name}: {LAYER_WISE[method]}", "-", "-", "-", f"1/{less['memory']:.2f}",
                f"1/{less['cache']:.2f}", f"{less['slower']:.2f}x",
            ])  # fmt: skip
    lines.append(["paper, at most", f"{PAPER_POLICY}", "-", "-", "-", f"1/{PAPER_MEMORY}", "-"])
    return format_table(header, lines) if found else ""


def _elsewhere(row: Row) -> str:
    """The machine, where it is not the result's own."""
    return f" ({row['machine']})" if "machine" in row else ""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# Results of `clusters.end_to_end` that several processes or machines made, in one -----------------

KIND = "clusters.end_to_end"
SHARED = (
    "model", "text", "digest", "warm", "rounds", "steps", "threads", "chunk", "cache_ratio", "seed",
)  # fmt: skip
"""Settings that results which become one must have in common."""
GROWING = ("lengths", "ratios", "devices", "methods")
"""Settings that may differ: a result then has what either run was asked for."""


def merged(out: str | Path, pieces: Sequence[str]) -> Result:
    """The result in `out` (where there is one) with the groups of others that it lacks.

    Rows of one group stay together, since they are compared. What another machine measured says so
    (`machine` of a row), and step times are not followed from one machine to another.

    Args:
        out: not written here.
        pieces: files; of a group that several have, the first counts.

    Raises:
        ConfigError: a file is not such a result, or was made with other settings.
    """
    paths = [path for path in (str(out), *pieces) if path != str(out) or Path(path).exists()]
    results = [Result.load(path) for path in paths]
    for path, one in zip(paths, results, strict=True):
        if one.kind != KIND:
            raise ConfigError(f"{Path(path).name} is a result of {one.kind}, not of {KIND}")
    base, *others = results
    base.settings.setdefault("digest", None)  # older results have none
    rows: list[dict[str, Any]] = list(base.figures["rows"])
    minutes = base.figures["minutes"]
    for other in others:
        check_same(other.settings, base.settings, SHARED, "merge")
        grow(base.settings, other.settings, GROWING)
        held = {_group(row) for row in rows}
        place = {} if _place(other) == _place(base) else {"machine": _place(other)}
        rows += [row | place for row in other.figures["rows"] if _group(row) not in held]
        minutes += other.figures["minutes"]
        base.figures["disk"] = base.figures["disk"] or other.figures["disk"]
    rows.sort(key=lambda row: (row["section"], row["length"]))
    base.figures |= {"rows": rows, **summary(rows), "minutes": minutes}
    return base


def _group(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows that were measured in turn have in common."""
    return key_of(row)[:-2]


def _place(result: Result) -> str:
    """The machine of a result, in words."""
    return f"{result.machine['cpu']}, {result.machine['cores']} cores"
