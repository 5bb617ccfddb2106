"""Documents survive crashes and full disks: seeded lives, and a machine against a model."""

import errno
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import (
    DocumentBusyError,
    DocumentError,
    PenstockError,
    StorageError,
    StoreFullError,
)
from penstock.storage.documents import (
    DocumentWriter,
    Shape,
    StoredDocument,
    is_unfinished,
    remove,
)
from penstock.storage.documents.disk import DiskFile, Folder
from penstock.testing.crash_disk import CrashDisk, PowerLoss
from penstock.testing.document_state import DocumentState, read_state, state_of

FOLDER = Path("/disk/document")
KEY = bytes(range(32))
SHAPE = Shape(layers=2, unit_bytes=3000)
NUM_LIVES = 60
SHORT_LIFE_SEED = 7
"""Of two sessions with three commits."""
GONE, UNFINISHED = "gone", "unfinished"
Outcome = DocumentState | str


def rows(stamp: int, count: int) -> np.ndarray:
    return np.random.default_rng(stamp).integers(
        0, 256, (count, SHAPE.padded_bytes), dtype=np.uint8
    )


def outcome(disk: CrashDisk, key: bytes | None) -> Outcome:
    """What is on the disk; any error but those of no or an unfinished document is a failure."""
    if FOLDER.name not in disk.folders():
        return GONE
    if is_unfinished(FOLDER, disk=disk):
        with pytest.raises(DocumentError):
            read_state(FOLDER, key=key, disk=disk)
        return UNFINISHED
    return read_state(FOLDER, key=key, disk=disk)


class Life:
    """Makes, extends and removes one document, and knows what a crash may leave of it."""

    def __init__(self, disk: CrashDisk, chance: random.Random, key: bytes | None) -> None:
        self.disk = disk
        self.chance = chance
        self.key = key
        self.now: Outcome = GONE
        self.allowed: list[Outcome] = [GONE]
        self.num_commits = 0

    def live(self) -> None:
        """One session: whoever reads `allowed` at any moment knows what may be found then."""
        if isinstance(self.now, DocumentState):
            if self.chance.random() < 0.15:
                self.remove()
                return
            with DocumentWriter.extend(FOLDER, key=self.key, disk=self.disk) as writer:
                self.write(writer)
        elif self.now == UNFINISHED:
            self.remove()
        else:
            self.allowed = [*self.allowed, GONE, UNFINISHED]
            with DocumentWriter.create(FOLDER, SHAPE, key=self.key, disk=self.disk) as writer:
                self.write(writer)
            if not isinstance(self.now, DocumentState) and not self.disk.failures:
                self.settle(GONE)

    def write(self, writer: DocumentWriter) -> None:
        for _ in range(self.chance.randrange(4)):
            former = self.now if isinstance(self.now, DocumentState) else None
            units = []
            count = self.chance.randrange(3)
            for layer in range(SHAPE.layers):
                data = rows(self.chance.randrange(1 << 30), count)
                for part in (data[:1], data[1:]):
                    again(partial(writer.append, layer, part))
                units.append((former.units[layer] if former else b"") + data.tobytes())
            kept = {"index": former.blobs["index"]} if former and "index" in former.blobs else {}
            if self.chance.random() < 0.3:
                kept = {}
            fresh = {"tokens": self.chance.randbytes(self.chance.randrange(1500))}
            if not kept and self.chance.random() < 0.7:
                fresh["index"] = self.chance.randbytes(700)
            about = {"commit": self.chance.randrange(1 << 30)}
            new = DocumentState(tuple(units), fresh | kept, about, {"model": "m"})
            if self.chance.random() < 0.1:
                return  # dropped
            self.allowed = [*self.allowed, new]
            again(
                partial(
                    writer.commit, identity={"model": "m"}, about=about, blobs=fresh,
                    keep_blobs=list(kept),
                )
            )  # fmt: skip
            self.num_commits += 1
            self.settle(new)

    def remove(self) -> None:
        self.allowed = [*self.allowed, UNFINISHED, GONE]
        remove(FOLDER, disk=self.disk)
        self.settle(GONE)

    def settle(self, now: Outcome) -> None:
        self.now, self.allowed = now, [now]


def again(action: Callable[[], object]) -> None:
    """Once more where the disk was full, unless the writer has had to give up."""
    try:
        action()
    except StoreFullError as full:
        try:
            action()
        except DocumentError:
            raise full from None


