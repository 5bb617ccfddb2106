"""How low the rank of a layer's keys is: energy of singular values, and the keys that they find."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.evaluate.audit.fidelity import attention_shares
from research.statistics.overlap import overlap, top_set


def spectrum(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors of keys, all heads of a token joined.

    Source: KVSwap, section 3.2: SVD of the flattened keys, N x (heads * dim), without centring.

    Differences: the paper's basis comes from other text; this one comes from the prompt's own
    keys, the best that any basis of this rank can do on them.

    Args:
        keys: [tokens, width]

    Returns:
        Each component's share of the energy (squared singular values), largest first, [width], and
        the vectors as columns, [width, width]; float64 both.
    """
    flat = keys.double()
    values, vectors = torch.linalg.eigh(flat.T @ flat)
    energy = values.flip(0).clamp_min(0.0)
    return energy / energy.sum(), vectors.flip(1)


def ranks_up_to(width: int) -> list[int]:
    """16, 32, 64, ... and the width itself."""
    ranks, rank = [], 16
    while rank < width:
        ranks.append(rank)
        rank *= 2
    return [*ranks, width]


def rank_that_holds(energy: Tensor, level: float) -> int:
    """The smallest rank that holds a share of the energy. energy: as `spectrum` gives it."""
    return int((energy.cumsum(dim=0) < level - 1e-9).sum()) + 1


def joined(keys: Tensor) -> Tensor:
    """Keys with all heads of a token side by side: [kv_heads, tokens, dim] to [tokens, width]."""
    return keys.transpose(0, 1).flatten(1)


def recall_of_low_rank(
    queries: Sequence[tuple[Tensor, int]], exact: Tensor, rebuilt: Tensor, *,
    counts: Sequence[int], scaling: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The share of the true top tokens among the top tokens of other keys, for one sequence.

    Source: KVSwap, Eq. 1: logits of the low-rank keys, K A A^T, in place of those of K.

    Args:
        queries: post-RoPE queries of some steps, [num_heads, dim], and the tokens of each.
        exact: post-RoPE keys. [kv_heads, tokens, dim]
        rebuilt: what stands in for them, alike.
        counts: sizes of the sets of top tokens.

    Returns:
        For each size: the mean over KV heads of sets of their own, and of one set for all heads
        (probabilities added). The mean over steps, 0 to 1. float64 [sizes, 2]
    """
    found = torch.zeros(len(counts), 2, dtype=torch.float64)
    for query, tokens in queries:
        true, other = (
            attention_shares(
                query[None], keys[None, :, :tokens], None, scaling=scaling, softcap=softcap
            )
            for keys in (exact, rebuilt)
        )
        visible = torch.ones(1, tokens, dtype=torch.bool, device=true.device)
        found += same_top(true, other, visible, counts)[0].cpu()
    return found / len(queries)


def same_top(true: Tensor, other: Tensor, visible: Tensor, counts: Sequence[int]) -> Tensor:
    """The share of the top tokens of one attention among those of another.

    Args:
        true: see `attention_shares`. [batch, kv_heads, tokens]
        other: alike.
        visible: False at padding. bool [batch, tokens]
        counts: sizes of the sets.

    Returns:
        For each size: each KV head's own set, the mean, and one set for all heads. float64
        [batch, sizes, 2]
    """
    both = [torch.cat([each, each.mean(dim=1, keepdim=True)], dim=1) for each in (true, other)]
    out = []
    for count in counts:
        wanted, found = (top_set(each, visible, count) for each in both)
        shares = overlap(found, wanted)
        out.append(torch.stack([shares[:, :-1].mean(dim=1), shares[:, -1]], dim=1))
    return torch.stack(out, dim=1)
