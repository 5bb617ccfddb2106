"""Run: the parts of one run of `clusters`, and how far they are."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from penstock.evaluate.progress import Progress
from penstock.methods.dynakv.adaptive_clusters import UpdateRule
from research.clusters.drift import drift_figures
from research.clusters.key_stream import KeyStream
from research.clusters.layouts import LayoutCost, run_layouts
from research.clusters.methods import global_method, run_method
from research.clusters.picture import chosen_heads, picture
from research.clusters.replay import Settings

PARTS = ("drift", "methods", "buffers", "layouts")
METHODS: tuple[UpdateRule, ...] = ("static", "local", "adaptive")
BUFFER = 16
"""Entries that wait at most where nothing else is said (the paper's)."""
_SAY_EVERY_S = 2.0
_EIGHTHS = 8


class Counter:
    """Says how far the work is, every two seconds at most."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(total)
        self._said = 0.0

    def add(self, what: str, count: int) -> None:
        """Work was done."""
        self._progress.step(count)
        if time.perf_counter() - self._said > _SAY_EVERY_S:
            self._said = time.perf_counter()
            self._progress.say(what)

    def up_to(self, what: str) -> Callable[[int], None]:
        """A function that is told how much is done in all."""
        before = [0]

        def count(now: int) -> None:
            self.add(what, now - before[0])
            before[0] = now

        return count


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
        self._counter = Counter(0)
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
        self._counter = Counter(sum(work[part] for part in wanted))
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
