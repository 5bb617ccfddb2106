"""BlockCipher: XTS as the library has it, block by block, in any order."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.native import compiled
from penstock.kernels.native.compiled import address
from penstock.storage import block_cipher
from penstock.storage.block_cipher import BLOCK_BYTES, BlockCipher

KEY = bytes(range(32))


def text(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("first", [0, 1, 77, 2**40 + 3])
def test_each_block_is_a_data_unit_of_the_librarys_xts(first: int) -> None:
    data = text(5 * BLOCK_BYTES)
    out = np.empty_like(data)
    BlockCipher(KEY).encrypt(first, data, out)
    for i in range(5):
        number = (first + i).to_bytes(16, "little")
        xts = Cipher(algorithms.AES(KEY), modes.XTS(number)).encryptor()
        part = slice(i * BLOCK_BYTES, (i + 1) * BLOCK_BYTES)
        assert xts.update(data[part].tobytes()) == out[part].tobytes()


@pytest.mark.parametrize("level", ["auto", "off"])
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_runs_come_back_however_they_are_cut(
    level: str, runs: list[tuple[int, int]], piece: int
) -> None:
    cipher = BlockCipher()
    plain = [text(count * BLOCK_BYTES, seed) for seed, (_, count) in enumerate(runs)]
    stored = [np.empty_like(each) for each in plain]
    for (first, _), data, out in zip(runs, plain, stored, strict=True):
        cipher.encrypt(first, data, out)
    former, block_cipher._PIECE_BLOCKS = block_cipher._PIECE_BLOCKS, piece
    firsts = np.array([first for first, _ in runs])
    lengths = np.array([len(each) for each in stored])
    allowed = compiled.limited_to()
    compiled.limit(level)
    try:
        cipher.decrypt(firsts, lengths, np.array([address(each) for each in stored]))
    finally:
        block_cipher._PIECE_BLOCKS = former
        compiled.limit(allowed)
    assert all(map(np.array_equal, plain, stored))


def test_keys_and_places_differ() -> None:
    data = np.zeros(4 * BLOCK_BYTES, dtype=np.uint8)
    out = np.empty((2, len(data)), dtype=np.uint8)
    for each in out:
        BlockCipher().encrypt(0, data, each)
    assert len({block.tobytes() for block in out.reshape(-1, BLOCK_BYTES)}) == 8


def test_it_is_slow_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    assert not block_cipher.is_fast()
