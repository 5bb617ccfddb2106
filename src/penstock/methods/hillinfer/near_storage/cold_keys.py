"""ColdKeys: one layer's cold tokens, as codes that are scored against a query."""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.key_codes import KeyCodes
from penstock.kernels.key_shares import add_shares
from penstock.methods.hillinfer.near_storage.settings import ScoreSettings

UNMAPPED = -1


class ScoredBlock(NamedTuple):
    """Positions and scores of some cold tokens of one row; the paper's Score Block."""

    row: int
    positions: NDArray[np.int32]
    scores: NDArray[np.float32]


class ColdKeys:
    """Which tokens of a layer are cold, where their units are, and codes of all keys by unit.

    Codes are made when keys are written and stay, hot or cold. A token that moves between the
    pools costs one bit.

    Source: HillInfer, section 4.4: scores of low precision, streamed chunk by chunk, from the
    original keys, which are what is fetched.

    Differences: keys are cast once, when they are written, and the codes kept in the device's
    memory; `BoundedKeys` casts while it streams, as the paper does. The rule "attention" adds
    shares of the softmax, which needs the log-sums of all devices first (two rounds, and the keys
    once): on models with several heads a sum of raw products ranks otherwise
    (docs/methods/hillinfer.md).
    """

    def __init__(self, settings: ScoreSettings, num_units: int | None = None) -> None:
        """Make room.

        Args:
            num_units: whose codes there is room for at first; None: one a token.
        """
        s = self.settings = settings
        room = s.rows * s.max_tokens if num_units is None else num_units
        self.units = np.full((s.rows, s.max_tokens), UNMAPPED, dtype=np.int64)
        self.cold = np.zeros((s.rows, s.max_tokens), dtype=np.bool_)
        self.codes = KeyCodes(room, s.kv_heads, s.head_dim, s.dtype, s.bits)
        self._growing = threading.Lock()  # keys are written while others are scored
        self._logits: list[tuple[ScoredBlock, NDArray[np.float32]]] = []

    @staticmethod
    def num_bytes(settings: ScoreSettings) -> int:
        """Bytes of one layer's codes and tables, for the ledger of their holder."""
        s = settings
        tokens = s.rows * s.max_tokens
        codes = KeyCodes.num_bytes(tokens, s.kv_heads, s.head_dim, s.bits)
        return codes + ColdKeys.table_bytes(s)

    @staticmethod
    def table_bytes(settings: ScoreSettings) -> int:
        """Bytes of one layer's tables alone."""
        return 9 * settings.rows * settings.max_tokens

    @staticmethod
    def scratch_bytes(settings: ScoreSettings) -> int:
        """Bytes of one request's logits, positions and scores."""
        s = settings
        return s.rows * s.max_tokens * (4 * s.query_heads + 20) + 4 * s.block_tokens

    def put(self, unit_ids: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        """Take in the keys of some units.

        Args:
            unit_ids: [count]
            raw: their bytes, keys first. uint8 [count, at least the bytes of a key]
        """
        most = int(unit_ids.max(initial=-1)) + 1
        if most > self.codes.num_units:
            with self._growing:
                self.codes.grow(max(most, self.codes.num_units * 5 // 4))
        self.codes.put(unit_ids, raw, self.settings.threads)

    def map(self, first: int, unit_ids: NDArray[np.int64]) -> None:
        """Tokens from `first` on are in these units, and cold; minus one: another device's.

        Args:
            unit_ids: [rows, count]
        """
        end = first + unit_ids.shape[1]
        self.units[:, first:end] = unit_ids
        self.cold[:, first:end] = unit_ids != UNMAPPED

    def change(
        self, promoted: NDArray[np.int64], demoted: NDArray[np.int64], *, reset: bool
    ) -> None:
        """Move tokens between the pools; what has another device's unit stays out.

        Args:
            promoted, demoted: as row * max_tokens + position. [count]
            reset: all are cold at first.
        """
        cold = self.cold.reshape(-1)
        if reset:
            self.cold[:] = self.units != UNMAPPED
        cold[promoted] = False
        cold[demoted] = self.units.reshape(-1)[demoted] != UNMAPPED

    # Scoring ----------------------------------------------------------------------------------

    def blocks_of_products(self, query: NDArray[np.float32], end: int) -> Iterator[ScoredBlock]:
        """Score by the rule "products", block by block.

        Args:
            query: [rows, query_heads, head_dim]
            end: tokens from here on are not scored.
        """
        prepared = [self.codes.prepare(one, None, 1.0) for one in query]
        for row, positions, units in self._chunks(end):
            out = np.empty(len(positions), dtype=np.float32)
            with self._growing:
                codes, places = self._codes_of(units)
                codes.score_prepared(prepared[row], places, out, self.settings.threads)
            yield ScoredBlock(row, positions, out)

    def log_sums(self, query: NDArray[np.float32], end: int) -> NDArray[np.float32]:
        """Keep the logits of every cold token before `end`, and return the log of their summed
        exponentials, minus infinity where there are none. [rows, query_heads]"""
        s = self.settings
        sums = np.full((s.rows, s.query_heads), -np.inf, dtype=np.float32)
        self._logits = []
        none = np.zeros(s.query_heads, dtype=np.float32)
        prepared = [self.codes.prepare(one, none, s.scaling) for one in query]
        for row, positions, units in self._chunks(end):
            logits = np.empty((s.query_heads, len(positions)), dtype=np.float32)
            with self._growing:
                codes, places = self._codes_of(units)
                part = codes.logits(prepared[row], places, logits, s.threads)
            sums[row] = np.logaddexp(sums[row], part)
            self._logits.append((ScoredBlock(row, positions, logits[0]), logits))
        return sums

    def blocks_of_shares(self, normalisers: NDArray[np.float32]) -> Iterator[ScoredBlock]:
        """After `log_sums`: each token's share of the softmax, added over query heads.

        Args:
            normalisers: log-sums over all tokens. [rows, query_heads]
        """
        held, self._logits = self._logits, []
        for block, logits in held:
            out = np.empty(len(block.positions), dtype=np.float32)
            add_shares(logits, normalisers[block.row], out, self.settings.threads)
            yield ScoredBlock(block.row, block.positions, out)

    def forget_logits(self) -> None:
        """The shares of the last request are not wanted any more."""
        self._logits = []

    def _codes_of(self, units: NDArray[np.int64]) -> tuple[KeyCodes, NDArray[np.int64]]:
        """Codes in which those of some units of a block are, and where; until the next call."""
        return self.codes, units

    def _chunks(self, end: int) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.int64]]]:
        """Row, positions and units of the cold tokens before `end`, a block at a time."""
        size = self.settings.block_tokens
        for row in range(self.settings.rows):
            positions = np.flatnonzero(self.cold[row, :end])
            units = self.units[row, positions]
            for first in range(0, len(positions), size):
                part = slice(first, first + size)
                yield row, positions[part].astype(np.int32), units[part]
