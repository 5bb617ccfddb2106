"""The store works on systems that lack Linux's calls: imported and used in a faked one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.storage import open_files

FAKED = """
import asyncio, mmap, os, platform, sys, tempfile
import concurrent.futures, ctypes, multiprocessing, subprocess
import numpy as np
fake = sys.argv[1]
linux_only = ["O_DIRECT", "O_TMPFILE", "posix_fallocate", "posix_fadvise", "memfd_create",
              "fdatasync", "preadv2"]
windows_lacks = ["preadv", "pwritev", "pread", "pwrite", "readv", "writev", "O_CLOEXEC", "statvfs",
                 "major", "minor", "geteuid", "getuid"]
for name in linux_only + (windows_lacks if fake == "win32" else []):
    if hasattr(os, name):
        delattr(os, name)
for name in [n for n in dir(mmap) if n.startswith("MADV")]:
    delattr(mmap, name)
if fake == "win32":
    del mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
    def refuse(*args, **kwargs):
        raise TypeError("Windows has no default library")
    ctypes.CDLL = refuse
sys.platform = fake
platform.machine = lambda: {"win32": "AMD64", "darwin": "arm64"}[fake]

import penstock.storage
from penstock.storage import AlignedBuffer, KVStore
for location in (sys.argv[2], "memory", "emmc"):
    with KVStore.create(location, num_layers=2, unit_bytes=3000) as store:
        assert not store.is_direct
        region = store.region(1)
        region.reserve(64)
        buffer = AlignedBuffer(128, store.padded_bytes)
        buffer.array[:64] = np.random.default_rng(0).integers(0, 256, (64, store.padded_bytes))
        order = np.random.default_rng(1).permutation(64)
        region.write(order, buffer, np.arange(64))
        region.submit_read(order, buffer, np.arange(64, 128)).wait()
        assert (buffer.array[:64] == buffer.array[64:]).all()
        print(store.describe())
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_faked_system(system: str, tmp_path: Path) -> None:
    root = str(Path(open_files.__file__).parents[2])
    answer = subprocess.run(
        [sys.executable, "-c", FAKED, system, str(tmp_path)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert "buffered" in lines[0]
    assert lines[1] == "host memory"
    assert "simulated" in lines[2]
    assert list(tmp_path.iterdir()) == []
