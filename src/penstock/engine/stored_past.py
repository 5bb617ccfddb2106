"""StoredPast: the beginning of a sequence whose KV is on disk already, for caches to share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.policy import SelectionPolicy
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.file import KVFile
from penstock.storage.overlay_file import OVERLAY_SECTOR_BYTES, OverlayFile
from penstock.storage.store import KVStore
from penstock.storage.unit_region import UnitRegion

READ_BYTES = 8 << 20
"""Most bytes of one read when units are copied into a cache."""
SECTOR_BYTES = OVERLAY_SECTOR_BYTES


@dataclass(frozen=True, kw_only=True)
class StoredPast:
    """Keys and values of `length` tokens, in units of `group_tokens`, one file a tiered layer.

    A unit is K and V of its tokens side by side, [group_tokens, *shape.token_size] in the
    cache's dtype, padded to whole sectors of 4,096 bytes. The last one may hold fewer tokens.
    """

    shape: KVShape
    files: Sequence[KVFile]
    """Never written to; reads that land are right, or raise."""
    unit_of_group: NDArray[np.int64]
    """Which unit of every file holds a group. [groups]"""
    num_units: int
    """Units that the files have; some may be held by no group any more."""
    group_tokens: int
    length: int
    index_state: Callable[[int], Mapping[str, Tensor] | None] = lambda layer: None
    """What `KeyIndex.state` gave for a layer when the past was stored; None where it is unknown,
    or where the index must be made from the keys."""

    def __post_init__(self) -> None:
        assert len(self.files) == self.shape.num_layers
        assert 0 < self.length <= len(self.unit_of_group) * self.group_tokens

    @property
    def num_groups(self) -> int:
        """Groups that have begun."""
        return -(-self.length // self.group_tokens)

    @property
    def unit_bytes(self) -> int:
        """Payload of a unit."""
        return self.group_tokens * self.shape.token_bytes

    @property
    def padded_bytes(self) -> int:
        """A unit's place in its file."""
        return -(-self.unit_bytes // SECTOR_BYTES) * SECTOR_BYTES

    def is_shared_by(self, policy: SelectionPolicy, *, exact: bool) -> bool:
        """Whether a cache of this policy reads these units where they are.

        The units of others are shaped otherwise (one KV head each, another number of tokens), or
        lie elsewhere (fast memory, a near-storage device): they take a copy.
        """
        fits = policy.unit_tokens == self.group_tokens
        in_place = policy.shares_units and not policy.whole_layers
        shares = in_place and not policy.per_head and not policy.stays_resident
        return fits and (exact or shares)

    def require_shape(self, shape: KVShape) -> None:
        """Refuse a cache of another shape.

        Raises:
            ConfigError: layers, heads, width or dtype differ.
        """
        if shape != self.shape:
            raise ConfigError(
                f"the stored past has the shape {self.shape}, this model's is {shape}"
            )

    def read(self, layer: int, first_group: int, end_group: int) -> Tensor:
        """Read groups of one layer, in memory of their own.

        Returns:
            [tokens, *shape.token_size]; behind `length` whatever the last unit has there.

        Raises:
            FetchError: a read failed, or a unit is damaged.
        """
        count = end_group - first_group
        buffer = AlignedBuffer(count, self.padded_bytes)
        units = self.unit_of_group[first_group:end_group]
        region = UnitRegion(self.files[layer], self.unit_bytes, SECTOR_BYTES)
        region.submit_read(units, buffer, np.arange(count)).wait()
        payload = buffer.tensor[:, : self.unit_bytes].contiguous()
        size = (count * self.group_tokens, *self.shape.token_size)
        tokens: Tensor = payload.view(-1).view(self.shape.dtype).view(size)
        return tokens

    def blocks(self, end_group: int) -> list[tuple[int, int]]:
        """[0, end_group) in pieces of at most `READ_BYTES`."""
        size = max(1, READ_BYTES // self.padded_bytes)
        return [(first, min(first + size, end_group)) for first in range(0, end_group, size)]


def padded_units(tokens: Tensor, group_tokens: int, padded_bytes: int) -> NDArray[np.uint8]:
    """Tokens as the rows of a file: whole units, padded with zeros.

    Args:
        tokens: [tokens, *token_size]

    Returns:
        uint8 [groups, padded_bytes]
    """
    count = -(-len(tokens) // group_tokens)
    rows = np.zeros((count, padded_bytes), dtype=np.uint8)
    payload = tokens.detach().cpu().contiguous().view(torch.uint8).reshape(len(tokens), -1).numpy()
    token_bytes = payload.shape[1]
    whole = len(tokens) // group_tokens
    unit_bytes = group_tokens * token_bytes
    rows[:whole, :unit_bytes] = payload[: whole * group_tokens].reshape(whole, unit_bytes)
    if count > whole:
        rest = payload[whole * group_tokens :].reshape(-1)
        rows[whole, : len(rest)] = rest
    return rows


def overlay_store(past: StoredPast, own: KVStore) -> KVStore:
    """A store whose units begin with the past's; what is written goes to `own`, which it closes."""
    size = past.num_units * past.padded_bytes
    files = [
        OverlayFile(base, size, own.region(layer).file) for layer, base in enumerate(past.files)
    ]
    simulated = f" on a simulated {past.files[0].simulated}" if past.files[0].simulated else ""
    words = f"{own.describe()}, behind a stored document{simulated}"
    return KVStore(files, past.unit_bytes, words, own.close)
