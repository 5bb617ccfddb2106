"""Disk: the few file operations that stored documents go through, real or simulated."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.core.errors import PenstockError
from penstock.storage.file import write_error
from penstock.storage.open_files import FileSet


class DiskFile(ABC):
    """An open file. Every call raises a plain OSError when it fails."""

    @abstractmethod
    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Read; comes short only where the file ends."""

    @abstractmethod
    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data`; after an error any part of it may be there."""

    @abstractmethod
    def size_bytes(self) -> int:
        """The file's length."""

    @abstractmethod
    def truncate(self, num_bytes: int) -> None:
        """Cut the file to `num_bytes`."""

    @abstractmethod
    def sync(self) -> None:
        """Return when the file's bytes and length survive a power loss; its name may not."""

    @abstractmethod
    def close(self) -> None:
        """Close; a second call does nothing."""


class Folder(ABC):
    """An open folder of plain files. Names have no slashes; symbolic links are never followed.

    Every call raises a plain OSError when it fails, ELOOP for a name that is no plain file.
    """

    @abstractmethod
    def create(self, name: str) -> DiskFile:
        """Make a file of mode 0600 and open it; FileExistsError when the name is taken."""

    @abstractmethod
    def open(self, name: str, *, writable: bool = False) -> DiskFile:
        """Open a file that is there."""

    @abstractmethod
    def replace(self, source: str, target: str) -> None:
        """Give `source` the name `target`, in place of what had it, in one step."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Take the name away; who has the file open keeps it."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Name and length in bytes of everything in the folder."""

    @abstractmethod
    def sync(self) -> None:
        """Return when the names survive a power loss."""

    @abstractmethod
    def lock(self, name: str, *, exclusive: bool, create: bool = False) -> Callable[[], None]:
        """Lock a file at once, or raise BlockingIOError.

        Args:
            create: make the file if it is missing.

        Returns:
            Gives the lock back; a second call does nothing. It also ends with the process.
        """

    @abstractmethod
    def kv_files(self, names: Sequence[str]) -> FileSet:
        """Open files for batches of reads, the fastest way that there is."""

    @abstractmethod
    def close(self) -> None:
        """Close the folder, not its files; a second call does nothing."""


class Disk(ABC):
    """Where documents lie. Every call raises a plain OSError when it fails."""

    @abstractmethod
    def make_folder(self, path: Path) -> Folder:
        """Make a folder of mode 0700 and open it; FileExistsError when there is something."""

    @abstractmethod
    def open_folder(self, path: Path) -> Folder:
        """Open a folder; a symbolic link to one is refused."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    @abstractmethod
    def sync_parent(self, path: Path) -> None:
        """Return when the folder's own name, or its removal, survives a power loss."""


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Turn a plain OSError into a StoreFullError or StorageError: "could not `what`"."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        raise write_error(error, what) from error
