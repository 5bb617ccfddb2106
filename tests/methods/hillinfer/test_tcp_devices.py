"""Devices over TCP: the same scores, a kept pool, a lost pool, and others who knock."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.methods.hillinfer.near_storage.channel import ScorerError
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.methods.hillinfer.near_storage.hello import HelloError, greet
from penstock.methods.hillinfer.near_storage.tcp_device import PoolLostError, TcpDevice
from penstock.testing.near_rig import NearRig

KEY = bytes(range(32))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[DeviceHost]:
    with DeviceHost(KEY, disk=str(tmp_path)) as host:
        yield host


def rig_of(*hosts: DeviceHost, key: bytes = KEY, copies: int = 1) -> NearRig:
    addresses = ",".join(f"tcp://{h.address}" for h in hosts)
    return NearRig("memory", devices=addresses, key=key, copies=copies)


@pytest.mark.parametrize("count", [1, 2])
def test_hosts_score_and_keep_as_a_local_device(count: int, host: DeviceHost) -> None:
    with NearRig("memory") as local, rig_of(*[host] * count) as rig:
        for each in (local, rig):
            each.fill()
        np.testing.assert_allclose(rig.score(150), local.score(150), rtol=1e-6)
        np.testing.assert_array_equal(rig.read(rig.units[0]), local.read(rig.units[0]))
        assert host.ledger.used_bytes > 0
    assert host.ledger.used_bytes == 0


def test_a_lost_connection_keeps_the_pool_and_a_lost_pool_is_refused(host: DeviceHost) -> None:
    with rig_of(host) as rig:
        rig.fill()
        before = rig.score(150)
        device = rig.store.devices[0]
        assert isinstance(device, TcpDevice)
        for channel in (device.scores, device.writes):
            channel.wake()
        with pytest.raises(ScorerError):
            rig.score(150)
        rig.store.scorer.ensure_alive()
        np.testing.assert_array_equal(rig.score(150), before)
        with host._lock:
            host._drop(next(iter(host._pools.values())))
        with pytest.raises(ScorerError):
            rig.score(150)
        for _ in range(2):
            with pytest.raises(PoolLostError, match="lost"):
                rig.store.scorer.ensure_alive()


def test_who_has_no_key_or_talks_nonsense_gets_nowhere(host: DeviceHost) -> None:
    with pytest.raises(HelloError, match="key"):
        rig_of(host, key=bytes(32))
    random = np.random.default_rng(0)
    address = ("127.0.0.1", int(host.address.rpartition(":")[2]))
    for attempt in range(20):
        with socket.create_connection(address, timeout=20) as sock:
            if attempt % 2:  # with the key, and nonsense behind it
                greet(sock, KEY, time.monotonic() + 20)
            with contextlib.suppress(OSError):  # it was refused by then
                sock.sendall(random.bytes(int(random.integers(38, 400))))
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    with rig_of(host) as rig:
        rig.fill()
        np.testing.assert_allclose(rig.score(150), rig.expected(150), rtol=0.06, atol=1e-3)
