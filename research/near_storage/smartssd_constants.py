"""Constants: HillInfer's PC as numbers, each with its source; nothing here was measured by us."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

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
