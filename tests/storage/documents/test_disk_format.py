"""The format on disk: the document's worked example is real, and manifests are checked.

Run as a script, this file writes the example into docs/disk_format.md.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import (
    ConfigError,
    DocumentDamagedError,
    DocumentError,
    DocumentFormatError,
)
from penstock.storage.documents import DocumentWriter, Shape, StoredDocument, read_summary
from penstock.storage.documents.manifest import FORMAT, canonical, read_manifest
from penstock.storage.documents.sealing import Checksums
from penstock.testing.crash_disk import CrashDisk
from penstock.testing.document_state import read_state

PAGE = Path(__file__).parents[3] / "docs" / "disk_format.md"
EXAMPLE = re.compile(r"(?<=<!-- example -->\n```\n).*?(?=```\n)", re.DOTALL)
FOLDER = Path("/disk/document")
KEY = bytes(range(32))
SHOWN_BYTES = 32
LINE = 96


@contextmanager
def fixed_chance() -> Iterator[None]:
    """The same document number and nonces each time."""
    numbers, digits = os.urandom, secrets.token_hex
    count = iter(range(1, 1000))
    os.urandom = lambda size: next(count).to_bytes(size, "big")
    secrets.token_hex = lambda nbytes=None: "00112233445566778899aabbccddeeff"
    try:
        yield
    finally:
        os.urandom, secrets.token_hex = numbers, digits


def tiny_document(key: bytes | None) -> dict[str, bytes]:
    """The files of a document of one layer with two units of 8 bytes."""
    disk = CrashDisk()
    rows = np.zeros((2, 4096), dtype=np.uint8)
    rows[:, :8] = np.frombuffer(b"unit  0 unit  1 ", np.uint8).reshape(2, 8)
    with (
        fixed_chance(),
        DocumentWriter.create(FOLDER, Shape(1, 8), key=key, disk=disk) as writer,
    ):
        writer.append(0, rows)
        blobs = {"tokens": bytes([1, 0, 0, 0, 2, 0, 0, 0])}
        writer.commit(identity={"model": "tiny"}, about={"title": "A letter"}, blobs=blobs)
    return disk.contents(FOLDER.name)


def shown(name: str, content: bytes) -> list[str]:
    head = f"{name}  ({len(content)} bytes)"
    if name == "manifest.json":
        text = content.decode()
        return [head, *("  " + text[i : i + LINE].rstrip() for i in range(0, len(text), LINE))]
    step, length = (4096, SHOWN_BYTES) if name.endswith(".units") else (1 << 20, 1 << 20)
    lines = []
    for begin in range(0, len(content), step):
        part = content[begin : begin + length]
        lines += [
            f"  {begin + i:04x}  {part[i : i + 16].hex(' ')}" for i in range(0, len(part), 16)
        ]
    return [head, *lines]


def example() -> str:
    """Both documents, file by file."""
    lines = []
    for title, key in (("Without a key", None), ("With the key 00 01 02 ... 1f", KEY)):
        lines += [f"{title}:", ""]
        for name, content in sorted(tiny_document(key).items()):
            lines += [*shown(name, content), ""]
    return "\n".join(lines).rstrip() + "\n"


def test_the_example_is_the_real_one() -> None:
    [written] = EXAMPLE.findall(PAGE.read_text())
    assert written == example(), "run this file as a script"


def test_the_page_says_how_the_checks_are_made() -> None:
    """What the page says, computed without the store."""
    files = tiny_document(None)
    whole = json.loads(files["manifest.json"])
    body = whole["manifest"]
    for unit in range(2):
        content = files["kv-0.units"][4096 * unit : 4096 * (unit + 1)]
        stored = files["seals-1"][8 * unit : 8 * (unit + 1)]
        assert stored == xxhash.xxh3_64_intdigest(content, (0 << 40) + unit).to_bytes(8, "little")
    row = np.arange(4096).astype(np.uint8)
    _, [seal] = Checksums().seal_units(3, 5, row[None])
    sum_ = xxhash.xxh3_64_intdigest(row.tobytes(), (3 << 40) + 5)
    assert seal.tobytes() == sum_.to_bytes(8, "little")
    assert body["seals"][2] == hashlib.sha256(files["seals-1"]).hexdigest()
    place = (1).to_bytes(8, "little") + (0).to_bytes(8, "little") + b"tokens"
    chunk, stored = files["blob-1-tokens"][:8], files["blob-1-tokens"][8:]
    sum_ = xxhash.xxh3_64_intdigest(chunk, xxhash.xxh3_64_intdigest(place))
    assert stored == sum_.to_bytes(8, "little")
    assert body["blobs"]["tokens"] == [1, 8, hashlib.sha256(stored).hexdigest()]
    text = json.dumps({"format": FORMAT, "manifest": body}, sort_keys=True, separators=(",", ":"))
    assert whole["checksum"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_page_says_how_the_keys_are_made() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    files = tiny_document(KEY)
    whole = json.loads(files["manifest.json"])
    body = whole["manifest"]
    number = bytes.fromhex(body["document_id"])

    def derived(purpose: bytes) -> bytes:
        return HKDF(SHA256(), 32, number, b"penstock-document-1 " + purpose).derive(KEY)

    seal = files["seals-1"][28:56]
    about = b"unit" + number + (1).to_bytes(8, "little") + (0).to_bytes(4, "little")
    stored = files["kv-0.units"][4096:]
    row = AESGCM(derived(b"data")).decrypt(seal[:12], stored + seal[12:], about)
    assert row == b"unit  1 ".ljust(4096, b"\0")
    assert body["key_check"] == derived(b"check")[:8].hex()
    text = canonical({"format": FORMAT, "manifest": body})
    assert whole["tag"] == hmac.new(derived(b"manifest"), text, "sha256").hexdigest()


def opened(manifest: bytes, key: bytes | None = None) -> StoredDocument:
    disk = CrashDisk()
    disk.put(FOLDER.name, tiny_document(key) | {"manifest.json": manifest})
    return StoredDocument.open(FOLDER, key=key, disk=disk)


def resealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest that somebody wrote with a right checksum."""
    whole = json.loads(tiny_document(None)["manifest.json"])
    change(whole["manifest"])
    signed = {"format": FORMAT, "manifest": whole["manifest"]}
    checksum = hashlib.sha256(canonical(signed)).hexdigest()
    return canonical(signed | {"checksum": checksum}) + b"\n"


