"""RealDisk: folders and files of the operating system, opened without following links."""

import errno
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from penstock.core.closing import DeferredInterrupts
from penstock.core.errors import StorageError
from penstock.storage.documents.disk import Disk, DiskFile, Folder
from penstock.storage.file_space import direct_sector_bytes, file_system
from penstock.storage.open_files import Descriptors, FileSet, wrap_descriptors

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_BASE = _NO_LINKS | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe in a file's place must not hang."""
_DIRTY_BYTES_MAX = 32 << 20
"""Written bytes beyond this are flushed and dropped: the page cache is fast memory too."""
_WRITE_BYTES = 8 << 20
"""Longest single write, so that Ctrl-C never waits long."""


class RealFile(DiskFile):
    """Takes over a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._dirty_bytes = 0
        self._failure: OSError | None = None

    @override
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Read in as many calls as it takes."""
        parts = []
        while num_bytes and (part := os.pread(self._descriptor, num_bytes, offset)):
            parts.append(part)
            offset, num_bytes = offset + len(part), num_bytes - len(part)
        return b"".join(parts)

    @override
    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write in as many calls as it takes, and keep what the page cache holds of it small."""
        view = memoryview(data).cast("B")
        while len(view):
            written = os.pwrite(self._descriptor, view[:_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written
            self._dirty_bytes += written
            if self._dirty_bytes > _DIRTY_BYTES_MAX:
                self.sync()

    @override
    def size_bytes(self) -> int:
        """Ask the system."""
        return os.fstat(self._descriptor).st_size

    @override
    def truncate(self, num_bytes: int) -> None:
        """Cut; takes effect at once for every reader."""
        os.ftruncate(self._descriptor, num_bytes)

    @override
    def sync(self) -> None:
        """Flush to the device, through its cache, and drop the pages that the system kept."""
        if self._failure is not None:
            raise self._failure
        try:
            _sync(self._descriptor)
        except OSError as error:  # the pages are gone: a second try would wrongly succeed
            self._failure = error
            raise
        if self._dirty_bytes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._dirty_bytes = 0

    @override
    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self._descriptor = -1
        self._close()


class RealFolder(Folder):
    """A folder held by a descriptor, so that another one cannot take its place."""

    def __init__(self, path: Path) -> None:
        """Open it; it must not be a symbolic link."""
        self._path = path
        with DeferredInterrupts():
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _BASE)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    @override
    def create(self, name: str) -> DiskFile:
        """Make a file that no other user may read."""
        with DeferredInterrupts():
            return RealFile(self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))

    @override
    def open(self, name: str, *, writable: bool = False) -> DiskFile:
        """Open a plain file."""
        with DeferredInterrupts():
            return RealFile(self._open(name, os.O_RDWR if writable else os.O_RDONLY))

    @override
    def replace(self, source: str, target: str) -> None:
        """Rename."""
        own = self._descriptor
        os.replace(source, target, src_dir_fd=own, dst_dir_fd=own)

    @override
    def unlink(self, name: str) -> None:
        """Remove the name."""
        os.unlink(name, dir_fd=self._descriptor)

    @override
    def sizes(self) -> dict[str, int]:
        """List the folder; links count with their own length."""
        return {name: self._size(name) for name in sorted(os.listdir(self._descriptor))}

    @override
    def sync(self) -> None:
        """Flush the folder."""
        _sync(self._descriptor)

    @override
    def lock(self, name: str, *, exclusive: bool, create: bool = False) -> Callable[[], None]:
        """Lock with flock: it belongs to this opening of the file, also within one process."""
        import fcntl

        with DeferredInterrupts():
            descriptor = self._open(name, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
            file = RealFile(descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        return file.close

    @override
    def kv_files(self, names: Sequence[str]) -> FileSet:
        """Direct I/O through native AIO where that works; else threads, at last page cache."""
        direct = hasattr(os, "O_DIRECT") and file_system(str(self._path)) not in ("tmpfs", "ramfs")
        numbers = self._open_all(names, getattr(os, "O_DIRECT", 0) if direct else 0)
        if numbers is None or (direct and not direct_sector_bytes(numbers[0])):
            for number in numbers or []:
                os.close(number)
            direct, numbers = False, self._open_all(names, 0)
        assert numbers is not None
        place = f"/proc/self/fd/{self._descriptor}"  # the very folder, whatever its path is now
        place = place if os.path.isdir(place) else str(self._path)
        try:
            opened = wrap_descriptors(Descriptors(place, numbers, direct))
        except StorageError:  # a folder that takes no file to try direct I/O with: read-only
            numbers = self._open_all(names, 0)
            assert numbers is not None
            opened = wrap_descriptors(Descriptors(place, numbers, direct=False))
        return opened._replace(description=opened.description.replace(place, str(self._path)))

    @override
    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self._descriptor = -1
        self._close()

    def _open_all(self, names: Sequence[str], flags: int) -> list[int] | None:
        """Descriptors to read from; None when the file system does not take these flags."""
        numbers: list[int] = []
        try:
            numbers.extend(self._open(name, os.O_RDONLY | flags) for name in names)
        except BaseException as error:
            for number in numbers:
                os.close(number)
            if flags and isinstance(error, OSError) and error.errno == errno.EINVAL:
                return None
            raise
        return numbers

    def _open(self, name: str, flags: int) -> int:
        assert "/" not in name, name
        descriptor = os.open(name, flags | _BASE | _NO_WAIT, 0o600, dir_fd=self._descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.ELOOP, "not a plain file", name)
        if _NO_WAIT:
            os.set_blocking(descriptor, True)
        return descriptor

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_size
        except FileNotFoundError:  # removed since it was listed
            return 0


class RealDisk(Disk):
    """The operating system's files."""

    @override
    def make_folder(self, path: Path) -> Folder:
        """Make a folder that only its owner may enter."""
        _require_posix()
        os.mkdir(path, 0o700)
        return RealFolder(path)

    @override
    def open_folder(self, path: Path) -> Folder:
        """Open it by a descriptor."""
        _require_posix()
        return RealFolder(path)

    @override
    def remove_folder(self, path: Path) -> None:
        """Remove it if it is empty."""
        os.rmdir(path)

    @override
    def sync_parent(self, path: Path) -> None:
        """Flush the folder above."""
        descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)


_NO_FULL_SYNC = (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL)
"""What volumes that do not know F_FULLFSYNC say: shares and FUSE."""

REAL_DISK = RealDisk()
"""Keeps no state."""


def _require_posix() -> None:
    if not hasattr(os, "O_DIRECTORY"):
        raise StorageError(
            "stored documents need locks and descriptors of folders, which this system lacks; "
            "Linux and macOS have them"
        )


def _sync(descriptor: int) -> None:
    import fcntl

    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the device's cache
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(descriptor)
