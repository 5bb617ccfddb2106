"""TextDocument: the first tokens of a real text as the past of every sequence."""

from collections.abc import Callable
from typing import Any

from penstock.models.cache_adapter import TieredCache
from penstock.models.plain_model import tokens_of
from penstock.workloads.prefilled import PrefilledText
from penstock.workloads.synthetic_kv import unthrottled


class TextDocument:
    """A text's keys and values, read once; any prefix of it fills any number of sequences.

    All sequences are alike, which changes nothing: every row ranks, reads and attends for itself.
    """

    def __init__(self, text: PrefilledText, batch: int) -> None:
        """
        Args:
            text: of one sequence.
        """
        self._text = text
        self._batch = batch

    def fill(
        self, cache: Any, tokens: int, progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Put the first `tokens` tokens into every layer of an empty `TieredCache`."""
        assert isinstance(cache, TieredCache)
        assert tokens <= self._text.length, (tokens, self._text.length)
        layers = self._text.tiered
        with unthrottled(cache):
            for tier, layer in enumerate(layers):
                keys, values = (
                    states[:, :, :tokens].expand(self._batch, -1, -1, -1)
                    for states in tokens_of(self._text.cache, layer, self._text.shape)
                )
                cache.tiers.append(tier, keys.contiguous(), values.contiguous())
                progress((tier + 1) / len(layers))
            for held in cache.tiers.layers:
                getattr(held, "drain", lambda: None)()
