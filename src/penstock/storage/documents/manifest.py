"""Manifest: what a committed generation of a document consists of, as checked canonical JSON."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError, DocumentDamagedError, DocumentFormatError
from penstock.storage.documents.sealing import Sealer, make_sealer

FORMAT = "penstock-document-1"
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 16 << 20
UNIT_ALIGN_BYTES = 4096
"""Every disk takes direct I/O in multiples of this."""

_FORMAT_PATTERN = re.compile(r"penstock-document-(\d{1,9})")
_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_HEX16 = re.compile(r"[0-9a-f]{32}")
_NUMBER_MAX = 1 << 62


@dataclass(frozen=True)
class Shape:
    """What all units of a document have in common.

    Attributes:
        layers: files of units
        unit_bytes: payload of one unit
    """

    layers: int
    unit_bytes: int

    def __post_init__(self) -> None:
        if not (1 <= self.layers < 1 << 16 and 1 <= self.unit_bytes <= 1 << 30):
            raise ConfigError(
                f"a document has 1 to 65535 layers and units of 1 byte to 1 GiB, not "
                f"{self.layers} layers of {self.unit_bytes} bytes"
            )

    @property
    def padded_bytes(self) -> int:
        """A unit's place on disk and in buffers: the payload padded to 4096 bytes."""
        return -(-self.unit_bytes // UNIT_ALIGN_BYTES) * UNIT_ALIGN_BYTES


@dataclass(frozen=True)
class SideFile:
    """A file beside the units: the seals or a blob.

    Attributes:
        generation: in which it was written; part of its name
        num_bytes: of its payload
        checksum: SHA-256 in hex, of the seals file or of a blob's seals
    """

    generation: int
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """A committed generation.

    Attributes:
        document_id: 32 hex digits, random
        num_units: in each layer
        identity: the caller's fingerprint fields; None when encrypted and read without the key
        about: the caller's JSON values; None likewise
    """

    document_id: str
    generation: int
    shape: Shape
    num_units: int
    seals: SideFile
    blobs: Mapping[str, SideFile]
    encrypted: bool
    identity: Mapping[str, str] | None
    about: Mapping[str, Any] | None

    @property
    def data_bytes(self) -> int:
        """Committed bytes of all the layers' files."""
        return self.shape.layers * self.num_units * self.shape.padded_bytes

    def side_names(self) -> set[str]:
        """Names of the files beside the units that this generation needs."""
        blobs = {blob_file(name, blob.generation) for name, blob in self.blobs.items()}
        return blobs | {seals_file(self.seals.generation)}


def units_file(layer: int) -> str:
    """Name of the file with the units of one layer."""
    return f"kv-{layer}.units"


def seals_file(generation: int) -> str:
    """Name of the file with the seals of all units."""
    return f"seals-{generation}"


def blob_file(name: str, generation: int) -> str:
    """Name of the file of a blob that was written in `generation`."""
    return f"blob-{generation}-{name}"


def is_blob_name(name: str) -> bool:
    """Letters, digits, "_", "." and "-", at most 100, beginning with a letter or digit."""
    return _BLOB_NAME.fullmatch(name) is not None


def canonical(value: object) -> bytes:
    """The one way to write a JSON value: ASCII, sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def write_manifest(manifest: Manifest, sealer: Sealer) -> bytes:
    """The bytes of manifest.json."""
    assert manifest.identity is not None
    assert manifest.about is not None
    private = {"about": dict(manifest.about), "identity": dict(manifest.identity)}
    body: dict[str, Any] = {
        "blobs": {name: _side_values(blob) for name, blob in manifest.blobs.items()},
        "document_id": manifest.document_id,
        "generation": manifest.generation,
        "layers": manifest.shape.layers,
        "num_units": manifest.num_units,
        "row_bytes": manifest.shape.padded_bytes,
        "seals": _side_values(manifest.seals),
        "unit_bytes": manifest.shape.unit_bytes,
    }
    if sealer.key_check is None:
        body |= private
    else:
        sealed = sealer.seal_text(manifest.generation, canonical(private))
        body["key_check"] = sealer.key_check
        body["private"] = base64.b64encode(sealed).decode("ascii")
    signed = {"format": FORMAT, "manifest": body}
    text = canonical(signed)
    whole = signed | {"checksum": hashlib.sha256(text).hexdigest()}
    if (tag := sealer.tag(text)) is not None:
        whole["tag"] = tag
    return canonical(whole) + b"\n"


def read_manifest(
    raw: bytes, key: bytes | None, *, peek: bool = False
) -> tuple[Manifest, Sealer | None]:
    """Check the bytes of manifest.json and take them apart.

    Args:
        peek: a key that is missing, or not needed, is no error; what it hides is None then.

    Returns:
        The manifest, and what opens its document's seals (None when peeking without the key).

    Raises:
        DocumentFormatError: a newer format, or not a document.
        DocumentDamagedError: not what was written.
        DocumentKeyError: no key, the wrong key, or a key for a document without one.
    """
    whole = _parse(raw)
    body = whole["manifest"]
    text = canonical({"format": FORMAT, "manifest": body})
    if whole.get("checksum") != hashlib.sha256(text).hexdigest():
        raise _damaged("its checksum does not fit")
    try:
        encrypted = "key_check" in body
        if set(whole) != {"format", "manifest", "checksum"} | ({"tag"} if encrypted else set()):
            raise ValueError("unknown fields")
        sealer: Sealer | None = None
        private: Any = {"about": None, "identity": None}
        if not (peek and encrypted and key is None):
            checked_key = None if peek and not encrypted else key
            sealer = make_sealer(checked_key, body["document_id"], body.get("key_check"))
        if sealer is not None:
            private = body
            if encrypted:
                private = _open_private(whole, body, text, sealer)
        return _manifest(body, private, encrypted), sealer
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, ConfigError):  # of Shape
            raise _damaged(str(error)) from error
        raise _damaged(f"a field is wrong ({error})") from error


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        whole = json.loads(raw.decode("ascii"), parse_constant=_refuse_constant)
        rewritten = canonical(whole) + b"\n"
    except (ValueError, RecursionError) as error:
        raise _damaged("it is not JSON") from error
    name = whole.get("format") if isinstance(whole, dict) else None
    found = _FORMAT_PATTERN.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise DocumentFormatError("manifest.json is not of a Penstock document")
    if name != FORMAT:
        raise DocumentFormatError(
            f"the document is in the format {name}; this Penstock reads {FORMAT}: update it"
        )
    if not isinstance(whole.get("manifest"), dict) or raw != rewritten:
        raise _damaged("it is not as it was written")
    assert isinstance(whole, dict)
    return whole


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _open_private(whole: dict[str, Any], body: dict[str, Any], text: bytes, sealer: Sealer) -> Any:
    if not sealer.is_tag(text, str(whole.get("tag"))):
        raise _damaged("it was changed without the key")
    sealed = base64.b64decode(body["private"], validate=True)
    opened = sealer.open_text(body["generation"], sealed)
    if opened is None:
        raise _damaged("its sealed part does not open")
    return json.loads(opened)


def _manifest(body: dict[str, Any], private: dict[str, Any], encrypted: bool) -> Manifest:
    shape = Shape(_number(body["layers"]), _number(body["unit_bytes"]))
    if body["row_bytes"] != shape.padded_bytes:
        raise ValueError("row_bytes")
    if not _HEX16.fullmatch(body["document_id"]):
        raise ValueError("document_id")
    identity, about = private["identity"], private["about"]
    if identity is not None and not (
        isinstance(about, dict)
        and all(isinstance(text, str) for pair in identity.items() for text in pair)
    ):
        raise ValueError("identity")
    if not all(is_blob_name(name) for name in body["blobs"]):
        raise ValueError("blobs")
    return Manifest(
        document_id=body["document_id"],
        generation=_number(body["generation"]),
        shape=shape,
        num_units=_number(body["num_units"]),
        seals=_side_file(body["seals"]),
        blobs={name: _side_file(values) for name, values in body["blobs"].items()},
        encrypted=encrypted,
        identity=identity,
        about=about,
    )


def _side_values(side: SideFile) -> list[object]:
    return [side.generation, side.num_bytes, side.checksum]


def _side_file(values: Any) -> SideFile:
    generation, num_bytes, checksum = values
    if not isinstance(checksum, str):
        raise ValueError("checksum")
    return SideFile(_number(generation), _number(num_bytes), checksum)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_MAX:
        raise ValueError("a number")
    return value


def _damaged(why: str) -> DocumentDamagedError:
    return DocumentDamagedError(
        f"manifest.json of the document is damaged: {why}; restore it, or remove the document",
        what="manifest",
    )
