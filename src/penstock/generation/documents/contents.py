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
from penstock.models.cache_adapter import TieredCache
from penstock.policies import SelectionPolicy
from penstock.policies.search_space import policy_from
from penstock.storage.documents import Damage, StoredDocument

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

    @classmethod
    def of(cls, stored: StoredDocument) -> "About":
        """Read it.

        Raises:
            DocumentFormatError: something else than `penstock doc` has written it.
        """
        try:
            return cls(**stored.about)
        except TypeError as error:
            raise DocumentFormatError(
                "the folder holds stored units, but no document of penstock doc"
            ) from error

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def make_policy(self) -> SelectionPolicy:
        """The policy that the document was prefilled with, its index's settings chosen.

        Raises:
            ConfigError: this version has no such policy or field.
        """
        return policy_from(self.policy, self.policy_fields)


def read_tokens(stored: StoredDocument) -> list[int]:
    """Token ids of the text.

    Raises:
        DocumentDamagedError: they are not what was stored.
    """
    return [int(token) for token in np.frombuffer(stored.blob(TOKENS), dtype="<i4")]


def read_groups(stored: StoredDocument) -> NDArray[np.int64]:
    """Which unit holds each group. [groups]

    Raises:
        DocumentDamagedError: they are not what was stored.
    """
    return np.frombuffer(stored.blob(GROUPS), dtype="<i8").astype(np.int64)


def needed(damage: Damage, units: NDArray[np.int64]) -> Damage:
    """Damage less that of units which hold nothing of the text any more: what was mended is in
    others.

    Args:
        units: of the groups; negative where nobody knows, and all units count then. [groups]
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
    return _tensors(stored, name) if name in stored.blob_names else None


def _tensors(stored: StoredDocument, name: str) -> dict[str, Tensor]:
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
        state = cache._runtime.index_state(layer)
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
    tensors = _tensors(stored, WINDOWS)
    for i, layer in enumerate(cache.layers):
        if not layer.is_sliding:
            continue
        device = cache._config.device
        keys, values = (
            tensors[f"{i}.{part}"].to(device).expand(cache.batch_size, -1, -1, -1)
            for part in ("keys", "values")
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        layer.cumulative_length = length
