"""The simulated SmartSSD PC: its constants, where KV lies, how much of a selection is hot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result

# HillInfer's PC as numbers, each with its source; nothing here was measured by us -----------------

PAPER, SHEET, ASSUMED = "paper", "data sheet", "assumed"
GIB = 1 << 30


def _constant(value: float, unit: str, origin: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "origin": origin, "source": source})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of a simulated PC with one SmartSSD (HillInfer section 5.2), and of the methods on it."""

    vram_bytes: float = _constant(24 * GIB, "B", PAPER, "5.2: RTX 4090, 24 GB")
    vram_reserve_bytes: float = _constant(
        1 * GIB, "B", ASSUMED, "CUDA context and activations; staging of selected KV comes on top"
    )
    gpu_flops: float = _constant(
        165.2e12, "FLOP/s", SHEET, "RTX 4090: FP16 tensor cores, FP32 accumulation, dense"
    )
    gpu_bandwidth: float = _constant(1008e9, "B/s", SHEET, "RTX 4090: GDDR6X, 384 bits, 21 Gb/s")
    layer_overhead_s: float = _constant(
        0.3e-3, "s", ASSUMED, "launches of a layer from Python, all methods alike"
    )
    host_bytes: float = _constant(64 * GIB, "B", PAPER, "5.2: 64 GB of host memory")
    host_reserve_bytes: float = _constant(
        8 * GIB, "B", ASSUMED, "system, framework and pinned buffers; the rest is for KV"
    )
    host_scoring: float = _constant(
        112e9, "B/s", ASSUMED,
        "FP16 keys that the Xeon 8352V streams and scores: 60 % of 8 channels of DDR4-2933 "
        "(187.7 GB/s); the paper's figure 5a has it without a number in the text",
    )  # fmt: skip
    host_link: float = _constant(
        25e9, "B/s", ASSUMED, "PCIe 4.0 x16: 31.5 GB/s, about 80 % of it in long copies"
    )
    ssd_bandwidth: float = _constant(
        6.5e9, "B/s", ASSUMED,
        "PCIe 4.0 x4 class (Intel D7-P5500: 7.0 GB/s): no Intel SSD of 300 GB with PCIe 4.0 is "
        "known to us; figure 3a asks for 5.2 (20 %) to 7.7 GB/s (30 %)",
    )  # fmt: skip
    device_internal: float = _constant(
        3.2e9, "B/s", PAPER,
        "5.2: peak of about 3.2 GB/s; the vendor's P2P example logs 2.9 to 3.3 from NAND to FPGA",
    )  # fmt: skip
    device_link: float = _constant(
        3.2e9, "B/s", ASSUMED, "PCIe 3.0 x4 (5.2; 4.3 says Gen4): 3.9 GB/s, 80 % of it"
    )
    device_write: float = _constant(
        2.0e9, "B/s", ASSUMED, "sequential writes of a PCIe 3.0 NAND drive of 4 TB"
    )
    device_memory_bytes: float = _constant(
        3 * GIB, "B", ASSUMED, "5.2: 4 GB of DDR4 beside the FPGA, less 1 GiB of P2P buffers"
    )
    device_memory_bandwidth: float = _constant(
        19.2e9, "B/s", SHEET, "one 64-bit channel of DDR4-2400"
    )
    fpga_macs: float = _constant(
        25.6e9, "MAC/s", ASSUMED,
        "4.4: a fully unrolled adder tree over one head (128 products a cycle), at 200 MHz",
    )  # fmt: skip
    score_bytes: float = _constant(4, "B", PAPER, "5.4: a score block of n tokens has 4n bytes")
    block_tokens: float = _constant(4096, "tokens", ASSUMED, "n: tokens of a score block")
    partial_share: float = _constant(
        0.3, "of a key", PAPER, "InfiniGen (OSDI 2024): partial weight ratio of its partial keys"
    )
    chunk_tokens: float = _constant(
        16, "tokens", ASSUMED, "LeoAM-like: smallest chunk; its abstract is two keys"
    )
    chunk_waste: float = _constant(
        1.0, "x", ASSUMED, "LeoAM-like: bytes of the chunks fetched, per byte of the selection"
    )

    @property
    def host_kv_bytes(self) -> float:
        """Host memory that KV may take."""
        return max(0.0, self.host_bytes - self.host_reserve_bytes)

    @property
    def device_read(self) -> float:
        """From the device's NAND to the host, bytes per second."""
        return min(self.device_internal, self.device_link)

    def scaled(self, factor: float, *names: str) -> "Constants":
        """With these constants multiplied."""
        return replace(self, **{name: factor * getattr(self, name) for name in names})


def listed(found: Constants) -> list[dict[str, Any]]:
    """Every constant with unit, origin and source, for a result's file."""
    return [
        {"name": each.name, "value": getattr(found, each.name), **each.metadata}
        for each in fields(Constants)
    ]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of FP16 weights and FP16 KV."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    embedding_parameters: float
    """Of all tables of words; the head's part of them is read at every step."""
    vocabulary: int

    @property
    def key_elements(self) -> int:
        """Of a token in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def key_bytes(self) -> int:
        """Of a token in one layer."""
        return 2 * self.key_elements

    @property
    def kv_bytes(self) -> int:
        """Of a token in one layer."""
        return 2 * self.key_bytes

    @property
    def layer_bytes(self) -> float:
        """Weights of one layer."""
        return 2 * (self.parameters - self.embedding_parameters) / self.layers


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="qwen-7b", layers=32, heads=32, kv_heads=32, head_dim=128, parameters=7.72e9,
              embedding_parameters=2 * 151936 * 4096, vocabulary=151936),
        Shape(name="opt-6.7b", layers=32, heads=32, kv_heads=32, head_dim=128, parameters=6.66e9,
              embedding_parameters=(50272 + 2050) * 4096, vocabulary=50272),
    )
}  # fmt: skip
"""The paper's models that have the same KV: 32 layers of 32 KV heads of 128."""


