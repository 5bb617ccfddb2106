"""KVStore: where it may lie, and that nothing of it stays behind."""

import gc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError, FetchError, StorageError
from penstock.storage import open_files
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file_space import OpenedFile, file_system, open_nameless
from penstock.storage.store import KVStore

CHILD = """
import sys, time
import numpy as np
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.store import KVStore
store = KVStore.create(sys.argv[1], num_layers=3, unit_bytes=4096)
buffer = AlignedBuffer(16, store.padded_bytes)
buffer.array[:] = 42
for layer in range(3):
    store.region(layer).reserve(64)
    store.region(layer).write(np.arange(16), buffer, np.arange(16))
print("written", flush=True)
time.sleep(60)
"""


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def round_trip(store: KVStore, layer: int) -> bool:
    region = store.region(layer)
    region.reserve(8)
    buffer = AlignedBuffer(16, store.padded_bytes)
    buffer.array[:8] = np.random.default_rng(layer).integers(0, 256, (8, store.padded_bytes))
    region.write(np.arange(8), buffer, np.arange(8))
    region.submit_read(np.arange(8), buffer, np.arange(8, 16)).wait()
    return bool((buffer.array[:8] == buffer.array[8:]).all())


@pytest.mark.parametrize("location", ["auto", "memory", "nvme", "ufs", "emmc", "PATH", "emmc:PATH"])
def test_locations(location: str, tmp_path: Path) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    place = location.replace("PATH", str(tmp_path / "deep" / "down"))
    with KVStore.create(place, num_layers=2, unit_bytes=5000) as store:
        assert store.padded_bytes >= 5000
        assert round_trip(store, 0)
        assert round_trip(store, 1)
        preset = location.partition(":")[0] in ("nvme", "ufs", "emmc")
        assert (store.simulated is not None) == preset
        assert ("simulated" in store.describe()) == preset
        if "PATH" in location:
            assert str(tmp_path) in store.describe()
            assert list((tmp_path / "deep" / "down").iterdir()) == []


def test_layers_are_apart(tmp_path: Path) -> None:
    with KVStore.create(str(tmp_path), num_layers=2, unit_bytes=512) as store:
        buffer = AlignedBuffer(2, store.padded_bytes)
        for layer in range(2):
            store.region(layer).reserve(1)
            buffer.array[0] = layer + 1
            store.region(layer).write(np.array([0]), buffer, np.array([0]))
        for layer in range(2):
            store.region(layer).submit_read(np.array([0]), buffer, np.array([1])).wait()
            assert (buffer.array[1] == layer + 1).all()


def test_impossible_settings(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.write_text("x")
    for location in (str(plain), str(plain / "below"), "", "emmc:"):
        with pytest.raises(ConfigError):
            KVStore.create(location, num_layers=1, unit_bytes=1)
    with pytest.raises(ConfigError):
        KVStore.create("memory", num_layers=0, unit_bytes=1)


def test_directory_that_takes_no_files() -> None:
    with pytest.raises(StorageError, match="/proc"):
        KVStore.create("/proc/self/task", num_layers=1, unit_bytes=1)


@pytest.mark.parametrize("location", ["nvem", "nvem/deep", "ufs:nvem", "./nvme", "loop"])
def test_a_mistyped_directory_is_not_made(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"there is no directory .*; make it first"):
        KVStore.create(location, num_layers=1, unit_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_files_are_private_and_nameless(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        descriptor = open_nameless(str(tmp_path), direct=False).descriptor
    finally:
        os.umask(before)
    status = os.fstat(descriptor)
    os.close(descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_files_are_private_and_nameless_without_o_tmpfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    test_files_are_private_and_nameless(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_a_killed_process(number: signal.Signals, tmp_path: Path) -> None:
    root = str(Path(open_files.__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")},
        # A child of a background job would ignore Ctrl-C, as its parent does.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"written\n"
        assert list(tmp_path.iterdir()) == []
        os.kill(child.pid, number)
    finally:
        child.wait(timeout=60)
        child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_dropped_store_gives_everything_back(tmp_path: Path) -> None:
    gc.collect()
    before = num_descriptors()
    for _ in range(5):
        store = KVStore.create(str(tmp_path), num_layers=4, unit_bytes=4096)
        assert round_trip(store, 3)
        assert num_descriptors() == before + 4
        del store
        assert num_descriptors() == before


def test_failure_while_opening_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OpenedFile] = []

    def fail_at_the_fourth(directory: str, *, direct: bool) -> OpenedFile:
        if len(opened) == 4:
            raise StorageError("no more")
        opened.append(open_nameless(directory, direct=direct))
        return opened[-1]

    before = num_descriptors()
    monkeypatch.setattr(open_files, "open_nameless", fail_at_the_fourth)
    with pytest.raises(StorageError, match="no more"):
        KVStore.create(str(tmp_path), num_layers=9, unit_bytes=4096)
    assert num_descriptors() == before


def test_closing_twice_and_using_afterwards(tmp_path: Path) -> None:
    store = KVStore.create(str(tmp_path), num_layers=1, unit_bytes=4096)
    assert round_trip(store, 0)
    region, buffer = store.region(0), AlignedBuffer(1, store.padded_bytes)
    ticket = region.submit_read(np.array([0]), buffer, np.array([0]))
    store.close()
    store.close()
    assert ticket.done()
    with pytest.raises(FetchError):
        region.submit_read(np.array([0]), buffer, np.array([0]))
    with pytest.raises(StorageError):
        region.write(np.array([0]), buffer, np.array([0]))


def test_without_native_aio_threads_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(max_in_flight: int) -> None:
        raise StorageError("no native AIO")

    monkeypatch.setattr(open_files, "AioQueue", refuse)
    with KVStore.create(str(tmp_path), num_layers=2, unit_bytes=4096) as store:
        assert "threads" in store.describe()
        assert round_trip(store, 1)


def test_memory_file_systems_are_not_called_disks() -> None:
    if file_system("/dev/shm") != "tmpfs":
        pytest.skip("no tmpfs to try")
    with KVStore.create("/dev/shm", num_layers=1, unit_bytes=4096) as store:
        assert not store.is_direct
        assert "memory, not a disk" in store.describe()
        assert round_trip(store, 0)


def test_direct_reads_come_from_the_device(tmp_path: Path) -> None:
    """The system's own counter must agree with what `is_direct` claims."""
    with KVStore.create(str(tmp_path), num_layers=1, unit_bytes=1 << 20) as store:
        if not store.is_direct or open_files._device_read_bytes() is None:
            pytest.skip("no direct I/O here")
        buffer = AlignedBuffer(4, store.padded_bytes)
        buffer.array[:] = 1
        store.region(0).reserve(4)
        store.region(0).write(np.arange(4), buffer, np.arange(4))
        before = open_files._device_read_bytes()
        for _ in range(3):
            store.region(0).submit_read(np.arange(4), buffer, np.arange(4)).wait()
        after = open_files._device_read_bytes()
        assert before is not None
        assert after is not None
        assert after - before >= 12 << 20
