"""Whatever happens to a document's files: reads bring the right bytes or a typed error."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DocumentDamagedError, DocumentError, FetchError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.unit_region import UnitRegion
from penstock.testing.crash_disk import CrashDisk
from penstock.testing.document_state import DocumentState, read_state

FOLDER = Path("/disk/document")
KEY = bytes(range(32))
SHAPE = Shape(layers=2, unit_bytes=4096)
NUM_UNITS = 3
NUM_CORRUPTIONS = 300
Files = dict[str, bytes]


def store(seed: int, key: bytes | None, commits: int) -> tuple[list[Files], list[DocumentState]]:
    """The files and the content of a document after each of its commits."""
    chance = np.random.default_rng(seed)
    disk, files, states = CrashDisk(), [], []
    with DocumentWriter.create(FOLDER, SHAPE, key=key, disk=disk) as writer:
        for commit in range(commits):
            for layer in range(SHAPE.layers):
                shape = (NUM_UNITS, SHAPE.padded_bytes)
                writer.append(layer, chance.integers(0, 256, shape, dtype=np.uint8))
            blobs = {name: chance.bytes(500) for name in ("tokens", "index")}
            writer.commit(identity={"model": "m"}, about={"title": f"t{commit}"}, blobs=blobs)
            states.append(read_state(FOLDER, key=key, disk=disk))
            files.append(disk.contents(FOLDER.name))
    return files, states


class Vandal:
    """Changes a document's files in one of the ways that files change."""

    def __init__(self, seed: int, key: bytes | None) -> None:
        self.chance = random.Random(seed)
        generations, self.states = store(1, key, 2)
        self.former, self.files = generations
        [self.other], _ = store(2, key, 1)
        self.ways = (
            self.flip, self.flip, self.cut, self.extend, self.swap_units, self.swap_files,
            self.stale_file, self.foreign_file, self.delete, self.zero_sector,
        )  # fmt: skip

    def corrupt(self) -> Files:
        files = dict(self.files)
        for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
            self.chance.choice(self.ways)(files)
        return files

    def pick(self, files: Files, pattern: str = "") -> str:
        return self.chance.choice([name for name in sorted(files) if pattern in name] or ["lock"])

    def flip(self, files: Files) -> None:
        name = self.pick(files)
        content = bytearray(files.get(name, b""))
        if content:
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        files[name] = bytes(content)

    def cut(self, files: Files) -> None:
        name = self.pick(files)
        files[name] = files[name][: self.chance.randrange(len(files[name]) + 1)]

    def extend(self, files: Files) -> None:
        files[self.pick(files)] += self.chance.randbytes(self.chance.choice([1, 8, 28, 4096]))

    def swap_units(self, files: Files) -> None:
        ends = [(self.pick(files, ".units"), self.chance.randrange(2 * NUM_UNITS)) for _ in "ab"]
        rows = []
        for name, unit in ends:
            content = files.get(name, b"")
            rows.append(content[unit * SHAPE.padded_bytes : (unit + 1) * SHAPE.padded_bytes])
        for (name, unit), row in zip(ends, reversed(rows), strict=True):
            content, begin = files.get(name, b""), unit * SHAPE.padded_bytes
            files[name] = content[:begin] + row + content[begin + SHAPE.padded_bytes :]

    def swap_files(self, files: Files) -> None:
        one, two = self.pick(files), self.pick(files)
        files[one], files[two] = files[two], files[one]

    def stale_file(self, files: Files) -> None:
        name = self.pick(self.former)
        files[name] = self.former[name]

    def foreign_file(self, files: Files) -> None:
        name = self.pick(self.other)
        files[name.replace("-1", "-2")] = self.other[name]
        files[name] = self.other[name]

    def delete(self, files: Files) -> None:
        files.pop(self.pick(files))

    def zero_sector(self, files: Files) -> None:
        name = self.pick(files, ".units")
        begin = 512 * self.chance.randrange(16 * NUM_UNITS)
        content = files.get(name, b"")
        files[name] = (
            content[:begin] + bytes(len(content[begin : begin + 512])) + content[begin + 512 :]
        )


def read_some(action: Callable[[], bytes], right: bytes) -> bool:
    """Whether it was damaged; what is read must be right."""
    try:
        found = action()
    except DocumentDamagedError:
        return True
    assert found == right
    return False


