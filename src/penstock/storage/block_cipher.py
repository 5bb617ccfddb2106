"""BlockCipher: AES-XTS over 16-byte blocks by their number, many runs of them in one call."""

import os
import time
from threading import Lock, local
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import DocumentKeyError
from penstock.kernels.native.compiled import address, kernel
from penstock.storage.file import ByteArray, Int64Array, bytes_at

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext

BLOCK_BYTES = 16
KEY_BYTES = 32
_PIECE_BLOCKS = 1 << 12
"""Blocks worked on at a time, which stay in the processor's cache."""
_FAST_BYTES_PER_S = 400e6
"""AES in hardware does ten times that on any processor that has it; in software, half."""
_TRIAL_BYTES, _TRIALS = 1 << 16, 8


class BlockCipher:
    """AES-128 in XTS mode, each block a data unit of its own: `E1(text ^ E2(number)) ^ E2(number)`.

    Blocks can be written and read in any order and length, in place, and nothing is kept beside
    them. Equal text in an equal place gives equal blocks; it hides what is written, and finds no
    change. Two AES calls of the library on all blocks together, and a kernel around each.
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
        assert len(data) == len(out), "as many bytes of each"
        lists = [
            np.array([each], np.int64)
            for each in (first_block, len(data), address(data), address(out))
        ]
        with self._encrypting:
            _convert(self._encrypt, *lists)

    def decrypt(self, first_blocks: Int64Array, lengths: Int64Array, addresses: Int64Array) -> None:
        """Decrypt runs of bytes where they lie; only one decryption is under way at a time.

        Args:
            first_blocks: number of each run's first block. [runs]
            lengths: bytes of each, which divide by 16. [runs]
            addresses: of each in memory. [runs]
        """
        with self._decrypting:
            _convert(self._decrypt, first_blocks, lengths, addresses, addresses)


class _Scratch(local):
    """A thread's memory for a piece, which stays: made anew, its pages would be too."""

    def __init__(self) -> None:
        # The library wants a block of room behind what it writes.
        self.arrays = np.empty((3, _PIECE_BLOCKS + 1, BLOCK_BYTES), dtype=np.uint8)
        self.views = [each.reshape(-1).data for each in self.arrays]
        self.addresses = [address(each) for each in self.arrays]


_SCRATCH = _Scratch()


def _convert(
    ciphers: "tuple[CipherContext, CipherContext]", first_blocks: Int64Array, lengths: Int64Array,
    sources: Int64Array, targets: Int64Array,
) -> None:  # fmt: skip
    """Both AES calls over all runs, a piece at a time; a run is read at its source."""
    number_blocks = kernel("number_blocks") or _number_blocks_twin
    mask_runs = kernel("mask_runs") or _mask_runs_twin
    given = (first_blocks, lengths, sources, targets)
    lists = [np.ascontiguousarray(each, dtype=np.int64) for each in given]
    first_at, length_at, source_at, target_at = map(address, lists)
    runs, total = len(lengths), int(lengths.sum())
    views, (numbers_at, masks_at, work_at) = _SCRATCH.views, _SCRATCH.addresses
    most = _PIECE_BLOCKS * BLOCK_BYTES
    for begin in range(0, total, most):
        size = min(most, total - begin)
        piece = (length_at, runs, begin, size)
        number_blocks(first_at, *piece, numbers_at)
        ciphers[0].update_into(views[0][:size], views[1])
        mask_runs(source_at, *piece, masks_at, work_at, 1)
        ciphers[1].update_into(views[2][:size], views[2])
        mask_runs(target_at, *piece, masks_at, work_at, 0)


def _number_blocks_twin(
    first_at: int, length_at: int, runs: int, begin: int, size: int, numbers_at: int
) -> None:
    """`penstock_number_blocks` in numpy."""
    firsts, lengths = _at(first_at, runs), _at(length_at, runs)
    ends = lengths.cumsum()
    shifts = firsts - (ends - lengths) // BLOCK_BYTES
    blocks = np.arange(begin // BLOCK_BYTES, (begin + size) // BLOCK_BYTES)
    numbers = _at(numbers_at, 2 * len(blocks)).reshape(-1, 2)
    numbers[:, 0] = blocks + shifts[np.searchsorted(ends, blocks * BLOCK_BYTES, side="right")]
    numbers[:, 1] = 0


def _mask_runs_twin(
    addresses_at: int, length_at: int, runs: int, begin: int, size: int, masks_at: int,
    work_at: int, into_work: int,
) -> None:  # fmt: skip
    """`penstock_mask_runs` in numpy."""
    addresses, lengths = _at(addresses_at, runs).tolist(), _at(length_at, runs).tolist()
    masks, work, at = bytes_at(masks_at, size), bytes_at(work_at, size), -begin
    for start, length in zip(addresses, lengths, strict=True):
        low, high = max(at, 0), min(at + length, size)
        if low < high:
            run = bytes_at(start + low - at, high - low)
            source, target = (run, work[low:high]) if into_work else (work[low:high], run)
            np.bitwise_xor(source, masks[low:high], out=target)
        at += length


def _at(where: int, count: int) -> Int64Array:
    return bytes_at(where, 8 * count).view(np.int64)


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
