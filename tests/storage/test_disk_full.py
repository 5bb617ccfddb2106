"""A full disk is a StoreFullError, at reservation and at writing, and the store goes on."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import StorageError, StoreFullError
from penstock.storage import file_space
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import write_error
from penstock.storage.store import KVStore

MIB = 1 << 20
LIMITED = """
import resource, sys
import numpy as np
from penstock.core.errors import StoreFullError
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.store import KVStore
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with KVStore.create(sys.argv[1], num_layers=1, unit_bytes=65536) as store:
    region, buffer = store.region(0), AlignedBuffer(1, store.padded_bytes)
    failed = 0
    try:
        region.reserve(64)
    except StoreFullError:
        failed += 1
    try:
        for unit in range(64):
            region.write(np.array([unit]), buffer, np.array([0]))
    except StoreFullError:
        failed += 1
    print(failed, unit)
"""


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 16 MiB; needs root and the right to mount."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can mount")
    point = tmp_path / "disk"
    point.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(point)]
    else:
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, 16 * MIB)
        # Not every PATH has the administrators' folders.
        mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if mkfs is None:
            pytest.skip("no mkfs.ext4")
        made = subprocess.run([mkfs, "-q", "-m", "0", str(image)], capture_output=True)
        assert made.returncode == 0, made.stderr
        command = ["mount", "-o", "loop", str(image), str(point)]
    try:
        mounted = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def test_small_disk(small_disk: Path) -> None:
    before = free_bytes(small_disk)
    with KVStore.create(str(small_disk), num_layers=2, unit_bytes=65536) as store:
        region = store.region(0)
        region.reserve(32)
        kept = free_bytes(small_disk)
        with pytest.raises(StoreFullError, match="no room"):
            region.reserve(1000)
        assert free_bytes(small_disk) >= kept - 64 * 1024  # what was taken on the way is back
        buffer = AlignedBuffer(2, store.padded_bytes)
        for unit in range(1000):
            buffer.array[0] = unit % 251
            try:
                store.region(1).write(np.array([unit]), buffer, np.array([0]))
            except StoreFullError:
                break
        else:
            pytest.fail("65 MB fitted into 16 MiB")
        store.region(1).submit_read(np.array([unit - 1]), buffer, np.array([1])).wait()
        assert (buffer.array[1] == (unit - 1) % 251).all()
    assert free_bytes(small_disk) >= before - 64 * 1024


def test_limit_on_file_size(tmp_path: Path) -> None:
    root = str(Path(file_space.__file__).parents[2])
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")},
    )  # fmt: skip
    assert answer.stdout.split() == ["2", "16"], answer.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_kinds_of_full(number: int) -> None:
    assert isinstance(write_error(OSError(number, os.strerror(number)), "x"), StoreFullError)


def test_other_errors_are_not_called_full() -> None:
    error = write_error(OSError(errno.EIO, os.strerror(errno.EIO)), "write the KV cache")
    assert isinstance(error, StorageError)
    assert not isinstance(error, StoreFullError)
    assert "could not write the KV cache" in str(error)


def test_file_systems_without_allocation_still_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    descriptor = file_space.open_nameless(str(tmp_path), direct=False).descriptor
    file_space.allocate(descriptor, 0, 3 * MIB)
    assert os.fstat(descriptor).st_size == 3 * MIB
    os.close(descriptor)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda d, data, offset: real(d, data[:1000], offset))
    descriptor = file_space.open_nameless(str(tmp_path), direct=False).descriptor
    data = np.arange(4500).astype(np.uint8)
    file_space.write_all(descriptor, 10, data)
    assert os.pread(descriptor, 4500, 10) == data.tobytes()
    os.close(descriptor)
