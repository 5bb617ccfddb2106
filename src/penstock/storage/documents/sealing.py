"""Sealer: checksums, or encryption with authentication, of units, chunks of blobs and texts."""

import hashlib
import hmac
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from typing_extensions import override

from penstock.core.errors import DocumentKeyError
from penstock.storage.file import ByteArray

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_UNIT_BITS = 40
"""A unit's seed is layer * 2**40 + unit."""


class Sealer(ABC):
    """Seals what is stored and opens what is read.

    Attributes:
        seal_bytes: of one unit's or chunk's seal
        key_check: tells a wrong key from damage, hex; None without a key
    """

    seal_bytes: int
    key_check: str | None

    @abstractmethod
    def seal_units(
        self, layer: int, first_unit: int, padded: ByteArray
    ) -> tuple[ByteArray, ByteArray]:
        """Seal the units [num_units, padded_bytes] of units from `first_unit` on.

        Returns:
            The bytes to store [num_units, padded_bytes], and the seals [num_units, seal_bytes].
        """

    @abstractmethod
    def open_units(
        self, layer: int, first_unit: int, padded: ByteArray, seals: ByteArray
    ) -> list[int]:
        """Check stored units [num_units, padded_bytes], and decrypt them in place.

        Returns:
            Units that are not what was sealed; their bytes are zeroed.
        """

    @abstractmethod
    def seal_chunk(self, place: bytes, chunk: bytes) -> tuple[bytes, bytes]:
        """Seal a chunk of a blob; `place` says which. Returns the bytes to store and the seal."""

    @abstractmethod
    def open_chunk(self, place: bytes, stored: bytes, seal: bytes) -> bytes | None:
        """The chunk, or None when it is not what was sealed."""

    @abstractmethod
    def seal_text(self, generation: int, text: bytes) -> bytes:
        """Encrypt a part of the manifest. With a key only."""

    @abstractmethod
    def open_text(self, generation: int, sealed: bytes) -> bytes | None:
        """Decrypt a part of the manifest; None when it is not what was sealed."""

    @abstractmethod
    def tag(self, text: bytes) -> str | None:
        """What proves that `text` was written with the key, hex; None without a key."""

    def is_tag(self, text: bytes, tag: str) -> bool:
        """Whether `tag` proves it; takes the same time whatever differs."""
        own = self.tag(text)
        return own is not None and hmac.compare_digest(own.encode(), tag.encode())


class Checksums(Sealer):
    """xxh3_64 of what is stored, seeded by its place: finds accidents, and stops no attacker."""

    seal_bytes = 8
    key_check = None

    @override
    def seal_units(
        self, layer: int, first_unit: int, padded: ByteArray
    ) -> tuple[ByteArray, ByteArray]:
        """Rows as they are, and their checksums, little-endian."""
        sums = np.array(_unit_sums(layer, first_unit, padded), dtype="<u8")
        return padded, sums.view(np.uint8).reshape(-1, 8)

    @override
    def open_units(
        self, layer: int, first_unit: int, padded: ByteArray, seals: ByteArray
    ) -> list[int]:
        """Compare the checksums."""
        sums = _unit_sums(layer, first_unit, padded)
        stored = np.ascontiguousarray(seals).view("<u8").reshape(-1).tolist()
        if sums == stored:
            return []
        wrong = [i for i, (new, old) in enumerate(zip(sums, stored, strict=True)) if new != old]
        padded[wrong] = 0
        return [first_unit + i for i in wrong]

    @override
    def seal_chunk(self, place: bytes, chunk: bytes) -> tuple[bytes, bytes]:
        """The chunk as it is, and its checksum."""
        return chunk, _chunk_sum(place, chunk)

    @override
    def open_chunk(self, place: bytes, stored: bytes, seal: bytes) -> bytes | None:
        """The chunk, if its checksum fits."""
        return stored if _chunk_sum(place, stored) == seal else None

    @override
    def seal_text(self, generation: int, text: bytes) -> bytes:
        """Never called: a manifest without a key is plain."""
        raise AssertionError("there is no key")

    @override
    def open_text(self, generation: int, sealed: bytes) -> bytes | None:
        """Never called: a manifest without a key is plain."""
        raise AssertionError("there is no key")

    @override
    def tag(self, text: bytes) -> str | None:
        """None."""
        return None


