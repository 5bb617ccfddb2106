"""What a disk, a lock or a clock does to a library: typed errors that say what to do."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DocumentBusyError, FetchError, PenstockError, StorageError
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument
from penstock.storage.documents.real_disk import RealFile
from penstock.storage.documents.small_files import locked
from penstock.storage.documents.write_budget import WriteBudget
from penstock.testing.faulty_file import FaultyFile

SHAPE = Shape(layers=2, unit_bytes=5000)
HOLD = """
import fcntl, os, sys, time
number = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(number, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def make(path: Path) -> Path:
    with DocumentWriter.create(path, SHAPE) as writer:
        for layer in range(SHAPE.layers):
            writer.append(layer, np.ones((3, SHAPE.padded_bytes), np.uint8))
        writer.commit(identity={}, about={}, blobs={"tokens": b"abc"})
    return path


def test_a_lock_that_is_kept_is_told_with_its_holder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        start = time.monotonic()
        with (
            pytest.raises(DocumentBusyError, match="has been locked for") as told,
            locked(tmp_path, timeout_s=0.2),
        ):
            pass
        assert time.monotonic() - start >= 0.2
        if os.path.exists("/proc/locks"):
            assert f"process {holder.pid};" in str(told.value)
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path, timeout_s=10):
        pass


GONE = [errno.ESTALE, errno.EACCES, errno.ENOENT, errno.ENOSPC]


@pytest.mark.parametrize("number", GONE, ids=errno.errorcode.get)
def test_verify_of_a_disk_that_has_gone_is_no_damage(number: int, tmp_path: Path) -> None:
    path = make(tmp_path / "document")
    with (
        StoredDocument.open(
            path, wrap=lambda file: FaultyFile(file, failing_reads=range(9), read_errno=number)
        ) as document,
        pytest.raises(FetchError, match=os.strerror(number)),
    ):
        document.verify()


def test_verify_of_a_disk_that_loses_bytes_is_damage(tmp_path: Path) -> None:
    path = make(tmp_path / "document")
    with StoredDocument.open(
        path, wrap=lambda file: FaultyFile(file, failing_reads=range(9), read_errno=errno.EIO)
    ) as document:
        assert document.verify().units == {0: [0, 1, 2], 1: [0, 1, 2]}


@pytest.mark.parametrize("number", GONE, ids=errno.errorcode.get)
def test_seals_and_blobs_that_cannot_be_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with StoredDocument.open(make(tmp_path / "document")) as document:
        monkeypatch.setattr(RealFile, "size_bytes", fail)
        monkeypatch.setattr(RealFile, "read_at", fail)
        with pytest.raises(StorageError):
            document.verify()
        with pytest.raises(StorageError):
            document.blob("tokens")


@pytest.mark.parametrize("now", [float("nan"), float("inf"), -1e18, 1e18])
def test_a_clock_that_tells_no_date(now: float, tmp_path: Path) -> None:
    budget = WriteBudget(tmp_path, 1000, clock=lambda: now)
    with pytest.raises(PenstockError, match="clock"):
        budget.require(10)
    with pytest.raises(PenstockError, match="clock"):
        budget.add(10)
