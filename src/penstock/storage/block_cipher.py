"""BlockCipher: AES-XTS over 16-byte blocks by their number, many runs of them in one call."""

import os
import time
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DocumentKeyError
from penstock.storage.file import ByteArray, Int64Array

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

BLOCK_BYTES = 16
KEY_BYTES = 32
_PIECE_BLOCKS = 1 << 14
"""Blocks worked on at a time, which stay in the processor's cache."""
_FAST_BYTES_PER_S = 400e6
"""AES in hardware does ten times that on any processor that has it; in software, half."""
_TRIAL_BYTES, _TRIALS = 1 << 16, 8


class BlockCipher:
    """AES-128 in XTS mode, each block a data unit of its own: `E1(text ^ E2(number)) ^ E2(number)`.

    Blocks can be written and read in any order and length, in place, and nothing is kept beside
    them. Equal text in an equal place gives equal blocks; it hides what is written, and finds no
    change. A few numpy calls a batch, and two AES calls of the library on all blocks together.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Take a key of 32 bytes; None: a random one that nothing else has.

        Raises:
            DocumentKeyError: `cryptography` is not installed.
        """
        text, number = _halves(os.urandom(KEY_BYTES) if key is None else key)
        self._encrypting, self._decrypting = Lock(), Lock()
        self._encrypt = (number.encryptor(), text.encryptor())
        self._decrypt = (number.encryptor(), text.decryptor())

    def encrypt(self, first_block: int, data: ByteArray, out: ByteArray) -> None:
        """Encrypt `data` as blocks from `first_block` on; both uint8 [16 * blocks], contiguous."""
        with self._encrypting:
            _convert(self._encrypt, np.array([first_block]), [data], [out])

    def decrypt(self, first_blocks: Int64Array, runs: list[ByteArray]) -> None:
        """Decrypt runs in place: run i, uint8 [16 * blocks], begins with block `first_blocks[i]`.

        Only one decryption is under way at a time.
        """
        with self._decrypting:
            _convert(self._decrypt, first_blocks, runs, runs)


def _convert(
    ciphers: "tuple[CipherContext, CipherContext]", first_blocks: Int64Array,
    sources: list[ByteArray], targets: list[ByteArray],
) -> None:  # fmt: skip
    batch: list[tuple[int, ByteArray, ByteArray]] = []
    room = _PIECE_BLOCKS * BLOCK_BYTES
    for first, source, target in zip(first_blocks.tolist(), sources, targets, strict=True):
        start = 0
        while start < len(source):
            size = min(room, len(source) - start)
            part = slice(start, start + size)
            batch.append((first + start // BLOCK_BYTES, source[part], target[part]))
            start, room = start + size, room - size
            if not room:
                _convert_piece(ciphers, batch)
                batch, room = [], _PIECE_BLOCKS * BLOCK_BYTES
    if batch:
        _convert_piece(ciphers, batch)


def _convert_piece(
    ciphers: "tuple[CipherContext, CipherContext]", batch: list[tuple[int, ByteArray, ByteArray]]
) -> None:
    sizes = np.array([len(source) for _, source, _ in batch])
    ends = sizes.cumsum()
    total = int(ends[-1])
    numbers = np.zeros((total // BLOCK_BYTES, 2), dtype="<u8")
    firsts = np.array([first for first, _, _ in batch], dtype=np.int64)
    firsts -= (ends - sizes) // BLOCK_BYTES
    numbers[:, 0] = np.arange(len(numbers)) + np.repeat(firsts, sizes // BLOCK_BYTES)
    # The library wants a block of room behind what it writes.
    masks, work = np.empty((2, total + BLOCK_BYTES), dtype=np.uint8)
    ciphers[0].update_into(numbers.reshape(-1).view(np.uint8).data, masks.data)
    starts = (ends - sizes).tolist()
    for (_, source, _), start, end in zip(batch, starts, ends.tolist(), strict=True):
        np.bitwise_xor(source, masks[start:end], out=work[start:end])
    ciphers[1].update_into(work[:total].data, work.data)
    for (_, _, target), start, end in zip(batch, starts, ends.tolist(), strict=True):
        np.bitwise_xor(work[start:end], masks[start:end], out=target)


def _halves(key: bytes):  # type: ignore[no-untyped-def]
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError as error:
        raise DocumentKeyError(
            "sealing a cache needs the package cryptography; run pip install cryptography, or "
            "do without sealing"
        ) from error
    assert len(key) == KEY_BYTES, len(key)
    halves = (key[: KEY_BYTES // 2], key[KEY_BYTES // 2 :])
    return tuple(Cipher(algorithms.AES(half), modes.ECB()) for half in halves)


def is_fast() -> bool:
    """Whether AES is done in hardware, by a quick measurement; False without `cryptography`."""
    try:
        cipher = BlockCipher()
    except DocumentKeyError:
        return False
    data, best_s = np.zeros(_TRIAL_BYTES, dtype=np.uint8), float("inf")
    out = np.empty(_TRIAL_BYTES + BLOCK_BYTES, dtype=np.uint8)
    for _ in range(_TRIALS):
        start = time.perf_counter()
        cipher._encrypt[1].update_into(data.data, out.data)
        best_s = min(best_s, time.perf_counter() - start)
    return _TRIAL_BYTES / best_s > _FAST_BYTES_PER_S
