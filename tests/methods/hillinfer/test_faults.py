"""Devices that die, hang, are slow or talk nonsense: typed errors in bounded time, and recovery."""

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import FetchError, StorageError, StoreFullError
from penstock.methods.hillinfer.near_storage import device_client, shared_memory
from penstock.methods.hillinfer.near_storage.channel import Exchange, ScorerError
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.testing.near_rig import UNIT_BYTES, NearRig

NONSENSE = (
    "out of range", "negative", "not a number", "infinite", "twice in a block", "wrong row",
    "out of order", "duplicate", "late", "unasked", "garbage", "another version", "unknown kind",
    "too long",
)  # fmt: skip
RECOVERED = ("out of range", "unasked", "garbage")
"""What a restart is tried behind: a bad number, a bad message, and what is no message."""
BAD = ("penstock.testing.bad_device",)
PATIENCE_S = 120.0
"""Longer than anything takes on a loaded machine: whoever waits for it to end has not noticed."""


def kill(process: int) -> None:
    """Kill a child, and wait until it is dead; whoever started it learns of it by itself."""
    os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # that one was faster
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


def test_a_device_needs_no_torch() -> None:
    """Its start and its memory are numpy's."""
    code = f"import runpy, sys; runpy.run_module({NearDevice.program[0]!r}, run_name='near'); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("how", NONSENSE)
def test_nonsense_is_refused_at_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = NearDevice.program
    monkeypatch.setattr(NearDevice, "program", (*BAD, how))
    with NearRig(tmp_path, timeout_s=PATIENCE_S) as rig:
        rig.fill()
        start = time.monotonic()
        with pytest.raises(ScorerError):
            rig.score_for(6.0)  # an unasked message comes with the next request at the latest
        assert time.monotonic() < start + PATIENCE_S / 2
        if how not in RECOVERED:
            return
        monkeypatch.setattr(NearDevice, "program", good)
        rig.store.scorer.ensure_alive()
        np.testing.assert_allclose(rig.score(150), rig.expected(150), rtol=0.06, atol=1e-3)


@pytest.mark.parametrize("how", ["dies", "cut short"])
def test_a_death_in_the_middle_is_an_error(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NearDevice, "program", (*BAD, how))
    with NearRig(tmp_path) as rig:
        rig.fill()
        with pytest.raises(ScorerError, match=r"ended with status|closed its connection"):
            rig.score(150)


def test_missing_scores_stay_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NearDevice, "program", (*BAD, "short"))
    with NearRig(tmp_path) as rig:
        rig.fill()
        assert np.isnan(rig.score(150)).all()  # which `NearIndex` refuses


