"""share_past() and copy_past(): put a stored past into the layers of a cache."""

from collections.abc import Sequence

import torch

from penstock.engine.head_rows import HeadRows
from penstock.engine.layer import Layer
from penstock.engine.stored_past import StoredPast
from penstock.engine.unit_map import UnitMap


def share_past(past: StoredPast, layers: Sequence[Layer], units: UnitMap, length: int) -> None:
    """Let layers read the past's units where they are, as far as `length`.

    Groups that the layers hold already stay theirs.

    Raises:
        ConfigError: the stored index is another one's.
        FetchError: a read failed, or what is stored is damaged.
    """
    first = -(-layers[0].length // past.group_tokens)
    end = -(-length // past.group_tokens)
    units.share(first, past.unit_of_group[first:end], past.num_units)
    for i, layer in enumerate(layers):
        layer.restore(length, past.index_state(i) if length == past.length else None)
    # A group that has begun is in the windows now; it closes in a unit of this cache's own.
    units.forget_from(length // past.group_tokens)


def copy_past(
    past: StoredPast, layers: Sequence[Layer], rows: HeadRows, batch: int, length: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Read the past and take it in as if it had just been computed, in every row.

    Args:
        device: the cache's, where layers expect their tokens.

    Raises:
        FetchError: a read failed, or what is stored is damaged.
        StoreFullError: the disk is full.
    """
    for i, layer in enumerate(layers):
        assert layer.length % past.group_tokens == 0, layer.length
        begun = layer.length // past.group_tokens
        for first, last in past.blocks(-(-length // past.group_tokens)):
            if last <= begun:
                continue
            start = max(first, begun)
            tokens = past.read(i, start, last)[: length - start * past.group_tokens].to(device)
            parts = (past.shape.keys_of(tokens), past.shape.values_of(tokens))
            both = [each.transpose(0, 1).expand(batch, -1, -1, -1) for each in parts]
            keys, values, _ = rows.fold_tokens(both[0], both[1], None)
            layer.append(keys, values, None)
