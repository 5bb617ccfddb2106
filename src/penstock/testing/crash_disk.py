"""CrashDisk: a Disk in memory that loses power, is killed or fails at a chosen operation."""

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from penstock.storage.documents.disk import Disk, DiskFile, Folder
from penstock.storage.documents.pread_file import PreadFile
from penstock.storage.file import KVFile
from penstock.storage.open_files import FileSet

_SECTOR_BYTES = 512


class PowerLoss(BaseException):
    """The process is gone: no code of it may run on, not even what cleans up."""


class _File:
    """An inode: what was synced, what was written since, and who has locked it."""

    def __init__(self, content: bytes = b"") -> None:
        self.synced = bytes(content)
        self.content = bytearray(content)
        self.changes: list[tuple[int, bytes | None]] = []  # (offset, data), or (length, None)
        self.holders = 0
        self.is_exclusive = False

    def change(self, offset: int, data: bytes | None) -> None:
        self.changes.append((offset, data))
        _apply(self.content, offset, data)

    def sync(self) -> None:
        synced = bytearray(self.synced)
        for offset, data in self.changes:
            _apply(synced, offset, data)
        self.synced = bytes(synced)
        self.changes.clear()

    def lose(self) -> None:
        """A sync failed: readers still see the bytes, and no later sync will write them."""
        self.changes.clear()

    def after_power_loss(self, chance: random.Random) -> bytes:
        """What the device holds: of each unsynced sector, any of its writes may be missing."""
        survives = chance.choice((0.0, 0.5, 0.9, 1.0))
        content = bytearray(self.synced)
        kept: list[tuple[int, bytes | None]] = []
        for offset, data in self.changes:
            if data is None:
                kept.append((offset, data))
                continue
            end = offset + len(data)
            begin = offset
            while begin < end:
                cut = min(end, (begin // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
                kept.append((begin, data[begin - offset : cut - offset]))
                begin = cut
        kept = [change for change in kept if chance.random() < survives]
        if chance.random() < 0.3:
            chance.shuffle(kept)
        for offset, data in kept:
            _apply(content, offset, data)
        return bytes(content)


class _Directory:
    """Names, what of them was synced, and what changed since."""

    def __init__(self) -> None:
        self.synced: dict[str, _File | _Directory] = {}
        self.entries: dict[str, _File | _Directory] = {}
        self.changes: list[tuple[str | None, str | None, _File | _Directory]] = []

    def change(self, old: str | None, new: str | None, node: "_File | _Directory") -> None:
        """Take the name `old` away and give `new`, in one step."""
        self.changes.append((old, new, node))
        _rename(self.entries, old, new, node)

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.changes.clear()

    def after_power_loss(self, chance: random.Random) -> "dict[str, _File | _Directory]":
        survives = chance.choice((0.0, 0.5, 0.9, 1.0))
        entries = dict(self.synced)
        for change in self.changes:
            if chance.random() < survives:
                _rename(entries, *change)
        return entries


class CrashDisk(Disk):
    """One folder of folders of files. Locks work within the process.

    Attributes:
        num_operations: calls so far, of the disk, its folders and files; closing does not count
        failures: number of a call -> the exception that it raises instead of doing anything (a
            write may be done in part, a file's sync loses what it had to write); a PowerLoss
            ends this disk for good
        open_files: files and folders that were opened and not closed
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.failures: dict[int, BaseException] = {}
        self.open_files = 0
        self._root = _Directory()
        self._is_dead = False
        self._chance = random.Random(0)

    def crash(self, seed: int) -> "CrashDisk":
        """The disk after a power loss: what was not synced is there in part, in any order."""
        chance = random.Random(seed)
        after = CrashDisk()
        for name, folder in self._root.after_power_loss(chance).items():
            assert isinstance(folder, _Directory)
            after.put(name, {
                below: file.after_power_loss(chance)
                for below, file in folder.after_power_loss(chance).items()
                if isinstance(file, _File)
            })  # fmt: skip
        return after

    def kill(self) -> "CrashDisk":
        """The disk after the process was killed: everything that it issued is there."""
        after = CrashDisk()
        for name in self._root.entries:
            after.put(name, self.contents(name))
        return after

    def put(self, folder: str, files: dict[str, bytes]) -> None:
        """Make a folder with these files, synced."""
        made = _Directory()
        for name, content in files.items():
            made.entries[name] = _File(content)
        made.sync()
        self._root.entries[folder] = made
        self._root.sync()

    def contents(self, folder: str) -> dict[str, bytes]:
        """The files of a folder, as a running process sees them."""
        found = self._root.entries[folder]
        assert isinstance(found, _Directory)
        return {
            name: bytes(file.content)
            for name, file in found.entries.items()
            if isinstance(file, _File)
        }

    def folders(self) -> list[str]:
        """Names of the folders."""
        return sorted(self._root.entries)

    @override
    def make_folder(self, path: Path) -> Folder:
        """Make a folder."""
        self.count()
        if path.name in self._root.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        made = _Directory()
        self._root.change(None, path.name, made)
        return _CrashFolder(self, made)

    @override
    def open_folder(self, path: Path) -> Folder:
        """Open a folder."""
        self.count()
        found = self._root.entries.get(path.name)
        if not isinstance(found, _Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return _CrashFolder(self, found)

    @override
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        self.count()
        found = self._root.entries[path.name]
        assert isinstance(found, _Directory)
        if found.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._root.change(path.name, None, found)

    @override
    def sync_parent(self, path: Path) -> None:
        """Sync the folder of folders."""
        self.count()
        self._root.sync()

    def count(self, partly: Callable[[float], None] | None = None) -> None:
        """One more call; raises what was planned for it.

        Args:
            partly: does a part of the call's work, 0 to 1, before it fails.
        """
        number = self.num_operations
        self.num_operations += 1
        if self._is_dead:
            raise PowerLoss
        planned = self.failures.get(number)
        if planned is not None:
            if partly is not None:
                partly(self._chance.random())
            self._is_dead = isinstance(planned, PowerLoss)
            raise planned


class _CrashFolder(Folder):
    def __init__(self, disk: CrashDisk, directory: _Directory) -> None:
        self._disk = disk
        self._directory = directory
        self._is_open = True
        disk.open_files += 1

    @override
    def create(self, name: str) -> DiskFile:
        self._disk.count()
        if name in self._directory.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        made = _File()
        self._directory.change(None, name, made)
        return _CrashFile(self._disk, made, writable=True)

    @override
    def open(self, name: str, *, writable: bool = False) -> DiskFile:
        self._disk.count()
        return _CrashFile(self._disk, self._file(name), writable=writable)

    @override
    def replace(self, source: str, target: str) -> None:
        self._disk.count()
        self._directory.change(source, target, self._file(source))

    @override
    def unlink(self, name: str) -> None:
        self._disk.count()
        self._directory.change(name, None, self._file(name))

    @override
    def sizes(self) -> dict[str, int]:
        self._disk.count()
        return {name: len(self._file(name).content) for name in sorted(self._directory.entries)}

    @override
    def sync(self) -> None:
        self._disk.count()
        self._directory.sync()

    @override
    def lock(self, name: str, *, exclusive: bool, create: bool = False) -> Callable[[], None]:
        self._disk.count()
        if create and name not in self._directory.entries:
            self._directory.change(None, name, _File())
        file = self._file(name)
        if file.holders and (exclusive or file.is_exclusive):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)
        file.holders += 1
        file.is_exclusive = exclusive
        held = [file]

        def release() -> None:
            if held:
                held.pop().holders -= 1

        return release

    @override
    def kv_files(self, names: Sequence[str]) -> FileSet:
        opened = [self.open(name) for name in names]
        files: list[KVFile] = [PreadFile(file) for file in opened]

        def close() -> None:
            for file in files:
                file.close()

        return FileSet(files, "a simulated disk in memory", close)

    @override
    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._disk.open_files -= 1

    def _file(self, name: str) -> _File:
        found = self._directory.entries.get(name)
        if not isinstance(found, _File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return found


class _CrashFile(DiskFile):
    def __init__(self, disk: CrashDisk, file: _File, *, writable: bool) -> None:
        self._disk = disk
        self._file = file
        self._writable = writable
        self._is_open = True
        disk.open_files += 1

    @override
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        self._disk.count()
        return bytes(self._file.content[offset : offset + num_bytes])

    @override
    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        assert self._writable
        whole = bytes(data)
        self._disk.count(lambda share: self._file.change(offset, whole[: int(share * len(whole))]))
        self._file.change(offset, whole)

    @override
    def size_bytes(self) -> int:
        self._disk.count()
        return len(self._file.content)

    @override
    def truncate(self, num_bytes: int) -> None:
        assert self._writable
        self._disk.count()
        self._file.change(num_bytes, None)

    @override
    def sync(self) -> None:
        self._disk.count(lambda share: self._file.lose())
        self._file.sync()

    @override
    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._disk.open_files -= 1


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
    elif data:
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data


def _rename(
    entries: dict[str, _File | _Directory], old: str | None, new: str | None,
    node: _File | _Directory,
) -> None:  # fmt: skip
    if old is not None and entries.get(old) is node:
        del entries[old]
    if new is not None:
        entries[new] = node
