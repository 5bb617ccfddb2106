"""KeyCodes: keys in 8 or 4 bits by unit, and scores of units from them; without torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.key_query import CHUNK, PreparedQuery, places_of, prepare_query
from penstock.kernels.key_rounding import (
    ByteArray,
    FloatArray,
    KeyDtype,
    byte_codes,
    group_codes,
    widened,
)
from penstock.kernels.key_shares import add_shares_twin
from penstock.kernels.native.compiled import address, kernel

__all__ = ["DTYPES", "FloatArray", "Int64Array", "KeyCodes", "KeyDtype", "PreparedQuery"]

Int64Array = NDArray[np.int64]

DTYPES: tuple[KeyDtype, ...] = ("float32", "bfloat16", "float16")
"""Dtypes of keys; a dtype's place is what the compiled kernels call it."""
_ALIGNMENT = 64
_BLOCK = 2048
"""Units that the plain twins take at once, for the sake of memory."""


class KeyCodes:
    """Codes of the keys of `num_units` tokens, all KV heads of a token side by side.

    8 bits: one step per token and KV head, symmetric; off by at most half a step, 1/254 of the
    key's largest value. 4 bits: of every started 64 channels two groups, each with a least value
    and a step of its own (both bfloat16), so that 64 channels take 40 bytes; off by at most half a
    step, 1/30 of the group's range, or by 1/256 of the least value where that is more.
    """

    def __init__(self, num_units: int, kv_heads: int, head_dim: int, dtype: str, bits: int) -> None:
        """Make room; memory that was never written to costs nothing on most systems.

        Args:
            num_units: units 0 .. num_units - 1 can be put.
            dtype: of the keys that will be put: float32, bfloat16 or float16.
            bits: 8 or 4.

        Raises:
            ValueError: other bits, an unknown dtype, or an odd head_dim in 4 bits.
        """
        if bits not in (8, 4) or dtype not in DTYPES:
            raise ValueError(f"no codes of {bits} bits for keys in {dtype}")
        if bits == 4 and head_dim % 2:
            raise ValueError(f"codes of 4 bits need an even head_dim, not {head_dim}")
        self.kv_heads, self.head_dim, self.dtype, self.bits = kv_heads, head_dim, dtype, bits
        self._kind = (kv_heads, head_dim, bits)
        self._chunks = -(-head_dim // CHUNK)
        self._key_bytes = kv_heads * head_dim * (4 if dtype == "float32" else 2)
        self._places = places_of(head_dim, bits)
        self._make(num_units)

    @staticmethod
    def num_bytes(num_units: int, kv_heads: int, head_dim: int, bits: int) -> int:
        """Bytes that the codes of so many units hold, for the ledger."""
        width = head_dim if bits == 8 else head_dim // 2
        groups = 1 if bits == 8 else 2 * -(-head_dim // CHUNK)
        return num_units * kv_heads * (width + 4 * groups) + 2 * _ALIGNMENT

    @property
    def num_units(self) -> int:
        """Units that can be put."""
        return len(self.codes)

    def grow(self, num_units: int) -> None:
        """Make room for more units; old and new codes are both in memory for a moment.

        Raises:
            ValueError: that would be fewer.
        """
        if num_units < self.num_units:
            raise ValueError(f"{self.num_units} units cannot become {num_units}")
        codes, steps = self.codes, self.steps
        self._make(num_units)
        self.codes[: len(codes)], self.steps[: len(steps)] = codes, steps

    def _make(self, num_units: int) -> None:
        width = self.head_dim if self.bits == 8 else self.head_dim // 2
        groups = 1 if self.bits == 8 else 2 * self._chunks
        self.codes: ByteArray = _aligned((num_units, self.kv_heads, width), np.uint8)
        """8 bits: each 128 more than it means. 4 bits: of every started 64 channels the first half
        in the low nibbles, the other half in the high ones. [units, kv_heads, bytes]"""
        self.steps: NDArray[np.uint32] = _aligned((num_units, self.kv_heads, groups), np.uint32)
        """8 bits: the step's bits, float32. 4 bits: the step in the low half, the least value in
        the high half, both bfloat16. [units, kv_heads, groups]"""
        self._table: Int64Array = np.array(
            [address(self.codes), address(self.steps), self.kv_heads, self.head_dim, width,
             groups, self.bits, DTYPES.index(self.dtype)], dtype=np.int64,
        )  # fmt: skip

    # Writing ------------------------------------------------------------------------------------

    def put(self, unit_ids: Int64Array, raw: ByteArray, threads: int = 0) -> None:
        """Quantise the keys of some units; the twin of `put_twin`.

        Args:
            unit_ids: distinct. int64 [n]
            raw: units as bytes, each beginning with its keys, [kv_heads, head_dim] of `dtype`; the
                rows may lie apart. uint8 [n, row_bytes]
            threads: of the compiled kernel; 0: as many as OpenMP has.

        Raises:
            ValueError: a unit is out of range, rows are too short or not one per unit, or keys are
                not finite; their units' codes are then not to be used.
        """
        unit_ids = self._checked(unit_ids)
        if raw.ndim != 2 or len(raw) != len(unit_ids) or raw.shape[1] < self._key_bytes:
            raise ValueError(
                f"{len(unit_ids)} units of {self._key_bytes} bytes of keys do not come from bytes "
                f"of shape {raw.shape}"
            )
        compiled = kernel("put_key_codes")
        if compiled is None or raw.dtype != np.uint8 or raw.strides[1] != 1:
            self.put_twin(unit_ids, raw)
            return
        bad = np.zeros(1, dtype=np.int64)
        compiled(
            address(self._table), address(unit_ids), address(raw), raw.strides[0], len(unit_ids),
            threads, address(bad),
        )  # fmt: skip
        _refuse(int(bad[0]))

    def put_twin(self, unit_ids: Int64Array, raw: ByteArray) -> None:
        """The meaning of `put` in numpy."""
        for first in range(0, len(unit_ids), _BLOCK):
            units = unit_ids[first : first + _BLOCK]
            part = np.ascontiguousarray(raw[first : first + _BLOCK, : self._key_bytes])
            keys = widened(part, self.dtype).reshape(len(units), self.kv_heads, self.head_dim)
            _refuse(int((~np.isfinite(keys)).any(axis=(1, 2)).sum()))
            if self.bits == 8:
                self.codes[units], self.steps[units, :, 0] = byte_codes(keys)
                continue
            for chunk in range(self._chunks):
                part_keys = keys[..., chunk * CHUNK : (chunk + 1) * CHUNK]
                half, at = part_keys.shape[-1] // 2, chunk * CHUNK // 2
                low, self.steps[units, :, 2 * chunk] = group_codes(part_keys[..., :half])
                high, self.steps[units, :, 2 * chunk + 1] = group_codes(part_keys[..., half:])
                self.codes[units, :, at : at + half] = low | high << 4

    # Scoring ------------------------------------------------------------------------------------

    def prepare(
        self, query: FloatArray, log_normalisers: FloatArray | None, scaling: float
    ) -> PreparedQuery:
        """Quantise one token's query, to be scored with as often as is needed.

        Args:
            query: [q_heads, head_dim]
            log_normalisers: of each head's softmax, for the rule "attention"; None: the rule
                "products" (see `score`). [q_heads]
            scaling: factor on the logits; raw products are not scaled.

        Raises:
            ValueError: shapes that do not fit, or numbers that are not finite.
        """
        return prepare_query(query, log_normalisers, scaling, self._kind)

    def score(
        self, query: FloatArray, log_normalisers: FloatArray | None, scaling: float,
        unit_ids: Int64Array, out: FloatArray, threads: int = 0,
    ) -> None:  # fmt: skip
        """Importance of some units for one token's query, from their codes.

        Rule "attention": over the query heads the sum of exp(scaling * query . key - normaliser).
        Rule "products" (no normalisers): the sum of the raw products query . key.

        Args:
            query, log_normalisers, scaling: as for `prepare`.
            unit_ids, out, threads: as for `score_prepared`.

        Raises:
            ValueError: as `prepare` and `score_prepared`.
        """
        prepared = self.prepare(query, log_normalisers, scaling)
        self.score_prepared(prepared, unit_ids, out, threads)

    def score_prepared(
        self, prepared: PreparedQuery, unit_ids: Int64Array, out: FloatArray, threads: int = 0
    ) -> None:
        """`score` with a query that was prepared before; the twin of `score_twin`.

        Exponents are taken between -87 and 80, exp to within 2 units in the last place. Threads do
        not change the result.

        Args:
            unit_ids: in any order; runs of consecutive ones are the fastest. int64 [n]
            out: filled. float32 [n], contiguous
            threads: of the compiled kernel; 0: as many as OpenMP has.

        Raises:
            ValueError: a unit is out of range, `out` does not fit, or the query was prepared for
                another shape or number of bits.
        """
        unit_ids = self._checked(unit_ids)
        self._check(prepared, out, unit_ids.shape)
        compiled = kernel("score_key_codes")
        if compiled is None:
            self.score_twin(prepared, unit_ids, out)
            return
        compiled(
            address(self._table), address(prepared.table), address(unit_ids), len(unit_ids),
            address(out), threads,
        )  # fmt: skip

    def score_twin(self, prepared: PreparedQuery, unit_ids: Int64Array, out: FloatArray) -> None:
        """The meaning of `score_prepared` in numpy."""
        for first in range(0, len(unit_ids), _BLOCK):
            logits = self._logits(prepared, unit_ids[first : first + _BLOCK])
            if prepared.normalisers is None:
                out[first : first + _BLOCK] = logits.sum(axis=0)
            else:
                add_shares_twin(
                    logits, prepared.normalisers.reshape(-1), out[first : first + _BLOCK]
                )

    def logits(
        self, prepared: PreparedQuery, unit_ids: Int64Array, out: FloatArray, threads: int = 0
    ) -> FloatArray:
        """Logits of every head for some units; the twin of `logits_twin`.

        For a softmax that others have a share in: their log-sums and these make the normalisers,
        with which `add_shares` makes scores of the logits.

        Args:
            prepared: with normalisers, whose values play no part here.
            unit_ids, threads: as for `score_prepared`.
            out: filled. float32 [q_heads, n], contiguous

        Returns:
            Log of the summed exponentials, minus infinity for no units. float32 [q_heads]

        Raises:
            ValueError: as `score_prepared`.
        """
        unit_ids = self._checked(unit_ids)
        self._check(prepared, out, (prepared.num_heads, len(unit_ids)))
        compiled = kernel("key_logits")
        if compiled is None:
            return self.logits_twin(prepared, unit_ids, out)
        log_sums = np.empty(prepared.num_heads, dtype=np.float32)
        compiled(
            address(self._table), address(prepared.table), address(unit_ids), len(unit_ids),
            address(out), address(log_sums), threads,
        )  # fmt: skip
        return log_sums

    def logits_twin(
        self, prepared: PreparedQuery, unit_ids: Int64Array, out: FloatArray
    ) -> FloatArray:
        """The meaning of `logits` in numpy."""
        if not len(unit_ids):
            return np.full(len(out), -np.inf, dtype=np.float32)
        for first in range(0, len(unit_ids), _BLOCK):
            out[:, first : first + _BLOCK] = self._logits(
                prepared, unit_ids[first : first + _BLOCK]
            )
        most = out.max(axis=1)
        sums = np.exp(out - most[:, None]).sum(axis=1)
        log_sums: FloatArray = most + np.log(sums)
        return log_sums

    def _logits(self, prepared: PreparedQuery, unit_ids: Int64Array) -> FloatArray:
        flat = prepared.codes.reshape(*prepared.codes.shape[:2], -1)[..., self._places]
        query = flat * prepared.factors[..., None]
        logits = query @ self.decoded(unit_ids).transpose(1, 2, 0)
        flat_logits: FloatArray = logits.reshape(prepared.num_heads, -1).astype(np.float32)
        return flat_logits

    def decoded(self, unit_ids: Int64Array) -> FloatArray:
        """What the codes of some units mean. float32 [n, kv_heads, head_dim]

        Raises:
            ValueError: a unit is out of range.
        """
        unit_ids = self._checked(unit_ids)
        codes, words = self.codes[unit_ids], self.steps[unit_ids]
        if self.bits == 8:
            decoded: FloatArray = (codes.astype(np.float32) - 128) * words.view(np.float32)
            return decoded
        halves = np.zeros((*codes.shape[:2], self._chunks, 2, CHUNK // 2), dtype=np.float32)
        for chunk in range(self._chunks):
            part = codes[..., chunk * CHUNK // 2 : (chunk + 1) * CHUNK // 2]
            halves[:, :, chunk, 0, : part.shape[-1]] = part & 15
            halves[:, :, chunk, 1, : part.shape[-1]] = part >> 4
        words = words.reshape(*words.shape[:2], self._chunks, 2, 1)
        halves *= (words << 16).view(np.float32)
        halves += (words & np.uint32(0xFFFF0000)).view(np.float32)
        return halves.reshape(*codes.shape[:2], -1)[..., self._places]

    def _check(self, prepared: PreparedQuery, out: FloatArray, shape: tuple[int, ...]) -> None:
        if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"what goes into {shape} does not go into {out.dtype} {out.shape}")
        if prepared.made_for != self._kind:
            raise ValueError("this query was prepared for codes of another kind")

    def _checked(self, unit_ids: Int64Array) -> Int64Array:
        """Contiguous int64, in range."""
        unit_ids = np.ascontiguousarray(unit_ids, dtype=np.int64)
        if unit_ids.ndim != 1:
            raise ValueError(f"units in an array of shape {unit_ids.shape}")
        if len(unit_ids) and not (unit_ids.min() >= 0 and unit_ids.max() < self.num_units):
            raise ValueError(
                f"units {unit_ids.min()} to {unit_ids.max()} are not all among {self.num_units}"
            )
        return unit_ids


def _aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin where a cache line does."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    skip = -address(room) % _ALIGNMENT
    zeros: NDArray[Any] = room[skip : skip + num_bytes].view(dtype).reshape(shape)
    return zeros


def _refuse(bad: int) -> None:
    if bad:
        raise ValueError(f"the keys of {bad} units are not finite")