def damaged_parts(document: StoredDocument, right: DocumentState) -> set[object]:
    """Units and blobs that cannot be read; the others are right, alone and in one batch."""
    padded_bytes, damaged = SHAPE.padded_bytes, set[object]()
    buffer = AlignedBuffer(document.num_units, padded_bytes)
    ids = np.arange(document.num_units)
    for layer, file in enumerate(document.files):
        region = UnitRegion(file, SHAPE.unit_bytes)

        def read(unit: int, region: UnitRegion = region) -> bytes:
            region.submit_read(ids[unit : unit + 1], buffer, ids[:1]).wait()
            return bytes(buffer.array[0])

        for unit in range(document.num_units):
            place = slice(unit * padded_bytes, (unit + 1) * padded_bytes)
            if read_some(partial(read, unit), right.units[layer][place]):
                damaged.add((layer, unit))
        wrong: tuple[int, ...] = ()
        try:
            region.submit_read(ids, buffer, ids).wait()
        except DocumentDamagedError as error:
            wrong = error.units if error.layer == layer else (-1,)
        else:
            assert buffer.array.tobytes() == right.units[layer]
        assert [(layer, unit) in damaged for unit in ids.tolist()] == [u in wrong for u in ids]
    for name in document.blob_names:
        if read_some(partial(document.blob, name), right.blobs[name]):
            damaged.add(name)
    return damaged


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_corruptions(key: bytes | None) -> None:
    vandal = Vandal(3, key)
    num_refused = num_damaged = num_whole = 0
    for _ in range(NUM_CORRUPTIONS):
        disk = CrashDisk()
        disk.put(FOLDER.name, vandal.corrupt())
        try:
            document = StoredDocument.open(FOLDER, key=key, disk=disk)
        except (DocumentError, DocumentDamagedError):
            num_refused += 1
            continue
        with document:
            right = vandal.states[document.generation - 1]
            assert document.about == right.about
            damaged = damaged_parts(document, right)
            report = document.verify()
            assert {(la, u) for la, units in report.units.items() for u in units} | set(
                report.blobs
            ) == damaged
            assert not report.seals
            num_damaged += bool(damaged)
            num_whole += not damaged
    assert num_refused > NUM_CORRUPTIONS // 4
    assert num_damaged > NUM_CORRUPTIONS // 4
    assert num_whole > 0  # changes of locks, and behind the committed end


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_an_extending_writer_refuses_or_keeps_what_is_right(key: bytes | None) -> None:
    vandal = Vandal(4, key)
    num_extended = 0
    for _ in range(NUM_CORRUPTIONS // 6):
        disk = CrashDisk()
        disk.put(FOLDER.name, vandal.corrupt())
        try:
            with DocumentWriter.extend(FOLDER, key=key, disk=disk) as writer:
                fresh = np.full((1, SHAPE.padded_bytes), 7, dtype=np.uint8)
                for layer in range(SHAPE.layers):
                    [added] = writer.append(layer, fresh)
                right = vandal.states[writer.generation - 1]
                kept = ["tokens", "index"]
                writer.commit(identity={}, about={}, blobs={}, keep_blobs=kept)
        except (DocumentError, DocumentDamagedError):
            continue
        with StoredDocument.open(FOLDER, key=key, disk=disk) as document:
            units = tuple(layer + fresh.tobytes() for layer in right.units)
            damaged = damaged_parts(document, right._replace(units=units))
            assert not any((layer, int(added)) in damaged for layer in range(SHAPE.layers))
            num_extended += 1
    assert num_extended > 20


def test_every_flipped_bit_of_an_encrypted_document_is_an_error() -> None:
    [files], [right] = store(5, KEY, 1)
    chance = random.Random(6)
    for name, content in files.items():
        for place in chance.sample(range(len(content)), min(len(content), 60)):
            changed = bytearray(content)
            changed[place] ^= 1 << chance.randrange(8)
            disk = CrashDisk()
            disk.put(FOLDER.name, files | {name: bytes(changed)})
            with pytest.raises((DocumentError, DocumentDamagedError)):
                read_state(FOLDER, key=KEY, disk=disk)
    disk = CrashDisk()
    disk.put(FOLDER.name, files)
    assert read_state(FOLDER, key=KEY, disk=disk) == right


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_damaged_seals_are_told_before_a_unit_is_blamed(key: bytes | None) -> None:
    [files], _ = store(8, key, 1)
    seals = bytearray(files["seals-1"])
    seals[9] ^= 1
    disk = CrashDisk()
    disk.put(FOLDER.name, files | {"seals-1": bytes(seals)})
    with pytest.raises(DocumentDamagedError, match="seals") as caught:
        StoredDocument.open(FOLDER, key=key, disk=disk)
    assert caught.value.what == "seals"
    assert disk.open_files == 0


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_file_cut_while_it_is_read_is_an_error(key: bytes | None) -> None:
    [files], [right] = store(7, key, 1)
    disk = CrashDisk()
    disk.put(FOLDER.name, files)
    with StoredDocument.open(FOLDER, key=key, disk=disk) as document:
        disk.open_folder(FOLDER).open("kv-1.units", writable=True).truncate(SHAPE.padded_bytes)
        region, buffer = UnitRegion(document.files[1], 4096), AlignedBuffer(2, SHAPE.padded_bytes)
        with pytest.raises(FetchError):
            region.submit_read(np.array([0, 2]), buffer, np.array([0, 1])).wait()
        assert document.verify().units == {1: [1, 2]}
        assert right.blobs["index"] == document.blob("index")
