"""RankMeter: what a low-rank index of a layer loses by its rank, seen in the heads' outputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.indexes.rank_shares import UNIT

QUERIES = 32
"""Last tokens of a text whose queries are asked."""
LEAST_TOKENS = 512
"""Shorter texts leave nothing to choose."""
GROUP_TOKENS = 4
SELECTED_GROUPS = 100
"""Of a selection, as KVSwap's 400 tokens; a sixteenth of a text that is shorter than 6,400."""
SHARE = 16
WINDOW_TOKENS = 64
SINK_TOKENS = 4


class RankMeter:
    """Adds up, per layer and rank, the error that choosing tokens with so few components brings.

    For every head: the distance between its output over the selected tokens (with window and
    sinks) and over all, as a share of the latter's length, less the same for a selection by the
    true scores. The worst head counts, by the square: one that copies is one of many, and what it
    needs does not show in the mean, nor in the energy of the components; and an error of a fifth
    does no harm (docs/log.md).
    """

    def __init__(self, num_layers: int, rank: int) -> None:
        self._ranks = range(UNIT, rank + 1, UNIT)
        self._sums = torch.zeros(num_layers, len(self._ranks), dtype=torch.float64)
        self._texts = 0

    def add_text(self) -> None:
        """A text begins; `add` follows for each layer."""
        self._texts += 1

    def add(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, basis: Tensor) -> None:
        """Measure one layer on one text.

        Args:
            query: post-RoPE, of the text's last tokens. [heads, queries, head_dim]
            keys: post-RoPE, of all tokens; values alike. [kv_heads, tokens, head_dim]
            basis: [kv_heads * head_dim, rank]
        """
        exact = _Heads(query.float(), keys.float(), values.float())
        floor = exact.errors(exact.logits)
        parts = exact.low_rank(basis.float().to(keys.device))
        logits = torch.zeros_like(exact.logits)
        for i, rank in enumerate(self._ranks):
            logits += parts(rank - UNIT, rank)
            excess = (exact.errors(logits) - floor).clamp_min(0.0)
            self._sums[layer, i] += float(excess.mean(dim=1).amax()) ** 2

    def errors(self) -> tuple[tuple[float, ...], ...]:
        """Mean over the texts. [layers, rank // UNIT]; nothing if there was no text."""
        if not self._texts or not len(self._ranks):
            return ()
        return tuple(map(tuple, (self._sums / self._texts).tolist()))


class _Heads:
    """The heads of one layer at the end of one text."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        heads, count, dim = query.shape
        kv_heads, tokens, _ = keys.shape
        self._query, self._keys, self._values = query, keys, values
        self._shape = (kv_heads, heads // kv_heads, count, dim)
        self._scaling = dim**-0.5
        place = torch.arange(tokens, device=keys.device)
        now = torch.arange(tokens - count, tokens, device=keys.device)[:, None]
        self._later = place > now
        self._always = ((place > now - WINDOW_TOKENS) | (place < SINK_TOKENS)) & ~self._later
        self._groups = tokens // GROUP_TOKENS
        self._selected = max(1, min(SELECTED_GROUPS, self._groups // SHARE))
        self.logits = self._by_kv_head(query.view(self._shape), keys)
        self._weights = self._masked(self.logits).softmax(-1)
        self._output = self._attend(self._weights)

    def _by_kv_head(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scaled products. [heads, queries, tokens]"""
        flat = query.flatten(1, 2) @ keys.transpose(1, 2)
        out: Tensor = flat.view(-1, self._shape[2], keys.shape[1]) * self._scaling
        return out

    def _masked(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self._later, float("-inf"))

    def _attend(self, weights: Tensor) -> Tensor:
        kv_heads, per_kv_head, count, _ = self._shape
        grouped = weights.view(kv_heads, per_kv_head * count, -1) @ self._values
        out: Tensor = grouped.view(kv_heads * per_kv_head, count, -1)
        return out

    def low_rank(self, basis: Tensor) -> Callable[[int, int], Tensor]:
        """What components `first` to `end` add to the logits, as a function of the two."""
        kv_heads, _, count, dim = self._shape
        components = self._keys.transpose(0, 1).flatten(1) @ basis
        rows = basis.view(kv_heads, 1, dim, -1)
        query = self._query.view(self._shape) @ rows

        def part(first: int, end: int) -> Tensor:
            flat = query[..., first:end].flatten(0, 2) @ components[:, first:end].T
            added: Tensor = flat.view(-1, count, len(components)) * self._scaling
            return added

        return part

    def errors(self, logits: Tensor) -> Tensor:
        """Of outputs over what `logits` select, relative. [heads, queries]"""
        whole = self._groups * GROUP_TOKENS
        seen = self._masked(logits)[..., :whole]
        best_tokens = seen.reshape(*seen.shape[:2], self._groups, GROUP_TOKENS).amax(-1)
        shares = best_tokens.softmax(-1).sum(0)
        best = shares.topk(self._selected, dim=-1).indices
        chosen = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, best, True)
        keep = self._always.clone()
        keep[:, :whole] |= chosen.repeat_interleave(GROUP_TOKENS, dim=1)
        keep[:, whole:] = ~self._later[:, whole:]
        weights = self._weights * keep
        output = self._attend(weights) / weights.sum(-1, keepdim=True)
        error: Tensor = (output - self._output).norm(dim=-1) / self._output.norm(dim=-1)
        return error
