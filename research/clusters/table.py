"""What `clusters` prints: our figures with the paper's beside them."""

from collections.abc import Sequence
from typing import Any

from penstock.evaluate.text_table import format_table
from research.clusters.methods import DELAYS

PAPER_VARIANCE = {
    "static": (206.7, 198.2, 211.3, 214.2, 146.1, 154.4, 218.1, 201.6),
    "local": (122.4, 125.5, 124.3, 127.7, 95.1, 94.7, 129.0, 132.1),
    "adaptive": (119.6, 122.5, 118.3, 125.2, 94.6, 90.8, 123.3, 123.8),
}
"""DynaKV, table 5."""
PAPER_AGAIN = {"low": (0.301, 0.363, 0.428, 0.496, 0.549), "high": (0.594, 0.655, 0.709, 0.763,
                                                                    0.801)}  # fmt: skip
"""DynaKV, table 2: the least and the most of its four models."""
PAPER_ACCESS = {"sequence": 7.9, "intra": 25.3, "inter": 40.8}
"""DynaKV, figure 12: entries of an access, on average."""
PAPER_LONGEST = 68
PAPER_BUFFERS = 2.32
"""DynaKV, figure 11: less volume, at most."""
PAPER_MOVES = 1e4
"""DynaKV, figure 13: less movement, at least."""
NAMES = {
    "static": "static (PQCache)", "local": "local (ClusterKV)", "adaptive": "adaptive (DynaKV)",
    "global": "all keys at once",
}  # fmt: skip
LAYOUT_NAMES = {
    "sequence": "sequence order", "packed": "cluster by cluster", "intra": "pools, any order",
    "inter": "pools, co-retrieval", "gaps": "same, gaps to 24 KB read",
}  # fmt: skip


