"""Documents with a key: nothing shows, no nonce comes twice, and every wrong key is told."""

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DocumentDamagedError, DocumentKeyError
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument, read_summary
from penstock.storage.documents.sealing import Encryption
from penstock.testing.crash_disk import CrashDisk

KEY = bytes(range(32))
SHAPE = Shape(layers=3, unit_bytes=5000)
TITLE = "The quarterly figures of a firm"
MARK = b"PLAINTEXT-THAT-MUST-NOT-BE-FOUND"


def store(folder: Path, key: bytes | None) -> None:
    with DocumentWriter.create(folder, SHAPE, key=key) as writer:
        for layer in range(SHAPE.layers):
            writer.append(layer, np.full((1, SHAPE.padded_bytes), layer, dtype=np.uint8))
        about, blobs = {"title": TITLE}, {"tokens": b"abc" * 600_000}
        writer.commit(identity={"model": "m"}, about=about, blobs=blobs)


def test_plaintext_is_not_found_with_a_key(tmp_path: Path) -> None:
    for key in (None, KEY):
        folder = tmp_path / str(key is None)
        data = np.tile(np.frombuffer(MARK, np.uint8), SHAPE.padded_bytes // len(MARK) * 2)
        with DocumentWriter.create(folder, SHAPE, key=key) as writer:
            for layer in range(SHAPE.layers):
                writer.append(layer, data.reshape(2, -1))
            about, identity = {"title": MARK.decode()}, {MARK.decode(): "m"}
            writer.commit(identity=identity, about=about, blobs={"tokens": MARK * 9})
        found = {file.name for file in folder.iterdir() if MARK in file.read_bytes()}
        plain = {"kv-0.units", "kv-1.units", "kv-2.units", "blob-1-tokens", "manifest.json"}
        assert found == (set() if key else plain)


def test_keys(tmp_path: Path) -> None:
    sealed, plain = tmp_path / "sealed", tmp_path / "plain"
    store(sealed, KEY)
    store(plain, None)
    for action in (StoredDocument.open, DocumentWriter.extend):
        with pytest.raises(DocumentKeyError, match="give its key"):
            action(sealed)
        with pytest.raises(DocumentKeyError, match="not that of the document"):
            action(sealed, key=KEY[::-1])
        with pytest.raises(DocumentKeyError, match="32 bytes"):
            action(sealed, key=b"short")
        with pytest.raises(DocumentKeyError, match="not encrypted"):
            action(plain, key=KEY)
    summary = read_summary(sealed)
    assert (summary.about, summary.identity, summary.num_units) == (None, None, 1)
    opened = read_summary(sealed, KEY)
    assert opened.about == {"title": TITLE}
    assert read_summary(plain, KEY).identity == {"model": "m"}
    assert opened.data_bytes == 3 * SHAPE.padded_bytes
    assert opened.side_bytes == 1_800_000 + 3 * 28
    with pytest.raises(DocumentKeyError, match="not that"):
        read_summary(sealed, bytes(32))
    with pytest.raises(DocumentKeyError, match="32 bytes"):
        DocumentWriter.create(tmp_path / "new", SHAPE, key=b"")
    assert not (tmp_path / "new").exists()


def test_a_missing_library_is_a_key_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(DocumentKeyError, match="pip install cryptography"):
        DocumentWriter.create(tmp_path / "new", SHAPE, key=KEY)
    store(tmp_path / "plain", None)  # needs none of it


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_no_nonce_twice_whatever_is_written_again(key: bytes | None) -> None:
    disk, folder = CrashDisk(), Path("/disk/document")
    same = np.zeros((3, SHAPE.padded_bytes), dtype=np.uint8)
    seen: list[bytes] = []
    DocumentWriter.create(folder, SHAPE, key=key, disk=disk).commit(identity={}, about={}, blobs={})
    for _ in range(4):
        disk = disk.kill()  # the tail of the last append is there, and is written again
        writer = DocumentWriter.extend(folder, key=key, disk=disk)
        for layer in range(SHAPE.layers):
            writer.append(layer, same)
            content = disk.contents(folder.name)[f"kv-{layer}.units"]
            step = SHAPE.padded_bytes
            seen += [content[i * step : (i + 1) * step] for i in range(3)]
    assert len(set(seen)) == (len(seen) if key else 1)


def test_a_seal_is_bound_to_its_place() -> None:
    own, other = Encryption(KEY, bytes(16)), Encryption(KEY, bytes(15) + b"x")
    rows = np.arange(2 * 4096).astype(np.uint8).reshape(2, 4096)
    stored, seals = own.seal_units(1, 5, rows)
    for sealer, layer, first, damaged in (
        (own, 2, 5, [5, 6]), (own, 1, 6, [6, 7]), (other, 1, 5, [5, 6]), (own, 1, 5, []),
    ):  # fmt: skip
        found = stored.copy()
        assert sealer.open_units(layer, first, found, seals) == damaged
        assert (found == (0 if damaged else rows)).all()


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_blob_of_another_attempt_at_the_same_commit_is_damage(key: bytes | None) -> None:
    base, folder, found = CrashDisk(), Path("/disk/document"), []
    with DocumentWriter.create(folder, SHAPE, key=key, disk=base) as writer:
        writer.commit(identity={}, about={}, blobs={})
    for payload in (b"one", b"two"):
        disk = base.kill()
        with DocumentWriter.extend(folder, key=key, disk=disk) as writer:
            writer.commit(identity={}, about={}, blobs={"tokens": payload})
        found.append(disk.contents(folder.name))
    mixed = CrashDisk()
    mixed.put(folder.name, found[0] | {"blob-2-tokens": found[1]["blob-2-tokens"]})
    with (
        StoredDocument.open(folder, key=key, disk=mixed) as document,
        pytest.raises(DocumentDamagedError, match="tokens"),
    ):
        document.blob("tokens")
