"""pool_logits() and logit_sums(): what the tokens that a pool holds are worth to a new query."""

import torch
from torch import Tensor

from penstock.kernels.native.compiled import kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES

_MOST_WIDTH = 1 << 12
"""Channels of a head; the compiled kernel widens sixteen keys on the stack."""
_FEW_PLACES = 1024
"""Fewer are not worth waking threads."""


def pool_logits(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Logits of one query per row against a pool; the twin of `pool_logits_twin`.

    Compiled for host memory. Hidden places are not read, or not heeded.

    Args:
        query: any float dtype. [rows, q_heads, head_dim]
        tokens: a pool, keys and values side by side. [rows, places, 2, kv_heads, head_dim]
        mask: additive, 0 or minus infinity, in the tokens' dtype. [rows, places]
        scaling: factor on the logits.

    Returns:
        Logits, minus infinity where the mask hides the place, float32 [rows, q_heads, places]; the
        log of their summed exponentials, minus infinity for a row that sees nothing, float32
        [rows, q_heads].
    """
    compiled = kernel("pool_logits") if tokens.device.type == "cpu" else None
    rows, q_heads, head_dim = query.shape
    places, kv_heads = tokens.shape[1], tokens.shape[3]
    if (
        compiled is None
        or head_dim % 16
        or head_dim > _MOST_WIDTH
        or tokens.dtype not in DTYPE_CODES
        or mask.dtype != tokens.dtype
        or not tokens.is_contiguous()
        or tokens.shape != (rows, places, 2, kv_heads, head_dim)
        or mask.shape != (rows, places)
        or q_heads % kv_heads
    ):
        return pool_logits_twin(query, tokens, mask, scaling)
    wide, mask = query.float().contiguous(), mask.contiguous()
    logits = torch.empty(rows, q_heads, places)
    log_sums = torch.empty(rows, q_heads)
    compiled(
        wide.data_ptr(), tokens.data_ptr(), mask.data_ptr(), rows, places, kv_heads,
        q_heads // kv_heads, head_dim, DTYPE_CODES[tokens.dtype], scaling, logits.data_ptr(),
        log_sums.data_ptr(), _threads(rows * places),
    )  # fmt: skip
    return logits, log_sums


def pool_logits_twin(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """The meaning of `pool_logits` in plain torch."""
    return key_logits(query, tokens[:, :, 0].transpose(1, 2), mask, scaling)


def key_logits(query: Tensor, keys: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """The same of keys that lie in whatever way, for pools that `pool_logits` does not know.

    Args:
        keys: [rows, kv_heads, places, head_dim]
    """
    rows, q_heads, head_dim = query.shape
    grouped = query.float().reshape(rows, keys.shape[1], -1, head_dim)
    logits = (
        torch.matmul(grouped, keys.float().transpose(2, 3)).mul_(scaling).view(rows, q_heads, -1)
    )
    logits.masked_fill_((mask != 0).unsqueeze(1), float("-inf"))
    return logits, torch.logsumexp(logits, dim=2)


def logit_sums(logits: Tensor, normalisers: Tensor | None) -> Tensor:
    """Over the heads the sum of exp(logit - normaliser); the twin of `logit_sums_twin`.

    Exponents are taken between -87 and 80, exp to within 2 units in the last place.

    Args:
        logits: minus infinity, in all heads at once, where a place is hidden.
            float32 [rows, heads, places]
        normalisers: None: the sum of the logits themselves. float32 [rows, heads]

    Returns:
        Minus infinity for hidden places. float32 [rows, places]
    """
    compiled = kernel("logit_sums")
    rows, heads, places = logits.shape
    if (
        compiled is None
        or logits.device.type != "cpu"
        or logits.dtype != torch.float32
        or not logits.is_contiguous()
        or (normalisers is not None and normalisers.shape != (rows, heads))
    ):
        return logit_sums_twin(logits, normalisers)
    if normalisers is not None:
        normalisers = normalisers.float().contiguous()
    out = torch.empty(rows, places)
    compiled(
        logits.data_ptr(), rows, heads, places,
        0 if normalisers is None else normalisers.data_ptr(), out.data_ptr(),
        _threads(rows * places),
    )  # fmt: skip
    return out


def logit_sums_twin(logits: Tensor, normalisers: Tensor | None) -> Tensor:
    """The meaning of `logit_sums` in plain torch."""
    hidden = logits[:, 0] == float("-inf")
    if normalisers is None:
        summed = logits.sum(dim=1)
    else:
        gaps = logits - normalisers.unsqueeze(2)
        shares = gaps.clamp(-87.0, 80.0).exp_().masked_fill_(gaps < -87.0, 0.0)
        summed = shares.sum(dim=1)
    return summed.masked_fill_(hidden, float("-inf"))


def _threads(places: int) -> int:
    return 1 if places < _FEW_PLACES else torch.get_num_threads()
