"""Devices over TLS: the same scores; other certificates, and who speaks none, are refused."""

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.core.errors import ConfigError
from penstock.methods.hillinfer.near_storage.channel import FramedChannel, ScorerError
from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
from penstock.methods.hillinfer.near_storage.hello import HelloError
from penstock.methods.hillinfer.near_storage.tcp_device import TcpDevice
from penstock.methods.hillinfer.near_storage.tls import Identity, TlsConnection, TlsError, Trust
from penstock.methods.hillinfer.policy import HillInfer
from penstock.testing.near_rig import NearRig
from tests.methods.hillinfer.test_tcp_devices import KEY


class Pair(NamedTuple):
    certificate: Path
    key: Path


def pair(folder: Path, name: str, address: str = "127.0.0.1") -> Pair:
    """A certificate that signs itself, for an address."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    made = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ))  # fmt: skip
    return made


def identity_of(made: Pair) -> Identity:
    return Identity.of(str(made.certificate), str(made.key))


def rig_of(host: DeviceHost, trust: str = "", key: bytes = KEY) -> NearRig:
    return NearRig(
        "memory", devices=f"tcp://{host.address}", key=key,
        trust=Trust.of(trust) if trust else None,
    )  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Pair:
    return pair(tmp_path, "mine")


@pytest.fixture
def host(tmp_path: Path, mine: Pair) -> Iterator[DeviceHost]:
    with DeviceHost(KEY, disk=str(tmp_path), identity=identity_of(mine)) as host:
        yield host


def test_hosts_score_over_tls_as_a_local_device(host: DeviceHost, mine: Pair) -> None:
    for trust in (f"file:{mine.certificate}", identity_of(mine).fingerprint):
        with NearRig("memory") as local, rig_of(host, trust) as rig:
            for each in (local, rig):
                each.fill()
            expected = local.score(150)
            np.testing.assert_allclose(rig.score(150), expected, rtol=1e-6)
            np.testing.assert_array_equal(rig.read(rig.units[0]), local.read(rig.units[0]))
            device = rig.store.devices[0]
            assert isinstance(device, TcpDevice)
            assert "TLS on the way" in rig.store.describe()
            assert isinstance(device.reads, FramedChannel)
            assert isinstance(device.reads.frames.connection, TlsConnection)
            device.scores.wake()
            with pytest.raises(ScorerError):
                rig.score(150)
            rig.store.scorer.ensure_alive()
            np.testing.assert_allclose(rig.score(150), expected, rtol=1e-6)


def test_others_are_refused(host: DeviceHost, mine: Pair, tmp_path: Path) -> None:
    other, elsewhere = pair(tmp_path, "other"), pair(tmp_path, "elsewhere", "192.0.2.1")
    trust = f"file:{mine.certificate}"
    with pytest.raises(TlsError, match="not trusted"):
        rig_of(host, f"file:{other.certificate}")
    with pytest.raises(TlsError, match=identity_of(mine).fingerprint):
        rig_of(host, identity_of(other).fingerprint)
    with pytest.raises(HelloError, match="key"):
        rig_of(host, trust, key=bytes(32))  # a certificate is no key
    with pytest.raises(ScorerError):
        rig_of(host)  # which speaks no TLS
    with DeviceHost(KEY, disk=str(tmp_path)) as plain, pytest.raises(TlsError, match="no TLS"):
        rig_of(plain, trust)
    with (
        DeviceHost(KEY, disk=str(tmp_path), identity=identity_of(elsewhere)) as moved,
        pytest.raises(TlsError, match="not trusted"),
    ):
        rig_of(moved, f"file:{elsewhere.certificate}")  # for another address


def test_what_is_no_certificate_is_said(mine: Pair, tmp_path: Path) -> None:
    for text in ("file:" + str(mine.key), f"file:{tmp_path}/none", "sha256:12", "mine.pem"):
        with pytest.raises(ConfigError):
            Trust.of(text)
    with pytest.raises(ConfigError, match="certificate"):
        Identity.of(str(mine.certificate), str(pair(tmp_path, "other").key))
    with pytest.raises(ConfigError, match="device_tls"):
        HillInfer(device_tls="sha256:12")