def plan(disk: CrashDisk, chance: random.Random, within: int, failure: BaseException) -> None:
    disk.failures = {disk.num_operations + chance.randrange(within): failure}


def die_once(life: Life, crash_seed: int) -> bool:
    """Live until a crash; returns whether it came. What is found must be allowed."""
    plan(life.disk, life.chance, 120, PowerLoss())
    died = False
    try:
        for _ in range(4):
            life.live()
    except PowerLoss:
        died = True
    life.disk = life.disk.kill() if life.chance.random() < 0.3 else life.disk.crash(crash_seed)
    found = outcome(life.disk, life.key)
    assert found in life.allowed
    life.settle(found)
    return died


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_crashes_leave_a_commit_that_is_not_older_than_the_last(key: bytes | None) -> None:
    num_deaths = num_commits = 0
    for seed in range(NUM_LIVES):
        life = Life(CrashDisk(), random.Random(seed), key)
        for crash in range(3):
            num_deaths += die_once(life, 10 * seed + crash)
        num_commits += life.num_commits
    assert num_deaths > 2 * NUM_LIVES
    assert num_commits > NUM_LIVES


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_failing_operations_are_typed_errors_and_cost_nothing_committed(key: bytes | None) -> None:
    num_failures = 0
    for seed in range(NUM_LIVES):
        chance = random.Random(seed)
        life = Life(CrashDisk(), chance, key)
        for session in range(4):
            number = chance.choice([errno.ENOSPC, errno.EIO])
            plan(life.disk, chance, 60, OSError(number, os.strerror(number)))
            error: StorageError | None = None
            try:
                life.live()
            except StorageError as raised:
                error = raised
                num_failures += 1
            assert error is None or isinstance(error, StoreFullError) == (number == errno.ENOSPC)
            life.disk.failures = {}
            assert life.disk.open_files == 0
            found = outcome(life.disk, key)
            assert found in life.allowed
            assert outcome(life.disk.crash(10 * seed + session), key) in life.allowed
            life.now, life.allowed = found, [*life.allowed, found]
    assert num_failures > NUM_LIVES


def short_life(life: Life) -> None:
    """Two sessions, then removal; the same operations each time."""
    life.live()
    life.live()
    life.remove()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_crash_at_every_operation_of_a_life(key: bytes | None) -> None:
    seed = SHORT_LIFE_SEED
    whole = Life(CrashDisk(), random.Random(seed), key)
    short_life(whole)
    assert whole.num_commits == 3
    for number in range(whole.disk.num_operations):
        life = Life(CrashDisk(), random.Random(seed), key)
        life.disk.failures = {number: PowerLoss()}
        with pytest.raises(PowerLoss):
            short_life(life)
        for crash in range(6):
            disk = life.disk.crash(6 * number + crash) if crash else life.disk.kill()
            assert outcome(disk, key) in life.allowed


class ForgetfulDisk(CrashDisk):
    """Under a store that forgets to sync folders: the calls do nothing."""

    def make_folder(self, path: Path) -> Folder:
        made = super().make_folder(path)
        made.sync = lambda: None  # type: ignore[method-assign]
        return made

    def sync_parent(self, path: Path) -> None:
        """Nothing."""


def test_the_lives_would_find_a_store_that_does_not_sync_folders() -> None:
    def found_one() -> bool:
        for seed in range(20):
            life = Life(ForgetfulDisk(), random.Random(seed), None)
            life.live()
            if outcome(life.disk.crash(seed), None) not in life.allowed:
                return True
        return False

    assert found_one()


def test_the_lives_would_find_a_store_that_does_not_sync_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = CrashDisk()
    with DocumentWriter.create(FOLDER, SHAPE, disk=disk) as writer:
        kind: type[DiskFile] = type(disk.open_folder(FOLDER).open("lock"))
        monkeypatch.setattr(kind, "sync", lambda file: None)
        for layer in range(SHAPE.layers):
            writer.append(layer, rows(layer, 4))
        writer.commit(identity={}, about={}, blobs={})
    broken = 0
    for seed in range(20):
        try:
            outcome(disk.crash(seed), None)
        except PenstockError:
            broken += 1
    assert broken > 5


