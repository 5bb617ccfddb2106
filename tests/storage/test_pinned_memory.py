"""pinned_memory(): to the byte, kept for the next cache, never taken from under a view."""

import gc
from collections.abc import Iterator

import pytest
import torch

from penstock.storage import pinned_memory as module
from penstock.storage.pinned_memory import pinned_bytes, pinned_memory


class Driver:
    """Stands in for CUDA's runtime."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.pinned = self.waits = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.held[address] = num_bytes
        self.pinned += num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", found.wait)
    monkeypatch.setattr(module, "_free", [])
    yield found
    gc.collect()
    module._free.clear()
    assert not found.held


def test_sizes_are_a_little_more_than_what_is_asked_for() -> None:
    sizes = [1, 4096, 4097, 100_000, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 6_480_000_001]
    found = [pinned_bytes(size) for size in sizes]
    assert found[:4] == [4096, 4096, 8192, 102_400]
    for size, pinned in zip(sizes, found, strict=True):
        assert size <= pinned <= max(size + size / 32, size + 4095)
        assert pinned_bytes(pinned) == pinned
    assert found[5] == 1 << 30


def test_all_of_it_can_be_written(driver: Driver) -> None:
    memory = pinned_memory(75 << 20)
    assert memory.shape == (75 << 20,)
    assert memory.dtype == torch.uint8
    assert list(driver.held.values()) == [pinned_bytes(75 << 20)]
    memory[:: 1 << 20].fill_(7)
    assert int(memory[-(1 << 20) :].max()) == 7


def test_the_next_one_has_the_same_memory_and_waits_for_the_device(driver: Driver) -> None:
    memory = pinned_memory(100_000)
    address = memory.data_ptr()
    assert driver.waits == 0
    del memory
    again = pinned_memory(100_001)
    assert again.data_ptr() == address
    assert driver.waits == 1
    assert driver.pinned == pinned_bytes(100_000)


def test_what_a_view_needs_is_not_given_away(driver: Driver) -> None:
    view = pinned_memory(100_000).view(torch.float16).view(2, -1)[1]
    gc.collect()
    other = pinned_memory(100_000)
    first, last = view.data_ptr(), view.data_ptr() + view.nbytes
    assert last <= other.data_ptr() or other.data_ptr() + other.nbytes <= first
    assert len(driver.held) == 2


def test_what_fits_nobody_goes_back_before_more_is_pinned(driver: Driver) -> None:
    del_me, kept = pinned_memory(100_000), pinned_memory(200_000)
    del del_me
    assert len(driver.held) == 2
    larger = pinned_memory(400_000)
    gc.collect()
    assert sorted(driver.held.values()) == [pinned_bytes(200_000), pinned_bytes(400_000)]
    assert kept.nbytes + larger.nbytes == 600_000
    del kept
    half = pinned_memory(100_001)
    assert sorted(driver.held.values()) == [pinned_bytes(200_000), pinned_bytes(400_000)]
    less = pinned_memory(50_000)
    assert len(driver.held) == 3, "kept memory of more than twice the size would be wasted on it"
    del half, larger
    assert pinned_memory(150_000).nbytes + less.nbytes == 200_000
    assert len(driver.held) == 3, "the smallest that fits"


@pytest.mark.gpu
def test_a_gpu_reads_and_writes_it_in_place() -> None:
    memory = pinned_memory(75 << 20)
    assert memory.is_pinned()
    memory.fill_(3)
    there = memory.to("cuda", non_blocking=True)
    there += 1
    memory.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert int(memory.min()) == int(memory.max()) == 4
