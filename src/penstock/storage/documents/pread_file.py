"""PreadFile: a KVFile over the plain reads of a DiskFile, for disks that are simulated."""

import ctypes
import time

from typing_extensions import override

from penstock.core.errors import FetchError, StorageError
from penstock.storage.documents.disk import DiskFile
from penstock.storage.file import ByteArray, Int64Array, KVFile, Ticket, read_error
from penstock.storage.memory_file import FinishedTicket


class PreadFile(KVFile):
    """Takes over a file that was opened for reading; reads are done at submission."""

    sector_bytes = 512
    is_direct = False

    def __init__(self, file: DiskFile) -> None:
        self._file: DiskFile | None = file

    @override
    def reserve(self, num_bytes: int) -> None:
        """Refused: the file was opened for reading."""
        raise StorageError("the file is read-only")

    @override
    def submit_reads(
        self, offsets: Int64Array, lengths: Int64Array, addresses: Int64Array, keep_alive: object
    ) -> Ticket:
        """Read at once; the ticket is finished."""
        if self._file is None:
            raise FetchError("the store is closed")
        submitted_ns, failure = time.perf_counter_ns(), None
        for offset, length, address in zip(
            offsets.tolist(), lengths.tolist(), addresses.tolist(), strict=True
        ):
            try:
                data = self._file.read_at(offset, length)
            except OSError as error:
                failure = read_error(offset, length, -(error.errno or 0))
                continue
            ctypes.memmove(address, data, len(data))
            if len(data) != length:
                failure = failure or read_error(offset, length, len(data))
        return FinishedTicket(int(lengths.sum()), len(offsets), submitted_ns, failure)

    @override
    def write_at(self, offset: int, data: ByteArray) -> None:
        """Refused: the file was opened for reading."""
        raise StorageError("the file is read-only")

    @override
    def sync(self) -> None:
        """Nothing to do."""

    @override
    def close(self) -> None:
        """Close the file below."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