class DocumentMachine(RuleBasedStateMachine):
    """A writer, readers of old and new generations, crashes and full disks; model: a state."""

    key: bytes | None = KEY

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashDisk()
        self.committed: DocumentState | None = None
        self.writer: DocumentWriter | None = None
        self.appended: list[bytes] = []
        self.readers: list[tuple[StoredDocument, DocumentState]] = []
        self.stamp = 0

    @precondition(lambda self: self.writer is None)
    @rule()
    def write(self) -> None:
        if FOLDER.name not in self.disk.folders():
            self.writer = DocumentWriter.create(FOLDER, SHAPE, key=self.key, disk=self.disk)
        elif self.committed is not None:
            self.writer = DocumentWriter.extend(FOLDER, key=self.key, disk=self.disk)
        self.appended = [b""] * SHAPE.layers

    @precondition(lambda self: self.writer is not None)
    @rule(count=st.integers(0, 2), full=st.booleans())
    def append(self, count: int, full: bool) -> None:
        assert self.writer is not None
        for layer in range(SHAPE.layers):
            self.stamp += 1
            data = rows(self.stamp, count)
            if full and count:
                error = OSError(errno.ENOSPC, "full")
                self.disk.failures = {self.disk.num_operations + (self.stamp % 2): error}
                try:
                    self.writer.append(layer, data)
                except StoreFullError:
                    pass
                else:
                    self.appended[layer] += data.tobytes()
                    continue
                finally:
                    self.disk.failures = {}
            self.writer.append(layer, data)
            self.appended[layer] += data.tobytes()

    @precondition(lambda self: self.writer is not None)
    @rule(keep=st.booleans(), size=st.integers(0, 3000))
    def commit(self, keep: bool, size: int) -> None:
        assert self.writer is not None
        self.stamp += 1
        former = self.committed
        kept = dict(former.blobs) if former and keep else {}
        fresh = {f"b{self.stamp}": random.Random(self.stamp).randbytes(size)}
        about = {"stamp": self.stamp}
        self.writer.commit(identity={}, about=about, blobs=fresh, keep_blobs=list(kept))
        before = former.units if former else (b"",) * SHAPE.layers
        units = tuple(a + b for a, b in zip(before, self.appended, strict=True))
        self.committed = DocumentState(units, kept | fresh, about, {})
        self.appended = [b""] * SHAPE.layers

    @precondition(lambda self: self.writer is not None)
    @rule()
    def close_writer(self) -> None:
        assert self.writer is not None
        self.writer.close()
        self.writer = None
        assert (FOLDER.name in self.disk.folders()) == (self.committed is not None)

    @precondition(lambda self: self.committed is not None and len(self.readers) < 3)
    @rule()
    def open_reader(self) -> None:
        assert self.committed is not None
        reader = StoredDocument.open(FOLDER, key=self.key, disk=self.disk)
        self.readers.append((reader, self.committed))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 2))
    def close_reader(self, which: int) -> None:
        self.readers.pop(which % len(self.readers))[0].close()

    @precondition(lambda self: FOLDER.name in self.disk.folders())
    @rule()
    def remove(self) -> None:
        if self.writer or self.readers:
            with pytest.raises(DocumentBusyError):
                remove(FOLDER, disk=self.disk)
        else:
            remove(FOLDER, disk=self.disk)
            self.committed = None

    @precondition(lambda self: self.writer is not None and self.committed is not None)
    @rule()
    def second_writer(self) -> None:
        with pytest.raises(DocumentBusyError):
            DocumentWriter.extend(FOLDER, key=self.key, disk=self.disk)

    @rule(seed=st.integers(0, 1 << 20), power=st.booleans())
    def crash(self, seed: int, power: bool) -> None:
        self.disk = self.disk.crash(seed) if power else self.disk.kill()
        self.readers, self.writer = [], None
        found = outcome(self.disk, self.key)
        if self.committed is None:
            assert found in (GONE, UNFINISHED)
            if found == UNFINISHED:
                remove(FOLDER, disk=self.disk)
        else:
            assert found == self.committed

    @invariant()
    def readers_see_their_generation(self) -> None:
        for reader, expected in self.readers:
            assert state_of(reader) == expected
        if not self.readers and not self.writer:
            assert self.disk.open_files == 0

    def teardown(self) -> None:
        for reader, _ in self.readers:
            reader.close()


class PlainMachine(DocumentMachine):
    key = None


@pytest.mark.parametrize("machine", [DocumentMachine, PlainMachine])
def test_any_order_of_events(machine: type[DocumentMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
        ),
    )