def test_other_formats_are_refused_by_name() -> None:
    raw = tiny_document(None)["manifest.json"]
    with pytest.raises(DocumentFormatError, match="penstock-document-2; this Penstock reads"):
        opened(raw.replace(b"penstock-document-1", b"penstock-document-2"))
    with pytest.raises(DocumentFormatError, match="penstock-document-12"):
        opened(b'{"format": "penstock-document-12"}')
    for foreign in (b"[]", b'{"name": "extension"}', b'{"format": 1}', b'{"format": "other"}'):
        with pytest.raises(DocumentFormatError, match="not of a Penstock"):
            opened(foreign)


def test_what_is_no_manifest_is_damage() -> None:
    raw = tiny_document(None)["manifest.json"]
    for bad in (
        b"", b"{", b"\xff", b"NaN", raw[:-1], raw + b"\n", raw.replace(b",", b", ", 1),
        b"[" * 100_000, b"1" * 10_000, raw[: len(raw) // 2], b" " * (17 << 20),
        b'{"format":"penstock-document-1","manifest":3}\n',
    ):  # fmt: skip
        with pytest.raises(DocumentDamagedError, match="manifest") as caught:
            opened(bad)
        assert caught.value.what == "manifest"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("layers"),
        lambda body: body.update(layers=0),
        lambda body: body.update(layers=True),
        lambda body: body.update(layers=10**30),
        lambda body: body.update(num_units=-1),
        lambda body: body.update(row_bytes=4097),
        lambda body: body.update(document_id="../../../../../../../../etc/xxxx"),
        lambda body: body.update(document_id=7),
        lambda body: body.update(blobs={"../../etc/passwd": [1, 8, "x"]}),
        lambda body: body.update(blobs={"tokens": [1, 8]}),
        lambda body: body.update(blobs={"tokens": ["1", 8, "x"]}),
        lambda body: body.update(blobs=3),
        lambda body: body.update(seals=[1, 16, None]),
        lambda body: body.update(identity=[]),
        lambda body: body.update(identity={"model": 3}),
        lambda body: body.update(about=None),
        lambda body: body.update(num_units=1 << 61),
        lambda body: body.update(num_units=3),
        lambda body: body.update(layers=2),
    ],
)
def test_a_manifest_that_lies_is_an_error(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(DocumentDamagedError):
        opened(resealed(change))
    opened(resealed(lambda body: None)).close()


def test_a_manifest_cannot_be_forged_without_the_key() -> None:
    raw = tiny_document(KEY)["manifest.json"]
    whole = json.loads(raw)
    whole["manifest"]["num_units"] = 1
    signed = {"format": FORMAT, "manifest": whole["manifest"]}
    whole["checksum"] = hashlib.sha256(canonical(signed)).hexdigest()
    with pytest.raises(DocumentDamagedError, match="without the key"):
        opened(canonical(whole) + b"\n", KEY)
    del whole["tag"]
    with pytest.raises(DocumentDamagedError, match="unknown fields"):
        opened(canonical(whole) + b"\n", KEY)
    plain = tiny_document(None)["manifest.json"]
    with pytest.raises(DocumentError, match="not encrypted"):
        opened(plain, KEY)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_typed_error(raw: bytes) -> None:
    with pytest.raises((DocumentDamagedError, DocumentFormatError)):
        read_manifest(raw, None)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(about=st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=4), sealed=st.booleans())
def test_any_json_about_the_document_comes_back(about: dict[str, Any], sealed: bool) -> None:
    disk, key = CrashDisk(), KEY if sealed else None
    identity = {name: name for name in about}
    with DocumentWriter.create(FOLDER, Shape(1, 1), key=key, disk=disk) as writer:
        writer.commit(identity=identity, about=about, blobs={})
    summary = read_summary(FOLDER, key, disk=disk)
    assert (summary.about, summary.identity) == (about, identity)
    assert read_state(FOLDER, key=key, disk=disk).about == about


def test_a_manifest_that_would_be_too_long() -> None:
    disk = CrashDisk()
    with DocumentWriter.create(FOLDER, Shape(1, 1), disk=disk) as writer:
        with pytest.raises(ConfigError, match="keep `about` small"):
            writer.commit(identity={}, about={"x": "y" * (17 << 20)}, blobs={})
        with pytest.raises(AssertionError, match="plain JSON"):
            writer.commit(identity={}, about={"x": (1, 2)}, blobs={})
        writer.commit(identity={}, about={}, blobs={})
    assert read_summary(FOLDER, disk=disk).generation == 1


if __name__ == "__main__":
    PAGE.write_text(EXAMPLE.sub(lambda _: example(), PAGE.read_text()))
