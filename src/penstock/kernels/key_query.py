"""PreparedQuery: one token's query in int8, to be scored against `KeyCodes`; without torch."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.key_rounding import FloatArray, step_of
from penstock.kernels.native.compiled import address

Int64Array = NDArray[np.int64]

CHUNK = 64
"""Channels that the compiled kernels take at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedQuery:
    """One token's query in int8, one step per head; for `KeyCodes` of the shape it was made for."""

    codes: NDArray[np.int8]
    """In the order in which the keys' codes are unpacked, zero where nothing is.
    [kv_heads, queries of each, chunks, 64]"""
    factors: FloatArray
    """What a code is worth, the scaling of logits included. [kv_heads, queries]"""
    sums: FloatArray
    """Sums of the codes over each half of a chunk. [kv_heads, queries, chunks, 2]"""
    normalisers: FloatArray | None
    """None: raw products are summed. [kv_heads, queries]"""
    made_for: tuple[int, int, int]
    """KV heads, head_dim and bits of the codes."""
    table: Int64Array
    """Addresses, for the compiled kernels."""

    @property
    def num_heads(self) -> int:
        """Rows of logits: query heads, or KV heads for the rule "products"."""
        return self.factors.size


def prepare_query(
    query: FloatArray, log_normalisers: FloatArray | None, scaling: float,
    kind: tuple[int, int, int],
) -> PreparedQuery:  # fmt: skip
    """Quantise a query, one step per head (per KV head for the rule "products").

    Args:
        query, log_normalisers, scaling: as for `KeyCodes.prepare`.
        kind: KV heads, head_dim and bits of the codes.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.
    """
    kv_heads, head_dim, bits = kind
    heads = len(query)
    if query.shape != (heads, head_dim) or heads % kv_heads or heads == 0:
        raise ValueError(f"a query of shape {query.shape} for {kv_heads} KV heads of {head_dim}")
    wide = np.asarray(query, dtype=np.float32).reshape(kv_heads, -1, head_dim)
    if not np.isfinite(wide).all():
        raise ValueError("the query is not finite")
    normalisers: FloatArray | None = None
    if log_normalisers is None:
        wide = wide.sum(axis=1, keepdims=True)
    else:
        normalisers = np.array(log_normalisers, dtype=np.float32)
        if normalisers.shape != (heads,):
            raise ValueError(f"normalisers of shape {normalisers.shape} for {heads} heads")
        if not np.isfinite(normalisers).all():
            raise ValueError("the normalisers are not finite")
    queries, chunks = wide.shape[1], -(-head_dim // CHUNK)
    steps = step_of(wide)
    flat = np.zeros((kv_heads, queries, chunks * CHUNK), dtype=np.int8)
    flat[..., places_of(head_dim, bits)] = np.rint(wide / steps[..., None])
    codes = flat.reshape(kv_heads, queries, chunks, CHUNK)
    sums = codes.reshape(kv_heads, queries, chunks, 2, -1).sum(axis=-1, dtype=np.float32)
    factors = steps if normalisers is None else steps * np.float32(scaling)
    addresses = [address(codes), address(factors), address(sums)]
    addresses += [0 if normalisers is None else address(normalisers), queries]
    return PreparedQuery(
        codes=codes, factors=factors, sums=sums, normalisers=normalisers, made_for=kind,
        table=np.array(addresses, dtype=np.int64),
    )  # fmt: skip


@functools.cache
def places_of(head_dim: int, bits: int) -> Int64Array:
    """Where each channel comes to lie when codes are unpacked; not to be written to. [head_dim]"""
    channel = np.arange(head_dim)
    if bits == 8:
        return channel
    chunk, inside = channel // CHUNK, channel % CHUNK
    half = np.minimum(CHUNK, head_dim - chunk * CHUNK) // 2
    places: Int64Array = chunk * CHUNK + inside // half * (CHUNK // 2) + inside % half
    return places
