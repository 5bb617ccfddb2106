"""What a row moved and kept: counters of its cache, and GPU memory beside the ledger."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.methods.louiskv.device_index import DeviceSemanticUnits
from penstock.models.cache_adapter import TieredCache
from research.device_tier.streamed_index import StreamedIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sums over layers and sequences since the cache was made."""

    wanted: int = 0
    hit: int = 0
    fetched_bytes: int = 0
    layer_steps: int = 0
    """Steps of layers that look for boundaries, each sequence counted."""
    boundaries: int = 0
    retrievals: int = 0
    selecting_layers: int = 0
    """Layers that select (not a sum: what the newer of two counts says)."""

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came since; `selecting_layers` stays."""
        changed = {
            one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)
        }
        return Counts(**{**changed, "selecting_layers": self.selecting_layers})

    def figures(self, steps: int, batch: int) -> dict[str, Any]:
        """For result files, per step of the whole batch.

        "retrieval_share": of a layer's steps; methods without boundaries retrieve at each.
        """
        if not self.selecting_layers:
            return {}
        bounded = self.layer_steps > 0
        return {
            "units_wanted": self.wanted / steps, "fetched_bytes": self.fetched_bytes / steps,
            "hit_rate": self.hit / self.wanted if self.wanted else None,
            "retrieval_share": self.retrievals / self.layer_steps if bounded else 1.0,
            "mean_segment": self.layer_steps / self.boundaries if self.boundaries else None,
        }  # fmt: skip


def count(cache: TieredCache) -> Counts:
    """Read a cache's counters; waits for the device."""
    phase = cache.stats.decode
    selecting, sums = 0, [0, 0, 0]
    for layer in cache.tiers.layers:
        if not isinstance(layer, DeviceLayer) or layer.index is None:
            continue
        selecting += 1
        index = layer.index.inner if isinstance(layer.index, StreamedIndex) else layer.index
        if isinstance(index, DeviceSemanticUnits):
            found = index.counters.sum(dim=0).tolist()
            sums = [a + int(b) for a, b in zip(sums, found, strict=True)]
    return Counts(
        wanted=phase.units_wanted, hit=phase.units_hit, fetched_bytes=phase.read_bytes,
        layer_steps=sums[0], boundaries=sums[1], retrievals=sums[2], selecting_layers=selecting,
    )  # fmt: skip


class GpuMemory:
    """What PyTorch has allocated beyond what was there before the cache; zeros on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base = self._allocated()
        self._held = self._graph = self._fill_peak = self._step_peak = 0
        self._reset_peak()

    def free_bytes(self) -> int:
        """Bytes that can be had, those that PyTorch keeps for later among them."""
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def leave_out(self, num_bytes: int) -> None:
        """So many of what was allocated since are not the cache's."""
        if self._cuda:
            self._base += num_bytes

    def filled(self) -> None:
        """Tokens were put in."""
        self._fill_peak = max(self._fill_peak, self._peak())

    def warm(self) -> None:
        """Workspaces are there, a CUDA graph is not."""
        self._held = self._allocated() - self._base

    def recorded(self) -> None:
        """A CUDA graph is there, if there is to be one."""
        self._graph = self._allocated() - self._base - self._held
        self._reset_peak()

    def measured(self) -> None:
        """Counted steps have run."""
        self._step_peak = max(self._step_peak, self._peak())
        self._reset_peak()

    def figures(self, ledger: dict[str, int] | None) -> dict[str, Any]:
        """For result files, in bytes. "held": between steps, before a graph; "ratio": of that to
        the ledger, whose scratch stands for what is there for a moment only."""
        total = sum(ledger.values()) if ledger is not None else None
        known = self._cuda and total
        return {
            "held": self._held, "graph": self._graph, "fill_peak": self._fill_peak,
            "step_peak": self._step_peak, "ledger": total, "ledger_items": ledger,
            "ratio": self._held / total if known and total else None,
            "peak_ratio": self._step_peak / total if known and total else None,
            "fill_ratio": self._fill_peak / total if known and total else None,
        }  # fmt: skip

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base if self._cuda else 0

    def _reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