def paper_ratio(update: str) -> float | None:
    """Variance of a method in that of DynaKV, the mean of the paper's cases."""
    if update not in PAPER_VARIANCE:
        return None
    pairs = zip(PAPER_VARIANCE[update], PAPER_VARIANCE["adaptive"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    return sum(ratios) / len(ratios)


def access_lengths(layouts: dict[str, Any], name: str, kind: str) -> dict[int, int]:
    """Accesses by their entries, the layers of a result added.

    Args:
        kind: `access_lengths` or `early_lengths`.
    """
    out: dict[int, int] = {}
    for layer in layouts["by_layer"]:
        for entries, times in layer[name][kind].items():
            out[int(entries)] = out.get(int(entries), 0) + times
    return dict(sorted(out.items()))


def mean_length(lengths: dict[int, int]) -> float:
    """Entries of an access, on average."""
    return sum(n * times for n, times in lengths.items()) / max(1, sum(lengths.values()))


def layout_sum(layouts: dict[str, Any], name: str, field: str) -> int:
    """A layout's bytes, the layers of a result added."""
    return sum(layer[name][field] for layer in layouts["by_layer"])


def clusters_table(figures: dict[str, Any]) -> str:
    """All tables that the figures are enough for."""
    text = (
        f"{figures['model']}: {figures['prompt_tokens']:,} tokens of prompt, "
        f"{figures['output_tokens']:,} of output ({figures['output']}; the model itself would say "
        f"{figures['expected']:.0%} of them), {len(figures['layers'])} layers of "
        f"{figures['kv_heads']} KV heads"
    )
    parts = [text]
    for name, table in (("drift", _drift), ("methods", _methods), ("buffers", _buffers),
                        ("layouts", _layouts)):  # fmt: skip
        if name in figures:
            parts.append(table(figures[name]))
    return "\n\n".join(parts)


def _drift(drift: dict[str, Any]) -> str:
    rows = []
    for name, field, calm in (
        ("farther from its nearest cluster than all of it", "outside", drift["outside_prompt"]),
        ("squared distance from it, held-out prompt: 1", "distance", None),
        ("shift of the mean key, prompt's spread: 1", "shift", None),
    ):
        rows_of = drift[field]
        first, last = _mean([row[0] for row in rows_of]), _mean([row[-1] for row in rows_of])
        least, most = min(row[-1] for row in rows_of), max(row[-1] for row in rows_of)
        prompt = "-" if calm is None else f"{_mean(calm):.2f}"
        rows.append([name, prompt, f"{first:.2f}", f"{last:.2f}", f"{least:.2f}..{most:.2f}"])
    header = ["output keys (paper: they drift away, figs. 1, 4)", "prompt", "first part",
              "last part", "layers"]  # fmt: skip
    return format_table(header, rows)


def _methods(methods: Sequence[dict[str, Any]]) -> str:
    unit = next(row["by_key"] for row in methods if row["update"] == "adaptive")
    header = ["clusters (table 5)", "variance", "of adaptive", "paper", "clusters", "largest",
              "read", "mass", "top found"]  # fmt: skip
    rows = []
    for row in methods:
        paper = paper_ratio(row["update"])
        looks = [f"{row[name]:.1%}" if name in row else "-" for name in ("read", "mass", "recall")]
        rows.append([
            NAMES[row["update"]], f"{row['by_key']:.1f}", f"{row['by_key'] / unit:.2f}",
            "-" if paper is None else f"{paper:.2f}", f"{row['clusters']:.0f}",
            str(row["largest"]), *looks,
        ])  # fmt: skip
    adaptive = next(row for row in methods if row["update"] == "adaptive")
    rows.append(["no clusters, best tokens", *["-"] * 5, "10%", f"{adaptive['best']:.1%}", "100%"])
    again = format_table(
        ["updated clusters retrieved within (table 2)", *(f"{t} steps" for t in DELAYS)],
        [["adaptive", *(f"{x:.1%}" for x in adaptive["again"])],
         ["paper, four models", *(f"{a:.0%}..{b:.0%}" for a, b in
                                  zip(PAPER_AGAIN["low"], PAPER_AGAIN["high"], strict=True))]],
    )  # fmt: skip
    return f"{format_table(header, rows)}\n\n{again}"


def _buffers(buffers: dict[str, Any]) -> str:
    header = ["entries that may wait (fig. 11)", "splits", "loads for them", "entries loaded",
              "less", "of retrieved", "of fetched anew"]  # fmt: skip
    rows = []
    first = buffers["rows"][0]["split_loads_entries"]
    for row in buffers["rows"]:
        loaded = row["split_loads_entries"]
        less = f"{first / loaded:.2f}x" if loaded else "all"
        rows.append([
            str(row["buffer"]), f"{row['splits']:,}", f"{row['loads']:,}", f"{loaded:,}", less,
            f"{loaded / row['retrieved_entries']:.3%}", f"{loaded / row['fetched_entries']:.3%}",
        ])  # fmt: skip
    rows.append([f"paper: transfer volume up to {PAPER_BUFFERS}x less, buffers up to 16", ""])
    return format_table(header, rows)


def _layouts(layouts: dict[str, Any]) -> str:
    header = ["layout (figs. 12, 13)", "entries an access", "paper", "first eighth", "longest",
              "needless", "moved bytes", "of packed", "file"]  # fmt: skip
    rows = []
    packed = layout_sum(layouts, "packed", "moved_bytes")
    for name, text in LAYOUT_NAMES.items():
        lengths = access_lengths(layouts, name, "access_lengths")
        moved, end = (layout_sum(layouts, name, field) for field in ("moved_bytes", "end_bytes"))
        gaps, read = (layout_sum(layouts, name, field) for field in ("gap_bytes", "read_bytes"))
        paper, needless = PAPER_ACCESS.get(name), gaps / max(1, read)
        rows.append([
            text, f"{mean_length(lengths):.1f}", "-" if paper is None else f"{paper}",
            f"{mean_length(access_lengths(layouts, name, 'early_lengths')):.1f}",
            str(max(lengths, default=0)),
            f"{needless:.0%}",
            f"{moved:,}",
            f"1/{packed / moved:,.0f}" if moved else "0",
            f"{end / layout_sum(layouts, name, 'used_bytes'):.1f}x",
        ])  # fmt: skip
    note = f"paper: longest access {PAPER_LONGEST}; movement over {PAPER_MOVES:,.0f}x less"
    return f"{format_table(header, rows)}\n{note}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
