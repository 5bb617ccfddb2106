"""tree_attention(): the new tokens of many beams attend over blocks, those they share once."""

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.device.available import uses_triton
from penstock.kernels.native.compiled import Kernel, address, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES
from penstock.kernels.plain_attention import attention_twin
from penstock.kernels.tree_work import TreeWork, taken

_MOST_DIM, _MOST_LANES = 256, 1 << 12
"""Of the compiled kernel: head_dim, and queries of a piece for one KV head."""


def tree_attention(
    query: Tensor,
    slots: Tensor,
    work: TreeWork,
    lengths: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one query per row over the blocks of the row's path, in one softmax.

    Every piece of work is read once for the queries of all of its rows (cascade attention); the
    parts of a row are merged by their log-sum-exp. Nothing is asked of the device, and launches
    depend on shapes alone: a CUDA graph may hold it while tensors' contents change.

    Args:
        query: [rows, num_heads, head_dim]; heads of one KV head side by side.
        slots: keys and values in the query's dtype, maybe one layer of a larger tensor: the last
            two dimensions are contiguous.
            [num_slots, 2, kv_heads, block_tokens, head_dim]
        work: see `TreeWork`; its pieces cover every block that a row can see.
        lengths: tokens that a row sees, the new one included; 0 for nothing. int32 [rows]
        scaling: factor on the logits, before `softcap`.
        softcap: logits become softcap * tanh(logits / softcap).
        window: a row sees its last `window` tokens only.
        workspace: float32 memory for partial results, at least `workspace_floats` of tree_work.py;
            allocated where it is not given.

    Returns:
        [rows, num_heads, head_dim] in the query's dtype, zero for a row that sees nothing; and the
        log-sum-exp of the logits, float32 [rows, num_heads], minus infinity there.
    """
    if uses_triton(query):
        from penstock.kernels.tree_attention_triton import tree_attention_triton

        return tree_attention_triton(
            query, slots, work, lengths, scaling,
            softcap=softcap, window=window, workspace=workspace,
        )  # fmt: skip
    compiled = kernel("tree_attention")
    if compiled is None or not _can_compile(query, slots, work):
        return tree_attention_twin(
            query, slots, work, lengths, scaling, softcap=softcap, window=window
        )
    return _compiled(
        compiled, query, slots, work, lengths, scaling, softcap or 0.0, window or 0, workspace
    )


def _can_compile(query: Tensor, slots: Tensor, work: TreeWork) -> bool:
    num_heads, head_dim = query.shape[1:]
    return (
        query.device.type == "cpu"
        and query.dtype == slots.dtype
        and query.dtype in DTYPE_CODES
        and head_dim % 16 == 0
        and head_dim <= _MOST_DIM
        and work.rows.shape[1] * (num_heads // slots.shape[2]) <= _MOST_LANES
        and slots.stride()[3:] == (head_dim, 1)
        and work.table.stride(1) == 1
    )


def _compiled(
    compiled: Kernel,
    query: Tensor,
    slots: Tensor,
    work: TreeWork,
    lengths: Tensor,
    scaling: float,
    softcap: float,
    window: int,
    workspace: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The compiled form, for host memory; softcap and window are 0 where there is none."""
    rows, num_heads, head_dim = query.shape
    _, _, kv_heads, block_tokens, _ = slots.shape
    space = taken(workspace, work, num_heads, head_dim)
    stats = space[work.parts.numel() * num_heads * head_dim :]
    scaled = query.float().mul(scaling).contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, num_heads)
    sizes = np.array([
        *work.rows.shape, work.parts.shape[1], work.table.stride(0), block_tokens, kv_heads,
        num_heads // kv_heads, head_dim, *slots.stride()[:3], window,
    ], dtype=np.int64)  # fmt: skip
    compiled(
        scaled.data_ptr(), slots.data_ptr(), work.table.data_ptr(), work.rows.data_ptr(),
        work.first_block.data_ptr(), work.num_blocks.data_ptr(), work.parts.data_ptr(),
        work.places.data_ptr(), lengths.data_ptr(), space.data_ptr(), stats.data_ptr(),
        out.data_ptr(), lse.data_ptr(), address(sizes), rows, DTYPE_CODES[query.dtype], softcap,
    )  # fmt: skip
    return out, lse


def tree_attention_twin(
    query: Tensor,
    slots: Tensor,
    work: TreeWork,
    lengths: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The meaning of `tree_attention` in plain torch: row by row over the table, no pieces."""
    blocks = work.table.shape[1]
    _, _, kv_heads, block_tokens, head_dim = slots.shape
    positions = torch.arange(blocks * block_tokens, device=query.device)
    outs, lses = [], []
    for row in range(query.shape[0]):
        pieces = slots.index_select(0, work.table[row].long())
        # [blocks, 2, heads, tokens, dim] to [2, heads, all tokens, dim]
        pieces = pieces.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)
        seen = positions < lengths[row]
        if window is not None:
            seen &= positions >= lengths[row] - window
        # What is not written may be anything: not-a-number times zero is not zero.
        keys, values = pieces.masked_fill(~seen[:, None], 0.0)
        out, lse = attention_twin(
            query[row][None, :, None], keys[None], values[None],
            scaling=scaling, mask=seen, softcap=softcap,
        )  # fmt: skip
        outs.append(out[0, :, 0])
        lses.append(lse[0, :, 0])
    return torch.stack(outs).to(query.dtype), torch.stack(lses)


def append_rows(
    slots: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> None:
    """Write the new token of every row at position `lengths - 1`; rows of length 0 have none.

    Args:
        slots: as for `tree_attention`. [num_slots, 2, kv_heads, block_tokens, head_dim]
        keys, values: contiguous in their last dimension. [rows, kv_heads, head_dim]
        table: slot of the row's i-th block. int32 [rows, blocks]
        lengths: tokens of each row, the new one included. int32 [rows]
    """
    if uses_triton(keys):
        from penstock.kernels.tree_attention_triton import append_rows_triton

        append_rows_triton(slots, keys, values, table, lengths)
    else:
        append_rows_twin(slots, keys, values, table, lengths)


def append_rows_twin(
    slots: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> None:
    """The meaning of `append_rows` in plain torch; it asks the device which rows have a token."""
    rows = lengths.nonzero()[:, 0]
    positions = lengths[rows].long() - 1
    block_tokens = slots.shape[3]
    slot = table[rows, positions // block_tokens].long()
    slots[slot, :, :, positions % block_tokens] = torch.stack([keys, values], dim=1)[rows]