class Encryption(Sealer):
    """AES-256-GCM with a key of the document's own; a seal is the nonce and the tag.

    Nonces are 96 random bits: a counter would have to survive a crash in the middle of an append,
    and the same nonce for two texts gives both away. Each document has a key of its own, so that
    2**32 units of one document meet with a chance of 2**-33, whatever other documents hold.
    """

    seal_bytes = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes, document_id: bytes) -> None:
        """Derive the document's keys (HKDF-SHA256, salted with its number).

        Args:
            key: 32 bytes.
            document_id: 16 bytes.

        Raises:
            DocumentKeyError: the key's length is wrong, or `cryptography` is not installed.
        """
        self._aes, invalid = _cipher(_derive(key, document_id, b"data"))
        self._refusals = (invalid, ValueError)  # ValueError: too short to be anything
        self._tag_key = _derive(key, document_id, b"manifest")
        self._document_id = document_id
        self._unit_about = self._about(b"unit", b"")
        self.key_check = _derive(key, document_id, b"check")[:8].hex()

    @override
    def seal_units(
        self, layer: int, first_unit: int, padded: ByteArray
    ) -> tuple[ByteArray, ByteArray]:
        """Encrypt into new memory."""
        padded_bytes = padded.shape[1]
        stored = np.empty_like(padded)
        seals = np.empty((len(padded), self.seal_bytes), dtype=np.uint8)
        nonces = os.urandom(_NONCE_BYTES * len(padded))
        seals[:, :_NONCE_BYTES] = np.frombuffer(nonces, np.uint8).reshape(-1, _NONCE_BYTES)
        for i, one in enumerate(padded):
            nonce = nonces[_NONCE_BYTES * i : _NONCE_BYTES * (i + 1)]
            whole = self._aes.encrypt(nonce, one.data, self._unit(layer, first_unit + i))
            stored[i] = np.frombuffer(whole, np.uint8, padded_bytes)
            seals[i, _NONCE_BYTES:] = np.frombuffer(whole, np.uint8, _TAG_BYTES, padded_bytes)
        return stored, seals

    @override
    def open_units(
        self, layer: int, first_unit: int, padded: ByteArray, seals: ByteArray
    ) -> list[int]:
        """Decrypt in place; a unit whose tag does not fit is zeroed."""
        size, seal_bytes = padded.shape[1], self.seal_bytes
        flat, marks = padded.reshape(-1).data, seals.tobytes()
        wrong = []
        for i in range(len(padded)):
            one = flat[size * i : size * (i + 1)]
            mark = marks[seal_bytes * i : seal_bytes * (i + 1)]
            whole = b"".join((one, mark[_NONCE_BYTES:]))
            text = self._decrypt(mark[:_NONCE_BYTES], whole, self._unit(layer, first_unit + i))
            if text is None:
                padded[i] = 0
                wrong.append(first_unit + i)
            else:
                one[:] = text
        return wrong

    @override
    def seal_chunk(self, place: bytes, chunk: bytes) -> tuple[bytes, bytes]:
        """Encrypt under a new nonce."""
        nonce = os.urandom(_NONCE_BYTES)
        whole = self._aes.encrypt(nonce, chunk, self._about(b"blob", place))
        return whole[:-_TAG_BYTES], nonce + whole[-_TAG_BYTES:]

    @override
    def open_chunk(self, place: bytes, stored: bytes, seal: bytes) -> bytes | None:
        """Decrypt."""
        whole = stored + seal[_NONCE_BYTES:]
        return self._decrypt(seal[:_NONCE_BYTES], whole, self._about(b"blob", place))

    @override
    def seal_text(self, generation: int, text: bytes) -> bytes:
        """Nonce, encrypted text, tag."""
        nonce = os.urandom(_NONCE_BYTES)
        about = self._about(b"text", generation.to_bytes(8, "little"))
        return nonce + self._aes.encrypt(nonce, text, about)

    @override
    def open_text(self, generation: int, sealed: bytes) -> bytes | None:
        """Decrypt."""
        about = self._about(b"text", generation.to_bytes(8, "little"))
        return self._decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about)

    @override
    def tag(self, text: bytes) -> str | None:
        """HMAC-SHA256."""
        return hmac.new(self._tag_key, text, hashlib.sha256).hexdigest()

    def _unit(self, layer: int, unit: int) -> bytes:
        return self._unit_about + (layer << 64 | unit).to_bytes(12, "little")

    def _about(self, kind: bytes, place: bytes) -> bytes:
        """What a seal is bound to besides its bytes."""
        return kind + self._document_id + place

    def _decrypt(self, nonce: bytes, whole: bytes | memoryview, about: bytes) -> bytes | None:
        try:
            return self._aes.decrypt(nonce, whole, about)
        except self._refusals:
            return None


def make_sealer(key: bytes | None, document_id: str, key_check: str | None) -> Sealer:
    """What opens the seals of a stored document.

    Args:
        document_id: 32 hex digits.
        key_check: of its manifest; None when the document is not encrypted.

    Raises:
        DocumentKeyError: no key, the wrong key, or a key for a document without one.
        ValueError: the number is not hex.
    """
    if key_check is None:
        if key is not None:
            raise DocumentKeyError("the document is not encrypted; open it without a key")
        return Checksums()
    if key is None:
        raise DocumentKeyError("the document is encrypted; give its key")
    sealer = Encryption(key, bytes.fromhex(document_id))
    if sealer.key_check != key_check:
        raise DocumentKeyError("the key is not that of the document; give the right one")
    return sealer


def new_sealer(key: bytes | None, document_id: str) -> Sealer:
    """What seals a new document.

    Raises:
        DocumentKeyError: the key's length is wrong, or `cryptography` is not installed.
    """
    return Checksums() if key is None else Encryption(key, bytes.fromhex(document_id))


def _unit_sums(layer: int, first_unit: int, padded: ByteArray) -> list[int]:
    digest, step = xxhash.xxh3_64_intdigest, padded.shape[1]
    flat = padded.reshape(-1).data
    seed = (layer << _UNIT_BITS) + first_unit
    return [digest(flat[step * i : step * (i + 1)], seed + i) for i in range(len(padded))]


def _chunk_sum(place: bytes, chunk: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(chunk, xxhash.xxh3_64_intdigest(place)).to_bytes(8, "little")


def _derive(key: bytes, document_id: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869), 32 bytes."""
    if len(key) != KEY_BYTES:
        raise DocumentKeyError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    extracted = hmac.new(document_id, key, hashlib.sha256).digest()
    info = b"penstock-document-1 " + purpose + b"\x01"
    return hmac.new(extracted, info, hashlib.sha256).digest()


def _cipher(key: bytes) -> "tuple[AESGCM, type[Exception]]":
    """The cipher, and what it raises for a tag that does not fit."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise DocumentKeyError(
            "encryption needs the package cryptography; run pip install cryptography"
        ) from error
    return AESGCM(key), InvalidTag
