"""MemoryFile: the writer's thread writes while the caller's makes room."""

import threading
from typing import Any

import numpy as np
import pytest

from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.memory_file import MemoryFile

BLOCK = 4096


def test_what_is_written_while_the_file_grows_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    file = MemoryFile()
    file.reserve(BLOCK)
    writer = threading.Thread(target=lambda: file.write_at(0, np.full(BLOCK, 7, dtype=np.uint8)))

    class Grown(np.ndarray):
        def __setitem__(self, where: Any, what: Any) -> None:
            super().__setitem__(where, what)
            if not writer.ident:  # the old bytes are copied: now the other thread comes
                writer.start()
                writer.join(timeout=0.2)

    def zeros(*size: Any, **options: Any) -> Any:
        return np.ndarray.__new__(np.ndarray, *size, **options).view(Grown)

    with monkeypatch.context() as patch:
        patch.setattr("penstock.storage.memory_file.np.zeros", zeros)
        file.reserve(2 * BLOCK)
    writer.join()
    found = AlignedBuffer(1, BLOCK)
    offset, length, to = np.array([[0], [BLOCK], [found.address]], dtype=np.int64)
    file.submit_reads(offset, length, to, found.array).wait()
    assert (found.array == 7).all()
    file.close()
