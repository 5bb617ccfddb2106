"""--devices and what goes with it: the policy that it makes, and what is refused."""

from pathlib import Path

import pytest

from penstock.cli.device import serve_device_command
from penstock.cli.generate import reached, with_devices
from penstock.core.errors import ConfigError
from penstock.methods.hillinfer.policy import HillInfer

TWO = "tcp://a:1,tcp://b:2"


def test_options_of_devices_make_a_policy() -> None:
    assert with_devices("kvswap", None, None) == "kvswap"
    assert with_devices("hillinfer", None, None, memory="64MiB") == HillInfer(device_memory="64MiB")
    assert with_devices("hillinfer", TWO, "key", 2, "1GiB", "tls.pem") == HillInfer(
        devices=TWO, device_key="file:key", copies=2, device_memory="1GiB",
        device_tls="file:tls.pem",
    )  # fmt: skip
    made = with_devices("hillinfer", TWO, "key", tls="sha256:00")
    assert isinstance(made, HillInfer)
    assert made.device_tls == "sha256:00"


@pytest.mark.parametrize(("options", "said"), [
    ({"policy": "kvswap", "memory": "64MiB"}, "--device-memory wants"),
    ({"policy": "kvswap", "devices": TWO}, "--devices wants"),
    ({"policy": "hillinfer", "copies": 2}, "--device-copies wants"),
    ({"policy": "hillinfer", "tls": "x"}, "--device-tls wants"),
])  # fmt: skip
def test_options_without_what_they_want_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_devices(**({"devices": None, "key_file": None} | options))  # type: ignore[arg-type]


def test_actors_are_not_asked_for_tls() -> None:
    with pytest.raises(ConfigError, match="speak without TLS"), reached("ray:2", "key", "tls.pem"):
        pass


def test_a_certificate_wants_its_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="go together"):
        serve_device_command(str(key), tls_certificate=str(key))
