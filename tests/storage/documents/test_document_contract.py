"""The files of an open document keep the contract of every KVFile, writing apart."""

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import DocumentDamagedError, FetchError, StorageError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.file import KVFile
from penstock.storage.unit_region import UnitRegion

BLOCK = 4096
NUM_BLOCKS = 64


def _contract() -> Any:
    path = Path(__file__).parents[1] / "test_kv_file_contract.py"
    spec = importlib.util.spec_from_file_location("kv_file_contract", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TestKVFile


BASE: Any = _contract()
BLOCKS = np.random.default_rng(1).integers(1, 256, (NUM_BLOCKS, BLOCK), np.uint8)


@pytest.fixture(params=["plain", "encrypted"])
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoredDocument]:
    key = bytes(32) if request.param == "encrypted" else None
    with DocumentWriter.create(tmp_path / "d", Shape(1, BLOCK), key=key) as writer:
        writer.append(0, BLOCKS)
        writer.commit(identity={}, about={}, blobs={})
    with StoredDocument.open(tmp_path / "d", key=key) as opened:
        yield opened


@pytest.fixture
def file(document: StoredDocument) -> KVFile:
    return document.files[0]


class TestStoredKVFile(BASE):  # type: ignore[misc]
    """Its tests, over a file that is full already and takes no more."""

    def fill(self, file: KVFile, blocks: int) -> np.ndarray:
        return BLOCKS[:blocks]

    test_rewriting_is_seen_by_the_next_read = None
    test_reserved_bytes_can_be_read_before_they_are_written = None
    test_reserving_keeps_the_bytes_and_never_shrinks = None

    def test_it_is_read_only(self, file: KVFile) -> None:
        with pytest.raises(StorageError, match="read-only"):
            file.write_at(0, BLOCKS[0])
        with pytest.raises(StorageError, match="read-only"):
            file.reserve(1)

    def test_alignment(self, file: KVFile) -> None:
        buffer = AlignedBuffer(2, BLOCK)
        for offset, length in ((100, BLOCK), (0, 100)):
            place = np.array([buffer.address])
            with pytest.raises(AssertionError, match="unit"):
                file.submit_reads(np.array([offset]), np.array([length]), place, buffer.array)

    def test_the_way_below_is_told(self, document: StoredDocument, file: KVFile) -> None:
        assert file.sector_bytes == BLOCK
        assert file.is_direct == document.is_direct == ("direct I/O" in document.description)


def test_many_threads_wait_for_one_ticket(document: StoredDocument) -> None:
    region = UnitRegion(document.files[0], BLOCK)
    ids = np.arange(NUM_BLOCKS)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            buffer = AlignedBuffer(NUM_BLOCKS, BLOCK)
            ticket = region.submit_read(ids, buffer, ids)
            for waiting in [pool.submit(ticket.wait) for _ in range(4)]:
                waiting.result(10)
            assert (buffer.array == BLOCKS).all()  # decrypted in place, once


def test_closing_in_the_middle_is_no_damage(document: StoredDocument) -> None:
    region, buffer = UnitRegion(document.files[0], BLOCK), AlignedBuffer(NUM_BLOCKS, BLOCK)
    ids = np.arange(NUM_BLOCKS)
    ticket = region.submit_read(ids, buffer, ids)
    document.close()
    failure = None
    try:
        ticket.wait()
    except FetchError as error:
        failure = error
    if failure is None:
        assert (buffer.array == BLOCKS).all()
    assert not isinstance(failure, DocumentDamagedError)