# GPU memory, then host memory, then storage; and Locality -----------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A decode step of a batch."""

    shape: Shape
    tokens: int
    """Context of one sequence."""
    batch: int = 8
    alpha: float = 0.2

    @property
    def layer_tokens(self) -> int:
        """Tokens of all sequences in one layer."""
        return self.batch * self.tokens

    @property
    def kv_bytes(self) -> float:
        """Of the whole cache."""
        return self.layer_tokens * self.shape.layers * self.shape.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Places:
    """Tokens of a layer by where their KV lies; storage holds what nothing else has room for."""

    gpu: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        """All tokens of the layer."""
        return self.gpu + self.host + self.storage

    @property
    def below_gpu(self) -> int:
        """Tokens in host memory or storage."""
        return self.host + self.storage


def divide(pc: Constants, work: Workload, *, host_index_bytes: float = 0.0) -> Places:
    """Fill GPU memory, then host memory, evenly over the layers.

    Args:
        host_index_bytes: what an index of all layers takes of host memory before KV does.

    Raises:
        ConfigError: the weights do not fit the GPU.
    """
    shape = work.shape
    staging = 2 * work.alpha * work.layer_tokens * shape.kv_bytes  # two layers' selection
    room = pc.vram_bytes - pc.vram_reserve_bytes - 2 * shape.parameters
    if room < 0:
        raise ConfigError(f"{shape.name} does not fit {pc.vram_bytes / 2**30:.1f} GiB of VRAM")
    token_bytes = shape.layers * shape.kv_bytes
    gpu = min(work.layer_tokens, int(max(0.0, room - staging) // token_bytes))
    host_room = max(0.0, pc.host_kv_bytes - host_index_bytes)
    host = min(work.layer_tokens - gpu, int(host_room // token_bytes))
    return Places(gpu=gpu, host=host, storage=work.layer_tokens - gpu - host)


@dataclass(frozen=True)
class Locality:
    """What pools keep of what is selected next, by the share of the context that is hot."""

    hot: Sequence[float]
    """Shares of the context, rising, strictly between 0 and 1."""
    selected: Sequence[float]
    """Share of the selected that is hot, HillInfer's placement."""
    naive_selected: Sequence[float]
    """The same where the hot pool is whatever scores best at the moment."""
    naive_moved: Sequence[float]
    """Tokens that enter such a hot pool at a step, as a share of the context."""
    source: str = "assumed"

    def hot_share(self, hot: float, *, naive: bool = False) -> float:
        """Share of the selected among `hot` of the context; none of nothing, all of all."""
        points = self.naive_selected if naive else self.selected
        return float(np.interp(hot, (0.0, *self.hot, 1.0), (0.0, *points, 1.0)))

    def moved(self, hot: float) -> float:
        """Share of the context that the naive placement promotes at a step."""
        return float(np.interp(hot, (0.0, *self.hot, 1.0), (0.0, *self.naive_moved, 0.0)))


NO_LOCALITY = Locality((0.5,), (0.5,), (0.5,), (0.25,), "none: a pool has its share")
"""Every token is as likely to be selected as any other."""


# What recorded decodes say of hot pools, for the simulated SmartSSD PC ----------------------------

HITS, NAIVE = "both", "naive"
"""Rules of the placement bench: pinning and hit-rate table; whatever scores best now."""
ASSUMED_LOCALITY = Locality(
    (0.2, 0.4, 0.6), (0.6, 0.75, 0.85), (0.5, 0.65, 0.8), (0.05, 0.07, 0.06), "assumed"
)
"""Where no recording is given."""

Row = dict[str, Any]


def read_locality(path: str, alpha: float) -> Locality:
    """The pools of a result of the placement bench, at one alpha, once they have settled.

    Where several documents were played, their mean.

    Raises:
        ConfigError: the file is not such a result, or has nothing at that alpha.
    """
    rows = [row for row in _rows(Result.load(path).figures) if abs(row["alpha"] - alpha) < 1e-9]
    pools = {
        rule: {
            hot: [row for row in rows if (row["rule"], row["hot_share"]) == (rule, hot)]
            for hot in sorted({row["hot_share"] for row in rows if row["rule"] == rule})
        }
        for rule in (HITS, NAIVE)
    }  # fmt: skip
    hot = [share for share in pools[HITS] if share in pools[NAIVE] and 0 < share < 1]
    if not hot:
        raise ConfigError(
            f"{path} has no pools at alpha {alpha:g} under the rules {HITS!r} and {NAIVE!r}; "
            "run the placement bench with that alpha, or give another --alpha"
        )
    shares = {
        rule: [fmean(row["hot_share_of_selected_later"] for row in found[share]) for share in hot]
        for rule, found in pools.items()
    }
    moved = [
        fmean(row["promoted_later"]["mean"] * row["alpha"] / row["selected"]
              for row in pools[NAIVE][share]) for share in hot
    ]  # fmt: skip
    return Locality(hot, shares[HITS], shares[NAIVE], moved, f"recorded, {Path(path).stem}")


def _rows(found: Any) -> Iterator[Row]:
    """Rows of pools, wherever they stand in the figures."""
    if isinstance(found, dict):
        if {"rule", "hot_share", "alpha", "selected", "hot_share_of_selected_later"} <= set(found):
            yield found
        else:
            for value in found.values():
                yield from _rows(value)
    elif isinstance(found, list):
        for value in found:
            yield from _rows(value)
