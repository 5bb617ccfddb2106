"""Keys from files, the environment and the keyring; no message ever shows one."""

import base64
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import ConfigError, StorageError
from penstock.storage.documents.key_sources import make_key_file, own_key, read_key

KEY = bytes(range(200, 232))
TEXTS = [
    KEY.hex(),
    KEY.hex().upper() + "\n",
    base64.b64encode(KEY).decode(),
    base64.urlsafe_b64encode(KEY).decode().rstrip("=") + "\r\n",
]
NO_KEYS = [
    "", "correct horse battery staple", KEY.hex()[:-1], KEY.hex() + "00", "g" * 64, " " * 64,
    base64.b64encode(KEY[:-1]).decode(), base64.b64encode(KEY + b"0").decode(), "é" * 32, "٣" * 64,
    "\0" * 64, KEY.hex()[:31] + " " + KEY.hex()[32:],
]  # fmt: skip


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


def refused(source: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key(source, environment=environment or {})
    message = str(caught.value)
    assert caught.value.__cause__ is None  # whose message might show what it could not read
    assert "\n" not in message
    return message


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str, tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, text.encode()), environment={}) == KEY
    assert read_key("env:PASS", environment={"PASS": text}) == KEY


def test_raw_file(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path, KEY), environment={}) == KEY
    link = tmp_path / "link"  # mounted secrets are links
    link.symlink_to(tmp_path / "key")
    assert read_key(f"file:{link}", environment={}) == KEY


@pytest.mark.parametrize("text", NO_KEYS)
def test_no_key(text: str, tmp_path: Path) -> None:
    for message in (
        refused(key_file(tmp_path, text.encode())), refused("env:PASS", {"PASS": text})
    ):  # fmt: skip
        assert "32 random bytes" in message
        assert not text.strip(" \0") or text not in message


def test_typed_text_of_32_letters_is_no_raw_key(tmp_path: Path) -> None:
    assert "never a passphrase" in refused(key_file(tmp_path, b"p" * 31 + b"\n"))
    assert "never a passphrase" in refused(key_file(tmp_path, KEY.hex()[:32].encode()))
    assert "never a passphrase" in refused(key_file(tmp_path, KEY + b"\n"))
    assert "never a passphrase" in refused(key_file(tmp_path, KEY * 1000))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_file_open_to_others(mode: int, tmp_path: Path) -> None:
    assert "chmod 600" in refused(key_file(tmp_path, KEY, mode))


def test_places_without_a_key(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "none", tmp_path / "pipe", "a\0b"):
        assert "key file" in refused(f"file:{place}")
    assert "NONE" in refused("env:NONE", {"OTHER": KEY.hex()})


def test_a_key_in_place_of_a_source_is_not_shown() -> None:
    for text in TEXTS:
        for prefix in ("", "file:", "env:", "keyring:", "key:", "keyring:a/"):
            assert text.strip() not in refused(prefix + text)


@pytest.mark.parametrize("source", ["", "file", "file:", "env:", "keyring:a", "keyring:/a", "x:y"])
def test_no_source(source: str) -> None:
    assert "keyring:SERVICE/USER" in refused(source)


def test_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_password(service: str, user: str) -> str | None:
        if service == "locked":
            raise RuntimeError(f"cannot decrypt {KEY.hex()}")
        return {"penstock": KEY.hex(), "other/one": "passphrase"}.get(service)

    fake: Any = SimpleNamespace(get_password=get_password)
    monkeypatch.setitem(sys.modules, "keyring", fake)
    assert read_key("keyring:penstock/me", environment={}) == KEY
    message = refused("keyring:other/one/me")
    assert "is no key" in message
    assert "passphrase" not in message
    assert "keyring set" in refused("keyring:none/me")
    message = refused("keyring:locked/me")
    assert "RuntimeError" in message
    assert KEY.hex() not in message
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert "pip install 'penstock[keyring]'" in refused("keyring:penstock/me")


def test_new_key_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    old = os.umask(0)
    try:
        make_key_file(one)
    finally:
        os.umask(old)
    make_key_file(two)
    keys = [read_key(f"file:{path}", environment={}) for path in (one, two)]
    assert keys[0] != keys[1]
    assert one.stat().st_mode & 0o777 == 0o600
    content = one.read_bytes()
    with pytest.raises(ConfigError, match="there already"):
        make_key_file(one)
    assert one.read_bytes() == content


def test_new_key_file_where_none_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="there already"):
        make_key_file(link)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="no folder"):
        make_key_file(tmp_path / "none" / "key")
    with pytest.raises(StorageError):
        make_key_file(Path("a\0b"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        make_key_file(tmp_path / "key")
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_key_of_ones_own_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "kept.key"
    key = own_key(path)
    assert own_key(path) == key == read_key(f"file:{path}", environment={})
    assert [each.name for each in tmp_path.iterdir()] == ["kept.key"]
