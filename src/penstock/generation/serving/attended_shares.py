"""AttendedShares: which parts of its text an answer has attended to."""

import torch
from torch import Tensor

from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.models.cache_adapter import TieredCache

_MOST_LAYERS = 8
"""That are watched, spread over all: a watched layer takes a little longer."""


class AttendedShares:
    """Adds up what decode steps of a cache see, in parts of equal length.

    Layers that keep all tokens in memory, and those of a GPU, are not watched: there is no
    selection, or a graph is replayed that tells no one.
    """

    def __init__(self, cache: TieredCache, parts: int) -> None:
        """Watch a cache from now on."""
        self._parts, self._total, self._seen = parts, torch.zeros(parts), 0
        layers = [each for each in cache.tiers.layers if isinstance(each, RetrievalLayer)]
        for layer in layers[:: max(1, -(-len(layers) // _MOST_LAYERS))]:
            layer.observer = self._see

    def _see(self, layer: int, attended: Tensor) -> None:
        """A layer has attended. attended: bool [rows, length]"""
        share = attended.float().mean(dim=0)[None, None]
        self._total += torch.nn.functional.adaptive_avg_pool1d(share, self._parts)[0, 0].cpu()
        self._seen += 1

    @property
    def shares(self) -> list[float] | None:
        """Of each part, from first to last, the share of its tokens that a step saw, the mean over
        steps and layers; None: nothing was selected."""
        return (self._total / self._seen).tolist() if self._seen else None
