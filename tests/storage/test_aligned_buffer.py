"""AlignedBuffer: aligned, zeroed, shared between array and tensor, alive as long as either."""

import gc
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.evaluate.process_memory import resident_pages
from penstock.storage.aligned_buffer import AlignedBuffer


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 4096), (1, 1), (3, 512), (7, 1000), (512, 4096), (700, 16384)]
)
def test_layout(slots: int, slot_bytes: int) -> None:
    buffer = AlignedBuffer(slots, slot_bytes)
    assert buffer.array.shape == (slots, slot_bytes)
    assert tuple(buffer.tensor.shape) == (slots, slot_bytes)
    assert buffer.num_bytes == slots * slot_bytes
    assert not buffer.array.any()
    assert buffer.array.flags.c_contiguous
    assert buffer.array.flags.writeable
    assert buffer.address % (2 << 20 if buffer.num_bytes >= 2 << 20 else 4096) == 0
    if slots:
        assert buffer.address == buffer.array.ctypes.data == buffer.tensor.data_ptr()


def test_array_and_tensor_are_the_same_memory() -> None:
    buffer = AlignedBuffer(4, 64)
    buffer.array[2] = 9
    assert buffer.tensor[2].eq(9).all()
    buffer.tensor[3] = 5
    assert (buffer.array[3] == 5).all()


def test_memory_lives_as_long_as_a_view() -> None:
    view = AlignedBuffer(600, 4096).tensor[100].view(torch.bfloat16)
    slot = AlignedBuffer(600, 4096).array[100]
    gc.collect()
    others = [AlignedBuffer(600, 4096) for _ in range(4)]
    for other in others:
        other.array[:] = 255
    assert not view.any()
    assert not slot.any()


def mapped_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmSize:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_returned() -> None:
    gc.collect()
    before = mapped_bytes()
    for _ in range(20):
        AlignedBuffer(1, 64 << 20)
    assert mapped_bytes() - before < 128 << 20


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_huge_pages_are_asked_for() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("no transparent huge pages")
    buffer = AlignedBuffer(8, 1 << 20)
    buffer.array[:] = 1
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        low, high = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if low <= buffer.address < high:
            flags = mapping.rsplit("VmFlags:", 1)[1].split()
            assert "hg" in flags  # madvise(MADV_HUGEPAGE) took
            assert "sh" not in flags  # private
            return
    pytest.fail("the buffer's mapping is not listed")


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
@pytest.mark.parametrize("num_bytes", [5000, 2_560_800, (2 << 20) - 1, (4 << 20) + 1])
def test_no_more_is_resident_than_the_buffers(num_bytes: int) -> None:
    """Where huge pages are had, none reaches beyond a buffer's end. Mappings lie side by side."""
    buffers, count = [AlignedBuffer(1, num_bytes) for _ in range(16)], 0
    for buffer in buffers:
        buffer.array[:] = 1
    for buffer in buffers:
        mapped = np.frombuffer(buffer._pages, dtype=np.uint8)
        resident = resident_pages(mapped.ctypes.data, mapped.size)
        assert resident is not None
        count += resident
    assert count == len(buffers) * -(-num_bytes // mmap.PAGESIZE)


def test_pinning_without_cuda_is_ignored() -> None:
    buffer = AlignedBuffer(4, 4096, pinned=True)
    assert buffer.is_pinned == torch.cuda.is_available()


class FakeDriver:
    """Stands in for CUDA's runtime: takes down whether memory is still there when it lets go."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.was_mapped: list[bool] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.held[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        end = address + self.held.pop(address)
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [[int(part, 16) for part in line.split(" ", 1)[0].split("-")] for line in lines]
        self.was_mapped.append(any(low <= address and end <= high for low, high in ranges))
        return 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("is_viewed", [False, True])
@pytest.mark.parametrize("num_bytes", [5000, 3 << 20])
def test_cuda_lets_go_of_memory_that_is_still_there(
    in_a_cycle: bool, is_viewed: bool, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is registered when it goes back to the system would still be when the system
    gives out its addresses again."""
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    for _ in range(20):
        buffer = AlignedBuffer(2, num_bytes, pinned=True)
        assert buffer.is_pinned
        held: list[object] = [buffer, buffer.tensor, buffer.array[1:], buffer.tensor[1:]]
        if in_a_cycle:
            held.append(held)
        slot = buffer.array[0] if is_viewed else None
        del buffer, held
        gc.collect()
        assert bool(driver.held) == is_viewed, "a view needs it"
        del slot
        gc.collect()
        assert not driver.held
    assert driver.was_mapped == [True] * 20


@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    buffer = AlignedBuffer(4, 1 << 20, pinned=True)
    assert buffer.tensor.is_pinned()
    buffer.array[:] = np.arange(4, dtype=np.uint8)[:, None]
    copy = buffer.tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert (copy.cpu().numpy() == buffer.array).all()
