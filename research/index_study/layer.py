"""Layer: what one layer attended to, and the share of it that an index finds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.policy import Rotary
from penstock.kernels.key_rotation import KeyRotation

GROUP_TOKENS = 4
GROUPS = 100
"""Groups that an index may choose, KVSwap's 400 tokens."""
SINK_TOKENS = 4
WINDOW_TOKENS = 64
"""What is always attended to; the share is that of all other tokens."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Keys of one layer, the queries that look for them, and the truth."""

    keys: Tensor
    """Post-RoPE, float32. [kv_heads, tokens, head_dim]"""
    asked: Tensor
    """Post-RoPE queries behind all keys. float32 [heads, queries, head_dim]"""
    kept: Tensor
    """Post-RoPE queries of the prompt. float32 [heads, queries, head_dim]"""
    places: Tensor
    """Positions of `kept`. int64"""
    scaling: float
    rotary: Rotary
    rotation: KeyRotation | None = None
    """The same, as the product's index takes it."""

    @property
    def ends(self) -> int:
        """Groups in front of the window, the sinks' group among them."""
        return (self.keys.shape[1] - WINDOW_TOKENS) // GROUP_TOKENS

    def truth(self) -> "Truth":
        """Where full attention looks."""
        shares = self.logits(self.keys).softmax(-1)
        groups = shares.sum(0)[:, : self.ends * GROUP_TOKENS]
        groups = groups.reshape(len(groups), -1, GROUP_TOKENS).sum(-1)
        outside = shares[:, :, SINK_TOKENS : self.ends * GROUP_TOKENS].sum(-1)
        return Truth(groups=groups[:, SINK_TOKENS // GROUP_TOKENS :], heads=outside.mean(-1))

    def logits(self, keys: Tensor) -> Tensor:
        """Of the asked queries with such keys. float32 [heads, queries, tokens]"""
        grouped = self.asked.reshape(len(keys), -1, *self.asked.shape[1:])
        return (grouped @ keys[:, None].mT).flatten(0, 1) * self.scaling

    def scores(self, keys: Tensor, *, add: bool = False) -> Tensor:
        """Of groups, as the product's index has them: best token, softmax, sum over the heads.

        Args:
            keys: what an index knows of `self.keys`, of the same shape.
            add: the tokens' exponentials are added, instead of the best token's alone.

        Returns:
            float32 [queries, groups without that of the sinks]
        """
        logits = self.logits(keys)[..., : self.ends * GROUP_TOKENS]
        grouped = logits.reshape(*logits.shape[:2], -1, GROUP_TOKENS)
        best = grouped.logsumexp(-1) if add else grouped.amax(-1)
        scores: Tensor = best.softmax(-1).sum(0)
        return scores[:, SINK_TOKENS // GROUP_TOKENS :]

    # Keys by blocks ---------------------------------------------------------------------------

    def turned_back(self, block: int) -> Tensor:
        """Keys turned to their offset in a block; 0: as they are. As `keys`."""
        return self._turned(self.keys, torch.arange(self.keys.shape[1]), block, back=True)

    def turned_on(self, keys: Tensor, block: int) -> Tensor:
        """The inverse of `turned_back`."""
        return self._turned(keys, torch.arange(keys.shape[1]), block, back=False)

    def seen(self, block: int, blocks: int) -> Tensor:
        """Kept queries as keys of random earlier blocks meet them.

        Args:
            blocks: for each query.

        Returns:
            float32 [heads, queries * blocks, head_dim]
        """
        if not block:
            return self.kept
        draw = torch.rand(blocks, len(self.places), generator=torch.Generator().manual_seed(0))
        first = (draw * (self.places + 1)).long()
        parts = [self._turned(self.kept, each, block, back=True) for each in first]
        return torch.cat(parts, dim=1)

    def _turned(self, x: Tensor, places: Tensor, block: int, *, back: bool) -> Tensor:
        if not block:
            return x
        cos, sin = self.rotary(places - places % block)
        size = (cos.square() + sin.square()).sqrt()  # some models scale as well
        cos, sin = cos / size, sin / size
        width = cos.shape[-1]
        head, rest = x[..., :width], x[..., width:]
        left, right = head.chunk(2, dim=-1)
        swapped = torch.cat([-right, left], dim=-1)
        return torch.cat([head * cos + swapped * (-sin if back else sin), rest], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What full attention looks at, outside of sinks and window."""

    groups: Tensor
    """Attention to each group, added over the heads. float32 [queries, groups]"""
    heads: Tensor
    """Share of each head's attention that lies there, mean over the queries. float32 [heads]"""

    def captured(self, scores: Tensor) -> float:
        """Share of the attention that the best groups by such scores hold, mean over queries.

        Args:
            scores: [queries, groups]
        """
        chosen = scores.topk(min(GROUPS, scores.shape[1]), dim=-1).indices
        held = self.groups.gather(1, chosen).sum(-1) / self.groups.sum(-1)
        return float(held.mean())

    @property
    def outside(self) -> float:
        """Share of all attention that lies there."""
        return float(self.groups.sum(-1).mean()) / len(self.heads)
