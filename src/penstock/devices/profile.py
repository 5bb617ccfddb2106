"""DeviceProfile: bandwidth, requests per second, latency and page size, and the time of reads."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """A storage device as a cost model: what a batch of requests keeps it busy for.

    A request costs a fixed time and its bytes cost bandwidth, in whole flash pages. On most devices
    the two add up; on one that prepares the next request while it transfers (`is_pipelined`) the
    longer of the two counts, so bandwidth grows with the request size and then stays.
    """

    name: str
    title: str
    """For people: "eMMC"."""
    bandwidth: float
    """Of large reads, bytes per second."""
    write_bandwidth: float
    """Of large writes, bytes per second."""
    iops: float
    """Most reads of one flash page per second."""
    latency_s: float
    """From the end of a device's work to the answer, seconds; overlaps with other requests."""
    sector_bytes: int = 512
    """Smallest transfer."""
    flash_page_bytes: int = 4096
    """What the device reads whole even when less is asked for."""
    is_pipelined: bool = False
    source: str = ""
    """Where the numbers come from, and which are assumed."""

    @property
    def request_s(self) -> float:
        """Fixed time of one request, seconds."""
        if self.is_pipelined:
            return 1 / self.iops
        return max(0.0, 1 / self.iops - self.flash_page_bytes / self.bandwidth)

    def read_time_s(self, offsets: Int64Array, lengths: Int64Array) -> float:
        """Seconds that a batch of reads keeps the device busy; both int64 [num_reads], bytes."""
        page = self.flash_page_bytes
        pages = (offsets + lengths - 1) // page - offsets // page + 1
        transfer_s = pages * (page / self.bandwidth)
        if self.is_pipelined:
            return float(np.maximum(transfer_s, self.request_s).sum())
        return float(transfer_s.sum()) + len(lengths) * self.request_s

    def steady_read_time_s(self, reads: float, read_bytes: float) -> float:
        """Seconds for so many reads of whole pages, given as averages (of a decode step, say)."""
        transfer_s = read_bytes / self.bandwidth
        if self.is_pipelined:
            return max(transfer_s, reads * self.request_s)
        return transfer_s + reads * self.request_s

    def write_time_s(self, offset: int, num_bytes: int) -> float:
        """Seconds that one write keeps the device busy."""
        return self.request_s + num_bytes / self.write_bandwidth

    def read_bandwidth(self, request_bytes: int) -> float:
        """Bytes per second of many aligned reads of `request_bytes` each, at full depth."""
        offset, length = np.zeros(1, dtype=np.int64), np.array([request_bytes], dtype=np.int64)
        return request_bytes / self.read_time_s(offset, length)
