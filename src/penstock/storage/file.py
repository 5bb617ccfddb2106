"""KVFile: the calls a store needs from a file, and Ticket, a batch of reads on its way."""

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import FetchError, StorageError, StoreFullError

if TYPE_CHECKING:
    from penstock.storage.native_aio import AioQueue

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC), errno.ENOMEM}


def bytes_at(address: int, count: int) -> ByteArray:
    """Memory at an address as an array, which does not keep it alive. uint8 [count]"""
    memory: Any = (ctypes.c_uint8 * count).from_address(address)
    return np.frombuffer(memory, np.uint8)


class Ticket(ABC):
    """A batch of reads under way: submitted once, waited for once or more.

    The memory that the reads land in is kept alive by the ticket's owner until the last read has
    ended, whether it is waited for or not.
    """

    read_bytes: int
    """Bytes asked for, padding included."""
    num_reads: int
    """Read requests handed to the device."""
    submitted_ns: int
    """`time.perf_counter_ns` at submission."""
    finished_ns: int
    """`time.perf_counter_ns` when the last read was seen to have ended; 0 until then."""

    @abstractmethod
    def done(self) -> bool:
        """Whether every read has ended, well or not. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until every read has ended; a second call answers the same at once.

        Raises:
            FetchError: a read failed or came up short. No read of the batch is under way then.
        """


class KVFile(ABC):
    """One layer's bytes: reserved, written in place, read in batches.

    Attributes:
        sector_bytes: offsets, lengths and addresses must be multiples of it
        is_direct: reads come from the device, never from the page cache
        simulated: name of the device profile it is slowed down to, or None
    """

    sector_bytes: int
    is_direct: bool
    simulated: str | None = None

    @abstractmethod
    def reserve(self, num_bytes: int) -> None:
        """Grow the file so that [0, num_bytes) is allocated; never shrinks it.

        Raises:
            StoreFullError: there is no room; the file keeps its former size.
        """

    @abstractmethod
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Start reading `lengths[i]` bytes at `offsets[i]` to `addresses[i]`, all [num_reads].

        Args:
            keep_alive: owner of the memory; held until the reads have ended.

        Raises:
            AlignmentError: direct I/O, and something is not a multiple of `sector_bytes`.
            FetchError: the file is closed. Errors of the reads themselves come from `wait`.
        """

    @property
    def request_queue(self) -> "tuple[AioQueue, int] | None":
        """Where reads of this file may be submitted by those who make requests themselves, and its
        descriptor; None where they must go through `submit_reads`."""
        return None

    def opened(
        self, ticket: Ticket, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array,
        keep_alive: object,
    ) -> Ticket:  # fmt: skip
        """What to wait for in place of a ticket of the `request_queue`; arguments as in
        `submit_reads`. It does to the bytes what this file does to what it reads."""
        return ticket

    @abstractmethod
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Write `data` [num_bytes], contiguous, at `offset`; returns when reads will see it.

        Raises:
            StoreFullError: there is no room.
            StorageError: the write failed, or the file is closed.
            AlignmentError: direct I/O, and something is not a multiple of `sector_bytes`.
        """

    @abstractmethod
    def sync(self) -> None:
        """Return when all that was written is on the device."""

    @abstractmethod
    def close(self) -> None:
        """Give the file back; a second call does nothing."""


def write_error(error: OSError, what: str) -> StorageError:
    """The typed error for a failed write or reservation."""
    if error.errno in _FULL:
        return StoreFullError(
            f"no room on the disk to {what} ({error.strerror}); free some, or give another "
            "directory"
        )
    return StorageError(f"could not {what}: {error.strerror or error}")


def read_error(offset: int, length: int, result: int) -> FetchError:
    """The typed error for one failed read.

    Args:
        result: bytes that came, or a negative errno.
    """
    if result < 0:
        cause = OSError(-result, os.strerror(-result))
        failure = FetchError(f"reading {length} bytes at {offset} failed: {cause.strerror}")
        failure.__cause__ = cause
        return failure
    return FetchError(f"reading {length} bytes at {offset} gave only {result}")
