"""StoredDocument and DocumentWriter on a real disk: what is kept, what is refused and how."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import (
    ConfigError,
    DocumentBusyError,
    DocumentDamagedError,
    DocumentError,
    FetchError,
    StorageError,
    StoreFullError,
)
from penstock.devices.presets import NVME
from penstock.devices.throttle import Throttle
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import (
    DocumentWriter,
    Shape,
    StoredDocument,
    is_unfinished,
    read_summary,
    real_disk,
    remove,
    size_bytes,
)
from penstock.storage.documents import document as module
from penstock.storage.documents.real_disk import RealFolder
from penstock.storage.file import KVFile
from penstock.storage.open_files import Descriptors, FileSet, wrap_descriptors
from penstock.storage.throttled_file import ThrottledFile
from penstock.storage.unit_region import UnitRegion
from penstock.testing.crash_disk import CrashDisk
from penstock.testing.document_state import read_state, state_of
from penstock.testing.faulty_file import FaultyFile

KEY = bytes(range(32))
SHAPE = Shape(layers=3, unit_bytes=5000)
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
TITLE = "The quarterly figures of a firm"


def rows(stamp: int, count: int) -> np.ndarray:
    return np.random.default_rng(stamp).integers(
        0, 256, (count, SHAPE.padded_bytes), dtype=np.uint8
    )


def append_all(writer: DocumentWriter, stamp: int, count: int) -> list[np.ndarray]:
    parts = [rows(stamp + layer, count) for layer in range(SHAPE.layers)]
    for layer, part in enumerate(parts):
        ids = writer.append(layer, part)
        assert ids.dtype == np.int64
        assert ids.tolist() == list(range(writer.first_unit, writer.first_unit + count))
    return parts


def commit(writer: DocumentWriter, **blobs: bytes) -> None:
    writer.commit(identity={"model": "m"}, about={"title": TITLE, "tokens": 7}, blobs=blobs)


def store(folder: Path, key: bytes | None = None, count: int = 10) -> list[np.ndarray]:
    with DocumentWriter.create(folder, SHAPE, key=key) as writer:
        parts = append_all(writer, 0, count)
        commit(writer, tokens=b"abc" * 600_000, empty=b"")
    return parts


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


@KEYS
def test_what_was_committed_is_there_in_every_session(key: bytes | None, tmp_path: Path) -> None:
    folder = tmp_path / "document"
    first = store(folder, key)
    with DocumentWriter.extend(folder, key=key) as writer:
        assert (writer.generation, writer.first_unit) == (1, 10)
        second = append_all(writer, 50, 4)
        writer.commit(identity={}, about={"a": [1, None]}, blobs={"i": b"x"}, keep_blobs=["tokens"])
        assert writer.written_bytes > 3 * 4 * SHAPE.padded_bytes
    with StoredDocument.open(folder, key=key) as document:
        found = state_of(document)
        assert document.generation == 2
        assert document.num_units == 14
        assert document.shape == SHAPE
        assert document.encrypted == (key is not None)
        assert document.blob_names == ("i", "tokens")
        assert 3 * 14 * 8 < document.opened_bytes < 4096
        assert str(folder) in document.description
        with pytest.raises(DocumentError, match="no blob"):
            document.blob("empty")
    for layer in range(SHAPE.layers):
        whole = np.concatenate([first[layer], second[layer]])
        assert found.units[layer] == whole.tobytes()
    assert found.blobs == {"i": b"x", "tokens": b"abc" * 600_000}
    assert (found.identity, found.about) == ({}, {"a": [1, None]})


@KEYS
def test_a_reader_goes_on_beside_commits(key: bytes | None, tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder, key)
    with StoredDocument.open(folder, key=key) as old:
        before = state_of(old)
        with DocumentWriter.extend(folder, key=key) as writer:
            for number in range(3):
                append_all(writer, number, 2)
                commit(writer, tokens=b"new")
                assert state_of(old) == before
            append_all(writer, 99, 2)  # dropped
        assert state_of(old) == before
        assert not old.verify()
    assert read_state(folder, key=key).blobs == {"tokens": b"new"}
    assert (folder / "kv-0.units").stat().st_size == 16 * SHAPE.padded_bytes
    names = {name for name in os.listdir(folder) if name.startswith(("seals", "blob"))}
    assert names == {"seals-4", "blob-4-tokens"}


def test_opening_begins_again_when_a_commit_takes_files_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, calls = tmp_path / "document", module._open_files, []
    store(folder)

    def late(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            with DocumentWriter.extend(folder) as writer:
                commit(writer, later=b"x")
        return real(*args)

    monkeypatch.setattr(module, "_open_files", late)
    assert read_state(folder).blobs == {"later": b"x"}
    assert len(calls) == 2


def test_a_writer_removes_no_document_that_had_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    with DocumentWriter.extend(folder):
        (folder / "manifest.json").rename(tmp_path / "kept")
    (tmp_path / "kept").rename(folder / "manifest.json")
    read_state(folder)


def test_modes(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(file.lstat().st_mode) for file in folder.iterdir()}
    assert modes == {0o600}


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, link = tmp_path / "document", tmp_path / "link"
    store(folder)
    link.symlink_to(folder)
    for action in (StoredDocument.open, DocumentWriter.extend, remove, read_summary, size_bytes):
        with pytest.raises(DocumentError):
            action(link)
    with pytest.raises(ConfigError):
        DocumentWriter.create(link, SHAPE)
    assert not link.is_dir() or link.is_symlink()
    for name in sorted(os.listdir(folder)):
        outside = tmp_path / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        with pytest.raises(StorageError):
            DocumentWriter.extend(folder) if name == "lock-writer" else read_state(folder)
        (folder / name).unlink()
        outside.rename(folder / name)
    read_state(folder)


def test_a_pipe_in_a_files_place_does_not_hang(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    for name in ("manifest.json", "seals-1", "kv-1.units", "lock"):
        (folder / name).rename(tmp_path / "kept")
        os.mkfifo(folder / name)
        with pytest.raises(StorageError):
            read_state(folder)
        (folder / name).unlink()
        (tmp_path / "kept").rename(folder / name)
    read_state(folder)


def test_refusals(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    with pytest.raises(DocumentError, match="no document"):
        StoredDocument.open(folder)
    with pytest.raises(ConfigError, match="above"):
        DocumentWriter.create(tmp_path / "no" / "document", SHAPE)
    for bad in ((0, 1), (1, 0), (1 << 16, 1)):
        with pytest.raises(ConfigError, match="layers"):
            Shape(*bad)
    writer = DocumentWriter.create(folder, SHAPE)
    with pytest.raises(DocumentError, match="unfinished"):
        StoredDocument.open(folder)
    with pytest.raises(DocumentBusyError):
        DocumentWriter.extend(folder)
    with pytest.raises(DocumentBusyError):
        remove(folder)
    with pytest.raises(ConfigError, match="already"):
        DocumentWriter.create(folder, SHAPE)
    assert is_unfinished(folder)
    append_all(writer, 0, 1)
    writer.append(0, rows(5, 1))
    with pytest.raises(AssertionError, match="unequal"):
        commit(writer)
    writer.close()
    writer.close()
    assert not folder.exists()
    with pytest.raises(DocumentError, match="closed"):
        writer.append(0, rows(5, 1))


def test_removal(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    assert not is_unfinished(folder)
    assert size_bytes(folder) > 3 * 10 * SHAPE.padded_bytes + 1_800_000
    with StoredDocument.open(folder), pytest.raises(DocumentBusyError, match="in use"):
        remove(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(DocumentError, match=r"notes\.txt"):
        remove(folder)
    assert not is_unfinished(folder)
    read_state(folder)
    (folder / "notes.txt").unlink()
    remove(folder)
    assert not folder.exists()
    folder.mkdir()
    assert is_unfinished(folder)
    remove(folder)
    assert not folder.exists()


@KEYS
def test_damage_names_its_units_and_verify_goes_on_behind_it(
    key: bytes | None, tmp_path: Path
) -> None:
    folder = tmp_path / "document"
    parts = store(folder, key, 700)  # several reads a layer
    for layer, unit in ((1, 3), (1, 650), (2, 0)):
        flip(folder / f"kv-{layer}.units", unit * SHAPE.padded_bytes + 4999)
    flip(folder / "blob-1-tokens", 1_700_000)
    os.truncate(folder / "kv-0.units", 699 * SHAPE.padded_bytes)
    calls: list[tuple[int, int]] = []
    with StoredDocument.open(folder, key=key) as document:
        damage = document.verify(lambda done, total: calls.append((done, total)))
        assert damage
        assert damage.units == {0: [699], 1: [3, 650], 2: [0]}
        assert damage.num_units == 4
        assert damage.blobs == ["tokens"]
        assert not damage.seals
        region, buffer = UnitRegion(document.files[1], 5000), AlignedBuffer(4, SHAPE.padded_bytes)
        assert buffer.slot_bytes == region.padded_bytes
        ticket = region.submit_read(np.array([2, 3, 4]), buffer, np.array([0, 1, 2]))
        for _ in range(2):
            with pytest.raises(DocumentDamagedError, match="layer 1") as caught:
                ticket.wait()
            assert (caught.value.layer, caught.value.units) == (1, (3,))
        assert not buffer.array[1].any()
        assert (buffer.array[[0, 2]] == parts[1][[2, 4]]).all()
    total = 3 * 700 * SHAPE.padded_bytes + 1_800_000
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert len(calls) > 8
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_file_below_may_be_wrapped(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    throttle = Throttle(NVME)

    def slow(file: KVFile) -> KVFile:
        return ThrottledFile(file, throttle)

    with StoredDocument.open(folder, wrap=slow) as document:
        assert document.files[0].simulated == NVME.name
        state_of(document)
    made: list[FaultyFile] = []

    def faulty(file: KVFile) -> KVFile:
        made.append(FaultyFile(file, failing_reads=[0]))
        return made[-1]

    with StoredDocument.open(folder, wrap=faulty) as document:
        region, buffer = UnitRegion(document.files[0], 5000), AlignedBuffer(1, SHAPE.padded_bytes)
        for match in ("on purpose", None):
            ticket = region.submit_read(np.array([2]), buffer, np.array([0]))
            if match:
                with pytest.raises(FetchError, match=match):
                    ticket.wait()
            else:
                ticket.wait()


def test_a_closed_document(tmp_path: Path) -> None:
    folder = tmp_path / "document"
    store(folder)
    before = len(os.listdir("/proc/self/fd"))
    document = StoredDocument.open(folder)
    document.close()
    document.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(DocumentError, match="closed"):
        document.blob("tokens")
    with pytest.raises(FetchError, match="closed"):
        document.verify()
    dropped = StoredDocument.open(folder)
    del dropped
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_takes_no_files_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "document"
    store(folder)

    def refuse(opened: Descriptors) -> FileSet:
        if not opened.direct:
            return wrap_descriptors(opened)
        for number in opened.numbers:
            os.close(number)
        raise StorageError("read-only")

    monkeypatch.setattr(real_disk, "wrap_descriptors", refuse)
    with StoredDocument.open(folder) as document:
        assert not document.is_direct
        assert not document.verify()


def test_a_full_disk_can_be_tried_again() -> None:
    disk, folder = CrashDisk(), Path("/disk/document")
    full = OSError(errno.ENOSPC, "no space left")
    with DocumentWriter.create(folder, SHAPE, disk=disk) as writer:
        disk.failures = {disk.num_operations + 1: full}
        with pytest.raises(StoreFullError, match="append"):
            writer.append(0, rows(0, 2))
        parts = append_all(writer, 0, 2)
        for later in (6, 8, 10, 12):
            disk.failures = {disk.num_operations + later: full}
            with pytest.raises(StoreFullError, match="commit"):
                commit(writer, tokens=b"abc")
            if writer._has_failed:
                break
            disk.failures = {}
    assert disk.open_files == 0
    with DocumentWriter.create(folder, SHAPE, disk=disk) as writer:
        append_all(writer, 0, 2)
        disk.failures = {disk.num_operations + 5: full}  # the blob's first byte
        with pytest.raises(StoreFullError, match="commit"):
            commit(writer, tokens=b"abc")
        commit(writer, tokens=b"abc")
    assert read_state(folder, disk=disk).units[1] == parts[1].tobytes()


def test_bytes_that_a_failed_sync_has_lost_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "document", os.fsync
    store(folder)
    before = read_state(folder)
    monkeypatch.setattr(real_disk, "_DIRTY_BYTES_MAX", SHAPE.padded_bytes)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with DocumentWriter.extend(folder) as writer:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreFullError):
            writer.append(0, rows(0, 4))
        monkeypatch.setattr(os, "fsync", real)
        with pytest.raises(StoreFullError):
            append_all(writer, 0, 4)
    assert read_state(folder) == before


def test_names_of_a_real_folder_have_no_slashes(tmp_path: Path) -> None:
    folder = RealFolder(tmp_path)
    with pytest.raises(AssertionError):
        folder.open("../etc")
    folder.close()
