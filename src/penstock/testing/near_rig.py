"""A near-storage store with random keys, and what its scores must be."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_storage.scorer import Moved
from penstock.methods.hillinfer.near_storage.settings import Rule, ScoreSettings
from penstock.methods.hillinfer.near_storage.tls import Trust
from penstock.storage.aligned_buffer import AlignedBuffer

KV_HEADS, HEADS, DIM = 2, 4, 16
UNIT_BYTES = 2 * KV_HEADS * DIM * 4
NOTHING = np.zeros(0, dtype=np.int64)


@dataclass
class NearRig:
    """A store of one layer whose tokens are all cold."""

    place: Path | str
    rows: int = 2
    tokens: int = 150
    rule: Rule = "attention"
    devices: int | str = 1
    copies: int = 1
    key: bytes = b""
    timeout_s: float = 10.0
    bits: int = 8
    device_memory: int = 0
    trust: Trust | None = None
    seed: int = 0
    store: NearStore = field(init=False)

    def __post_init__(self) -> None:
        settings = ScoreSettings(
            rows=self.rows, max_tokens=self.tokens, query_heads=HEADS, kv_heads=KV_HEADS,
            head_dim=DIM, dtype="float32", scaling=0.25, rule=self.rule, bits=self.bits,
            block_tokens=32,
        )  # fmt: skip
        self.store = NearStore.open(
            str(self.place), settings, layers=1, unit_bytes=UNIT_BYTES, devices=self.devices,
            copies=self.copies, key=self.key, timeout_s=self.timeout_s,
            device_memory=self.device_memory, trust=self.trust,
        )  # fmt: skip
        random = np.random.default_rng(self.seed)
        self.units = random.permutation(self.rows * self.tokens).reshape(self.rows, self.tokens)
        self.keys = random.standard_normal(
            (self.rows, self.tokens, KV_HEADS, DIM), dtype=np.float32
        )
        self.query = random.standard_normal((self.rows, HEADS, DIM), dtype=np.float32)
        self.values = random.standard_normal(self.keys.shape, dtype=np.float32)

    def fill(self) -> None:
        """Write every token and map it."""
        region = self.store.region(0)
        region.reserve(self.units.size)
        buffer = AlignedBuffer(self.units.size, region.padded_bytes)
        both = np.stack([self.keys, self.values], axis=2).reshape(self.units.size, -1)
        buffer.array[:, :UNIT_BYTES] = both.view(np.uint8)
        region.write(self.units.reshape(-1), buffer, np.arange(self.units.size))
        self.store.scorer.map(0, 0, self.units)

    def read(self, units: NDArray[np.int64]) -> NDArray[np.float32]:
        """Keys and values of some units. [units, 2, kv_heads, head_dim]"""
        region = self.store.region(0)
        buffer = AlignedBuffer(len(units), region.padded_bytes)
        region.submit_read(units, buffer, np.arange(len(units))).wait()
        found = np.ascontiguousarray(buffer.array[:, :UNIT_BYTES]).view(np.float32)
        return found.reshape(len(units), 2, KV_HEADS, DIM)

    def score(self, end: int, moved: Moved | None = None) -> NDArray[np.float32]:
        """Scores of cold tokens before `end`; not-a-number where there is none. [rows, end]"""
        moved = moved or Moved(NOTHING, NOTHING, reset=False)
        scoring = self.store.scorer.begin(0, self.query, end, moved)
        out = np.full((self.rows, end), np.nan, dtype=np.float32)
        scoring.merge(scoring.log_sums() if self.rule == "attention" else None, out)
        return out

    def score_for(self, seconds: float) -> None:
        """Score everything again and again for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert not np.isnan(self.score(self.tokens)).any()

    def expected(self, end: int, hot: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
        """The same from the keys themselves, in float64. [rows, end]"""
        queries = self.query.reshape(self.rows, KV_HEADS, -1, DIM).astype(np.float64)
        logits = np.einsum("bgqd,btgd->bgqt", queries, self.keys[:, :end].astype(np.float64))
        if self.rule == "products":
            out = logits.sum(axis=(1, 2))
        else:
            logits = logits * 0.25
            if hot is not None:
                logits = np.where(hot[:, None, None, :end], -np.inf, logits)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out = (weights / weights.sum(axis=-1, keepdims=True)).sum(axis=(1, 2))
        if hot is not None:
            out = np.where(hot[:, :end], np.nan, out)
        expected: NDArray[np.float32] = out.astype(np.float32)
        return expected

    def close(self) -> None:
        """Stop the devices."""
        self.store.close()

    def __enter__(self) -> "NearRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
