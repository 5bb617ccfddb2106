"""DecodeBench: what the rows of `device_tier.speed` share, and the state of the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.models.loader import CausalLM
from penstock.workloads.synthetic_kv import SyntheticKV
from research.device_tier.query_stream import QueryStream


@dataclass(kw_only=True)
class DecodeBench:
    """What the rows of a run share."""

    model: CausalLM
    adapter: LowRankAdapter
    shape: KVShape
    device: torch.device
    steps: int
    places: int
    """Stretches of so many steps, from the answer's beginning to its end."""
    segment: int
    sameness: float
    most_s: float
    breakdown_steps: int
    host_bytes: int
    """Most pinned memory of a row."""
    seed: int
    stays: Sequence[float] | None = None
    """Share of a selection that is in the next one: of methods that retrieve at turns, and of those
    that do at every step. None: what the queries make of it."""
    _noise: dict[int, SyntheticKV] = field(default_factory=dict)
    _streams: dict[int, QueryStream] = field(default_factory=dict)

    def noise(self, batch: int) -> SyntheticKV:
        """Keys and values of documents; drawn once for a batch."""
        if batch not in self._noise:
            self._noise.clear()
            self._noise[batch] = SyntheticKV(self.shape, batch, self.device, self.seed)
        return self._noise[batch]

    def stream(self, batch: int) -> QueryStream:
        """Queries that select; drawn once for a batch."""
        if batch not in self._streams:
            self._streams.clear()
            self._streams[batch] = QueryStream(
                sequences=batch, heads=self.shape.num_query_heads, head_dim=self.shape.head_dim,
                layers=self.shape.num_layers, segment=self.segment, sameness=self.sameness,
                dtype=self.shape.dtype, device=self.device, seed=self.seed,
            )  # fmt: skip
        return self._streams[batch]


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Have libraries take now what they keep for good: cuBLAS's 32 MiB for the steps, and as many
    with the first CUDA graph of a process. They are no cache's, and come once."""
    if device.type != "cuda":
        return
    small = torch.ones(16, 16, dtype=dtype, device=device)
    small @ small
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        small @ small
