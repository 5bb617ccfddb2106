"""AttentionCall: what a model hands over when one layer attends, and how it is added up."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import CacheStateError
from penstock.kernels.plain_attention import NEGATIVE_INFINITY, add_attention_sink
from penstock.kernels.prompt_attention import Softmax, add_block, merge_into


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Queries, new keys and new values of one layer in one forward pass."""

    query: Tensor
    """Post-RoPE queries. [batch, num_heads, new_tokens, head_dim]"""
    keys: Tensor
    """Post-RoPE keys of the new tokens. [batch, kv_heads, new_tokens, head_dim]"""
    values: Tensor
    """[batch, kv_heads, new_tokens, value_width]"""
    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    """Learned logit per query head that joins the softmax (gpt-oss). [num_heads], or
    [batch, num_heads]"""
    visible: Tensor | None = None
    """False at padding; None when nothing is padded. bool [batch, past + new tokens]"""


def require_finite(keys: Tensor, layer: int) -> None:
    """Refuse keys that no index can rank.

    Raises:
        CacheStateError: some are infinite or not a number.
    """
    # What is no number is both ends; on a CPU `isfinite` of all takes ten times as long.
    if not all(math.isfinite(end) for end in torch.aminmax(keys)):
        raise not_finite(layer)


def not_finite(layer: int) -> CacheStateError:
    """The refusal of a layer's keys that no index can rank."""
    return CacheStateError(
        f"keys of layer {layer} are not finite, so that tokens cannot be ranked by them; run "
        "the model in float32 or bfloat16, or take the policy full, or exact"
    )


def first_visible(visible: Tensor | None, keys: Tensor) -> Tensor:
    """First token of each row that is no padding; behind the last where all of it is, so far.

    Args:
        visible: as in `AttentionCall`.
        keys: of the same rows.

    Returns:
        int64 [batch]
    """
    if visible is None:
        return torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
    first = visible.to(torch.int8).argmax(dim=1)
    return torch.where(visible.any(dim=1), first, visible.shape[1])


class AttentionSum:
    """One softmax over blocks that come one after the other, merged by log-sum-exp."""

    def __init__(self, call: AttentionCall) -> None:
        self._call = call
        self._so_far: Softmax | None = None
        self._is_lent = False
        """Whether somebody has what was attended to so far, which must not change then."""

    def add(
        self, keys: Tensor, values: Tensor, key_mask: Tensor | None, *, causal: bool = False
    ) -> None:
        """Attend to one more block; arguments as in `add_block`."""
        call = self._call
        self._so_far = add_block(
            self._mine(), call.query, keys, values, scaling=call.scaling, key_mask=key_mask,
            causal=causal, softcap=call.softcap,
        )  # fmt: skip

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Take in what was attended to elsewhere, behind a block.

        Args:
            out: [batch, num_heads, new_tokens, value_width]
            lse: log-sum-exp of its logits. float32 [batch, num_heads, new_tokens]
        """
        so_far = self._mine()
        assert so_far is not None, "no block was added"
        self._so_far = merge_into(so_far, out, lse)

    def _mine(self) -> Softmax | None:
        if self._is_lent and self._so_far is not None:
            self._so_far, self._is_lent = (self._so_far[0].clone(), self._so_far[1].clone()), False
        return self._so_far

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the logits so far, sinks without a key not counted. float32
        [batch, num_heads, new_tokens]"""
        assert self._so_far is not None, "no block was added"
        self._is_lent = True
        return self._so_far[1]

    def result(self) -> Tensor:
        """The output in the query's dtype. [batch, new_tokens, num_heads, value_width]"""
        assert self._so_far is not None, "no block was added"
        self._is_lent = True
        out, lse = self._so_far
        if self._call.sink_logits is not None:
            out, _ = add_attention_sink(out.transpose(1, 2), lse, self._call.sink_logits)
            out = out.transpose(1, 2)
        return out.to(self._call.query.dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor | None:
    """0 where visible, minus infinity elsewhere; None when everything is visible."""
    if bool(visible.all()):
        return None
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, NEGATIVE_INFINITY)