@pytest.mark.parametrize("how", ["hangs", "stopped"])
def test_a_device_that_hangs_is_given_up(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "hangs":
        monkeypatch.setattr(NearDevice, "program", (*BAD, how))
    with NearRig(tmp_path, timeout_s=PATIENCE_S) as rig:
        rig.fill()
        device = rig.store.devices[0]
        process, device.timeout_s = device.process_id, 0.5
        assert process is not None
        if how == "stopped":
            os.kill(process, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(ScorerError, match=r"within 0\.5 s"):
            rig.score(150)
        assert time.monotonic() >= start + 0.5
        device.timeout_s = PATIENCE_S
        device.ensure_alive()
        assert device.process_id != process


def test_a_device_that_never_starts_is_waited_for_as_long_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(NearDevice, "program", ("sleeper",))
    monkeypatch.setattr(device_client, "START_TIMEOUT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ScorerError, match=r"within 0\.5 s"):
        NearRig("memory", timeout_s=0.1)
    assert time.monotonic() > start + 0.5


def test_a_slow_device_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NearDevice, "program", (*BAD, "slow"))
    with NearRig(tmp_path, timeout_s=PATIENCE_S, rows=1, tokens=40) as rig:
        rig.fill()
        np.testing.assert_allclose(rig.score(40), rig.expected(40), rtol=0.06, atol=1e-3)


def test_a_full_disk_is_said_by_its_name(tmp_path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    try:
        with NearRig(tmp_path) as rig:
            with pytest.raises(StoreFullError, match="near-storage device"):
                rig.fill()
            assert rig.store.devices[0].process_id is not None
            rig.store.devices[0].ensure_alive()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_reads_of_one_device_end_where_another_is_lost(tmp_path: Path) -> None:
    with NearRig(tmp_path, rows=2, tokens=400, devices=2) as rig:
        rig.fill()
        units = rig.units.reshape(-1)[:200]
        whole, lost = rig.store.devices
        free = whole.sections.qsize()
        for _ in range(free + 1):
            process = lost.process_id
            assert process is not None
            kill(process)
            with contextlib.suppress(ScorerError):
                rig.read(units)
            assert whole.sections.qsize() == free
            assert not whole.reads._exchanges
            rig.store.scorer.ensure_alive()
        rig.read(units)


def test_reads_that_nobody_waits_for_hold_up_no_others(tmp_path: Path) -> None:
    with NearRig(tmp_path) as rig:
        rig.fill()
        region, device = rig.store.region(0), rig.store.devices[0]
        free = device.sections.qsize()
        buffers = [AlignedBuffer(2, region.padded_bytes) for _ in range(free + 1)]
        tickets = [
            region.submit_read(rig.units[0, 2 * i : 2 * i + 2].copy(), buffer, np.arange(2))
            for i, buffer in enumerate(buffers)
        ]
        last = threading.Thread(target=tickets[-1].wait, daemon=True)
        last.start()
        last.join(20)
        ended = not last.is_alive()
        for ticket in tickets:
            ticket.wait()
        assert ended, "it waited for a section that only others' waiting would have freed"
        assert device.sections.qsize() == free
        keys = np.stack([buffer.array[:, : UNIT_BYTES // 2] for buffer in buffers])
        expected = rig.keys[0, : 2 * len(buffers)].reshape(len(buffers), 2, -1)
        np.testing.assert_array_equal(keys.view(np.float32), expected)


def test_a_read_that_fails_gives_no_section_back_that_is_still_read_into(tmp_path: Path) -> None:
    with NearRig(tmp_path, rows=2, tokens=800, timeout_s=PATIENCE_S) as rig:
        rig.fill()
        device, free = rig.store.devices[0], rig.store.devices[0].sections.qsize()
        file, padded_bytes = rig.store.region(0).file, rig.store.padded_bytes
        offsets = np.arange(0, 800, 2) * padded_bytes  # more than a section holds
        offsets[0] = padded_bytes << 20  # there is nothing
        buffer = AlignedBuffer(len(offsets), padded_bytes)
        targets = buffer.address + np.arange(len(offsets)) * padded_bytes
        ticket = file.submit_reads(offsets, np.full(len(offsets), padded_bytes), targets, buffer)
        process, start = device.process_id, time.monotonic()
        with pytest.raises(FetchError):
            ticket.wait()
        assert time.monotonic() < start + PATIENCE_S / 2
        assert device.process_id == process
        assert not device.reads._exchanges
        assert device.sections.qsize() == free


def test_an_interrupted_wait_is_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with NearRig(tmp_path) as rig:
        rig.fill()
        region = rig.store.region(0)
        buffer = AlignedBuffer(2, region.padded_bytes)
        ticket = region.submit_read(rig.units[0, :2].copy(), buffer, np.arange(2))
        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "done", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ticket.wait()
        with pytest.raises(FetchError, match="interrupted"):
            ticket.wait()
        assert not rig.store.devices[0].reads._exchanges
        rig.read(rig.units[0])


def test_nobody_scores_before_a_restarted_device_knows_its_maps(tmp_path: Path) -> None:
    with NearRig(tmp_path, rows=2, tokens=400) as rig:
        rig.fill()
        assert not np.isnan(rig.score(400)).any()
        device = rig.store.devices[0]
        restore, begun = device.restore, threading.Event()

        def dawdle() -> None:
            begun.set()
            time.sleep(0.3)
            restore()

        device.restore = dawdle
        process = device.process_id
        assert process is not None
        kill(process)
        device.give_up(ScorerError("killed"))
        writer = threading.Thread(target=device.ensure_alive)
        writer.start()
        assert begun.wait(60)
        rig.store.scorer.ensure_alive()
        assert not np.isnan(rig.score(400)).any()
        writer.join()


def test_a_device_that_does_not_start_leaves_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("descriptors cannot be counted here")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(f"{device_client.__name__}.subprocess.Popen", refuse)
        for place in (tmp_path, "memory"):
            with pytest.raises(StorageError, match="no more processes"):
                NearRig(place)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("part", ["create", "attach"])
def test_another_batch_without_memory_for_it_changes_nothing(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no memory")

    with NearRig(tmp_path) as rig:
        rig.fill()
        with monkeypatch.context() as patched:
            patched.setattr(shared_memory, part, refuse)
            with pytest.raises(StorageError, match="no memory"):
                rig.store.serve(3)
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        rig.store.serve(3)
        rig.store.scorer.map(0, 0, rig.units[[1, 0, 1]])
        rig.query, rig.keys, rig.rows = rig.query[[1, 0, 1]], rig.keys[[1, 0, 1]], 3
        np.testing.assert_allclose(rig.score(150), rig.expected(150), rtol=0.06, atol=1e-3)
    for descriptor in others:
        os.close(descriptor)  # which nobody else has done


def test_too_many_open_files_are_said_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError, match="Too many open files"):
        shared_memory.create(4096)
    monkeypatch.setattr(socket, "socketpair", refuse)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    monkeypatch.setattr(shared_memory, "attach", lambda *_: np.zeros(1 << 22, dtype=np.uint8))
    with pytest.raises(StorageError, match="Too many open files"):
        NearRig("memory")


def test_another_batch_that_one_device_failed_to_take_is_asked_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise StorageError("does not start")

    with NearRig(tmp_path, devices=2) as rig:
        rig.fill()
        with monkeypatch.context() as patched:
            patched.setattr(rig.store.devices[1], "renew", refuse)
            with pytest.raises(StorageError, match="does not start"):
                rig.store.serve(3)
        rig.store.serve(3)
        rig.store.scorer.map(0, 0, rig.units[[1, 0, 1]])
        rig.query, rig.keys, rig.rows = rig.query[[1, 0, 1]], rig.keys[[1, 0, 1]], 3
        np.testing.assert_allclose(rig.score(150), rig.expected(150), rtol=0.06, atol=1e-3)
