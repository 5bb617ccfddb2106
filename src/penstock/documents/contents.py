"""What a stored document says of itself: its tokens, where their units are, index and windows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from penstock.core.errors import DocumentDamagedError, DocumentFormatError
from penstock.methods import SelectionPolicy
from penstock.methods.search_space import policy_from
from penstock.models.cache_adapter import TieredCache
from penstock.storage.documents import Damage, StoredDocument

_TOKENS_MAX = 1 << 31
_TIME_MAX = 1e11
"""Epoch seconds of the year 5138."""
TOKENS, GROUPS, WINDOWS = "tokens", "groups", "windows"
"""Blobs: token ids, int32 little endian; the unit of each group, int64; sliding windows."""


def index_blob(layer: int) -> str:
    """Name of the blob with a layer's index."""
    return f"index-{layer}"


@dataclass(frozen=True, kw_only=True)
class About:
    """The JSON part of what a document says of itself, beside its identity."""

    model: str
    """What the user called it; the whole path where that is a folder."""
    title: str
    created: float
    """Epoch seconds."""
    tokens: int
    group_tokens: int
    policy: str
    policy_fields: dict[str, Any]
    """As `fields_of` gives them; what its index depends on is among them."""
    memory: int | float | str | None
    """Budget of the caches that read it, unless another is given."""
    has_index: bool
    """Whether the retrieval index is stored too; it is made from the keys otherwise."""
    has_windows: bool
    """Whether layers with a sliding window are stored too."""
    pending: list[int]
    """Tokens of a kept answer whose KV was not computed: they come before the next question."""
    name: str | None = None
    """That it has in its library; None outside of one, and of documents that are older."""

    @classmethod
    def of(cls, stored: StoredDocument) -> "About":
        """Read it.

        Raises:
            DocumentFormatError: something else than `penstock doc` has written it.
        """
        try:
            about = cls(**stored.about)
        except TypeError as error:
            raise DocumentFormatError(
                "the folder holds stored units, but no document of penstock doc"
            ) from error
        if wrong := about._wrong_field():
            raise DocumentDamagedError(
                f"what the document says of its {wrong} makes no sense; restore it, or add the "
                "text anew",
                what="manifest",
            )
        return about

    def _wrong_field(self) -> str:
        """The first field that no document has; nothing of a sound one."""
        numbers = (int, float)
        checks = {
            "model": isinstance(self.model, str), "title": isinstance(self.title, str),
            "name": self.name is None or isinstance(self.name, str),
            "time": type(self.created) in numbers and 0 <= self.created < _TIME_MAX,
            "tokens": type(self.tokens) is int and 0 < self.tokens < _TOKENS_MAX,
            "groups": type(self.group_tokens) is int and 0 < self.group_tokens < _TOKENS_MAX,
            "policy": isinstance(self.policy, str) and isinstance(self.policy_fields, dict),
            "memory": self.memory is None or type(self.memory) in (*numbers, str),
            "index": isinstance(self.has_index, bool),
            "windows": isinstance(self.has_windows, bool),
            "pending tokens": isinstance(self.pending, list)
            and all(type(token) is int and 0 <= token < _TOKENS_MAX for token in self.pending),
        }  # fmt: skip
        return next((name for name, is_right in checks.items() if not is_right), "")

    @property
    def num_groups(self) -> int:
        """Groups that have begun."""
        return -(-self.tokens // self.group_tokens)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def make_policy(self) -> SelectionPolicy:
        """The policy that the document was prefilled with, its index's settings chosen.

        Raises:
            ConfigError: this version has no such policy or field.
        """
        return policy_from(self.policy, self.policy_fields)


def read_tokens(stored: StoredDocument, count: int, vocabulary: int) -> list[int]:
    """Token ids of the text.

    Args:
        count: how many there are.
        vocabulary: ids are below it.

    Raises:
        DocumentDamagedError: they are not what was stored, or not such ids.
    """
    return [int(token) for token in _numbers(stored, TOKENS, "<i4", count, vocabulary)]


def read_groups(stored: StoredDocument, count: int) -> NDArray[np.int64]:
    """Which unit holds each of `count` groups. [groups]

    Raises:
        DocumentDamagedError: they are not what was stored, or not such units.
    """
    return _numbers(stored, GROUPS, "<i8", count, stored.num_units)


def _numbers(
    stored: StoredDocument, name: str, dtype: str, count: int, end: int
) -> NDArray[np.int64]:
    raw = stored.blob(name)
    if len(raw) == count * np.dtype(dtype).itemsize:
        numbers = np.frombuffer(raw, dtype=dtype).astype(np.int64)
        if not count or 0 <= numbers.min() <= numbers.max() < end:
            return numbers
    raise DocumentDamagedError(
        f"the document's {name} are not what its text has; restore it, or add the text anew",
        what=name,
    )


def needed(damage: Damage, units: NDArray[np.int64]) -> Damage:
    """Damage less that of units which hold nothing of the text any more: what was mended is in
    others.

    Args:
        units: of the groups; negative where it is unknown, and all units count then. [groups]
    """
    if (units < 0).any():
        return damage
    used = set(units.tolist())
    lost = {layer: sorted(used & set(each)) for layer, each in damage.units.items()}
    return replace(damage, units={layer: each for layer, each in lost.items() if each})


def read_index(stored: StoredDocument, layer: int) -> Mapping[str, Tensor] | None:
    """What a layer's index goes on from; None for one that is made from the keys.

    Raises:
        DocumentDamagedError: it is not what was stored.
    """
    name = index_blob(layer)
    return blob_tensors(stored, name) if name in stored.blob_names else None


def blob_tensors(stored: StoredDocument, name: str) -> dict[str, Tensor]:
    """The tensors of a blob.

    Raises:
        DocumentDamagedError: they are not what was stored.
    """
    try:
        tensors: dict[str, Tensor] = load(stored.blob(name))
    except SafetensorError as error:
        raise DocumentDamagedError(f"the document's {name} has no tensors", what=name) from error
    return tensors


def tokens_blob(tokens: Sequence[int]) -> bytes:
    """Token ids as they are stored."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def groups_blob(units: NDArray[np.int64]) -> bytes:
    """Units of the groups as they are stored."""
    return units.astype("<i8").tobytes()


def index_blobs(cache: TieredCache, num_layers: int) -> dict[str, bytes]:
    """The index of every layer that keeps one; by the blob's name."""
    blobs = {}
    for layer in range(num_layers):
        state = cache.tiers.index_state(layer)
        if state is not None:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
            blobs[index_blob(layer)] = save(plain)
    return blobs


def windows_blob(cache: TieredCache) -> dict[str, bytes]:
    """Keys and values of the layers with a sliding window, as one blob; none without such."""
    tensors = {}
    for i, layer in enumerate(cache.layers):
        if layer.is_sliding:
            tensors[f"{i}.keys"] = layer.keys.detach().cpu().contiguous()
            tensors[f"{i}.values"] = layer.values.detach().cpu().contiguous()
    return {WINDOWS: save(tensors)} if tensors else {}


def restore_windows(stored: StoredDocument, cache: TieredCache, length: int) -> None:
    """Give a cache's sliding windows what they held behind the stored text.

    Raises:
        DocumentDamagedError: they are not what was stored.
    """
    tensors = blob_tensors(stored, WINDOWS)
    for i, layer in enumerate(cache.layers):
        if not layer.is_sliding:
            continue
        device = cache._settings.device
        parts = [tensors.get(f"{i}.{part}") for part in ("keys", "values")]
        _check_window(parts, cache, length, layer.sliding_window)
        keys, values = (
            part.to(device).expand(cache.batch_size, -1, -1, -1)
            for part in parts
            if part is not None
        )
        layer.hold(keys, values, length)


def _check_window(parts: list[Tensor | None], cache: TieredCache, length: int, window: int) -> None:
    """Refuse keys and values that no layer with a sliding window has had."""
    keys, values = parts
    right = keys is not None and values is not None and keys.shape[:3] == values.shape[:3]
    if right and keys is not None and values is not None:
        held = range(min(length, window - 1), min(length, window) + 1)
        right = keys.ndim == 4 and keys.shape[0] == 1 and keys.shape[2] in held
        right &= keys.dtype == values.dtype == cache._settings.shape.dtype
        right = right and bool(keys.isfinite().all()) and bool(values.isfinite().all())
    if not right:
        raise DocumentDamagedError(
            "the document's windows are not what its model has; restore it, or add the text anew",
            what=WINDOWS,
        )
