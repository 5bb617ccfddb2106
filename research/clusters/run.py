"""`python -m research.clusters`: DynaKV's premise and parts, measured on recorded keys."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.methods.dynakv.adaptive_clusters import UpdateRule
from penstock.models.loader import load
from research.clusters.layouts import LayoutCost, chosen_heads, picture, run_layouts
from research.clusters.recording import (
    RING_WALK,
    KeyStream,
    add_recording_options,
    begin_recording,
    facts_of,
    record,
)
from research.clusters.replay import DELAYS, Settings, drift_figures, global_method, run_method

# Our figures with the paper's beside them ---------------------------------------------------------

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


# The parts of one run of `clusters`, and how far they are -----------------------------------------

PARTS = ("drift", "methods", "buffers", "layouts")
METHODS: tuple[UpdateRule, ...] = ("static", "local", "adaptive")
BUFFER = 16
"""Entries that wait at most where nothing else is said (the paper's)."""
_EIGHTHS = 8


class Run:
    """Measures a stream and adds to one dictionary of figures."""

    def __init__(
        self, stream: KeyStream, settings: Settings, figures: dict[str, Any], *,
        buffers: Sequence[int], buffer_layers: int, layout_layers: int,
    ) -> None:  # fmt: skip
        """Nothing is measured yet.

        Args:
            figures: what is measured goes there; `entry_bytes` is read from it.
            buffers: entries that may wait for splits.
            buffer_layers: layers in which those are compared.
            layout_layers: layers that are laid out in files.
        """
        self._stream, self._settings, self._figures = stream, settings, figures
        self._buffer_sizes = buffers
        total = len(stream.keys)
        self._buffer_layers = spaced(total, buffer_layers)
        self._layout_layers = spaced(total, layout_layers)
        self._counter = Progress(0)
        self._partitions: dict[str, list[Tensor]] = {}

    def measure(self, wanted: Sequence[str], save: Callable[[], None]) -> None:
        """Measure the parts that are wanted.

        Args:
            save: called after each part.
        """
        work = {
            "drift": 0, "methods": 2 * len(METHODS) * len(self._stream.keys),
            "buffers": len(self._buffer_sizes) * len(self._buffer_layers),
            "layouts": 2 * _EIGHTHS * len(self._layout_layers),
        }  # fmt: skip
        self._counter = Progress(sum(work[part] for part in wanted))
        late = self._drift() if "drift" in wanted else None
        if "methods" in wanted:
            self._methods()
            if late is not None:
                self._pictures(late)
        save()
        for part, run in (("buffers", self._buffers), ("layouts", self._layouts)):
            if part in wanted:
                run()
                save()

    def _drift(self) -> Tensor:
        figures, late = drift_figures(
            self._stream, cluster_tokens=self._settings.cluster_tokens, seed=self._settings.seed
        )
        self._figures["drift"] = figures
        return late

    def _methods(self) -> None:
        rows = []
        for update in METHODS:
            row, self._partitions[update] = run_method(
                self._stream, self._settings, update, BUFFER, on_layer=self._layer_done(update, 2)
            )
            rows.append(row)
        counts = [round(count) for count in rows[-1]["clusters_of_layer"]]
        rows.append(global_method(self._stream, self._settings, counts))
        self._figures["methods"] = rows

    def _pictures(self, late: Tensor) -> None:
        """Of two heads; without the methods there is no cluster to show."""
        if "adaptive" not in self._partitions:
            return
        before, after = self._partitions["static"], self._partitions["adaptive"]
        self._figures["pictures"] = [
            picture(
                self._stream.keys[layer][head], self._stream.prompt_tokens,
                before=before[layer][head], after=after[layer][head],
                name=f"{which}: layer {self._stream.layers[layer]}, KV head {head}",
            )
            for which, (layer, head) in zip(
                ("median drift", "most drift"), chosen_heads(late), strict=False
            )
        ]  # fmt: skip

    def _buffers(self) -> None:
        layers = self._buffer_layers
        part = self._stream.only(layers)
        rows = []
        for buffer in self._buffer_sizes:
            row, _ = run_method(
                part, self._settings, "adaptive", buffer, looks=False,
                on_layer=self._layer_done(f"buffer of {buffer}", 1),
            )  # fmt: skip
            rows.append(row)
        self._figures["buffers"] = {
            "layers": [self._stream.layers[layer] for layer in layers], "rows": rows,
        }  # fmt: skip

    def _layouts(self) -> None:
        found = []
        for layer in self._layout_layers:
            name = f"layouts, layer {self._stream.layers[layer]}"
            count = self._counter.up_to(name)
            costs = run_layouts(
                self._stream, layer, self._settings, entry_bytes=self._figures["entry_bytes"],
                on_step=self._scaled(count, 2 * _EIGHTHS),
            )  # fmt: skip
            found.append({name: _plain(cost) for name, cost in costs.items()})
        self._figures["layouts"] = {
            "layers": [self._stream.layers[layer] for layer in self._layout_layers],
            "by_layer": found,
        }

    def _scaled(self, count: Callable[[int], None], whole: int) -> Callable[[int], None]:
        """Tells `count` the steps done as parts of `whole`."""
        steps = self._stream.output_tokens

        def scaled(done: int) -> None:
            count(whole * done // steps)

        return scaled

    def _layer_done(self, what: str, weight: int) -> Callable[[int], None]:
        def done(_: int) -> None:
            self._counter.add(what, weight)

        return done


def _plain(cost: LayoutCost) -> dict[str, Any]:
    """As JSON has it: keys are texts."""
    found = asdict(cost)
    for name in ("access_lengths", "early_lengths"):
        found[name] = {str(entries): times for entries, times in found[name].items()}
    return found


def spaced(total: int, count: int) -> list[int]:
    """So many of `total` places, evenly spaced, the last one among them."""
    ends = torch.linspace(0, total, min(total, count) + 1)[1:]
    return [int(end) - 1 for end in ends.round()]


# DynaKV's premise and parts, measured on recorded keys --------------------------------------------

KIND = "clusters"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.clusters", description=__doc__)
    add = parser.add_argument
    add_recording_options(parser, task=RING_WALK, prompt=1024, output=2048)
    add("--parts", default=",".join(PARTS), help="of " + ",".join(PARTS))
    add("--cluster-tokens", type=int, default=16, help="mean size of an initial cluster")
    add("--top", type=float, default=0.1, help="share of the past that is retrieved")
    add("--buffers", default="0,1,2,4,8,16,32", help="entries that may wait for splits")
    add("--buffer-layers", type=int, default=4, help="layers that --buffers is measured in")
    add("--layout-layers", type=int, default=2, help="layers that are laid out in files")
    args = read_options(
        parser, arguments, resume=False, minutes=False,
        renamed_with_out={"--output": "--max-new-tokens"},
    )  # fmt: skip
    least = min(args.prompt, args.output, args.cluster_tokens, args.buffer_layers,
                args.layout_layers, args.chunk)  # fmt: skip
    if least < 1 or not 0 < args.top <= 1 or args.prompt < 2 * args.cluster_tokens:
        raise ConfigError(
            "sizes must be at least 1, --top above 0 and at most 1, and --prompt at least two "
            "clusters of --cluster-tokens"
        )
    if unknown := set(args.parts.split(",")) - set(PARTS):
        raise ConfigError(f"no part is called {min(unknown)!r}; there are {', '.join(PARTS)}")
    return args


def buffer_sizes(text: str) -> list[int]:
    """The numbers of --buffers.

    Raises:
        ConfigError: one is not a number, or negative.
    """
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--buffers takes numbers like 0,4,16, not {text!r}") from error
    if found[0] < 0:
        raise ConfigError(f"--buffers must not be negative: {text}")
    return found


def run(arguments: Sequence[str]) -> Result:
    """Measure, print the tables, save the result."""
    args = parse_arguments(arguments)
    buffers = buffer_sizes(args.buffers)
    torch.manual_seed(args.seed)
    result = begin_recording(KIND, arguments, args)
    shared = Settings(cluster_tokens=args.cluster_tokens, top=args.top, seed=args.seed)
    loaded = load(args.model)
    stream = record(loaded, args, prompt_tokens=args.prompt, output_tokens=args.output)
    entry_bytes = 2 * stream.keys[0].shape[2] * loaded.model.dtype.itemsize
    result.figures |= {**facts_of(stream, args), "entry_bytes": entry_bytes}
    runs = Run(
        stream, shared, result.figures, buffers=buffers, buffer_layers=args.buffer_layers,
        layout_layers=args.layout_layers,
    )  # fmt: skip

    def save() -> None:
        if args.out:
            result.save(args.out)

    runs.measure(args.parts.split(","), save)
    return closed(result, args, clusters_table(result.figures))
