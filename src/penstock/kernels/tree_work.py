"""TreeWork: who attends to which blocks; plan_work() cuts the paths of beams into pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 512, "cuda": 256})
"""Tokens of a piece by default. A GPU wants some hundreds of pieces times KV heads, a CPU a few
per core; longer pieces have fewer partial results to write and to merge."""

_TILE_QUERIES = 64
"""Queries that a piece on a GPU brings to one KV head at most, so that they fit in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkPlan:
    """`TreeWork` without its table, in host memory; int32 arrays of the same names and shapes."""

    rows: NDArray[np.int32]
    first_block: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    parts: NDArray[np.int32]
    places: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeWork:
    """Who attends to what in one step of a group; int32 tensors on the device of the queries.

    Attributes:
        table: slot of the row's i-th block; beyond the last block any slot. [rows, blocks]
        rows: rows of each piece of work, padded with -1 on the right; the first is always a row.
            [works, most_rows]
        first_block: first block of the piece, as in `table[rows[w, 0]]`. [works]
        num_blocks: of the piece; 0 is a piece that only pads. [works]
        parts: pieces of each row, as w * most_rows + its lane in the piece; padded with -1 on the
            right. [rows, most_parts]
        places: where lane j of piece w leaves its partial result: r * most_parts + k if it is the
            k-th part of row r, -1 for a lane that only pads. [works, most_rows]
    """

    table: Tensor
    rows: Tensor
    first_block: Tensor
    num_blocks: Tensor
    parts: Tensor
    places: Tensor

    @classmethod
    def of(cls, plan: WorkPlan, table: Tensor) -> "TreeWork":
        """A copy of the plan on the device of its table."""
        arrays = {field.name: getattr(plan, field.name) for field in fields(plan)}
        return cls(
            table=table,
            **{n: torch.from_numpy(a).to(table.device, copy=True) for n, a in arrays.items()},
        )

    def fill(self, plan: WorkPlan) -> None:
        """Copy a plan of the same shapes into these tensors; the table stays as it is.

        Raises:
            ValueError: the plan has other shapes.
        """
        names = [field.name for field in fields(plan)]
        for name in names:
            here, given = tuple(getattr(self, name).shape), getattr(plan, name).shape
            if here != given:
                raise ValueError(f"{name} of the plan has shape {given}, not {here}")
        for name in names:
            getattr(self, name).copy_(torch.from_numpy(getattr(plan, name)))


def most_rows_of(device_type: str, num_rows: int, queries_per_kv_head: int) -> int:
    """How many rows a piece should have at most.

    A GPU multiplies tiles of fixed height, so that no more rows are worth their while than there
    are, and no more than fit; a CPU has read and turned the keys anyway, and takes 64.
    """
    most = 64 if device_type == "cpu" else max(1, _TILE_QUERIES // queries_per_kv_head)
    return min(most, 1 << max(0, num_rows - 1).bit_length())


def workspace_floats(work: TreeWork, num_heads: int, head_dim: int) -> int:
    """Size of the workspace of `tree_attention`: an output, a maximum and a sum of each part."""
    return work.parts.numel() * num_heads * (head_dim + 2)


def taken(workspace: Tensor | None, work: TreeWork, num_heads: int, head_dim: int) -> Tensor:
    """The caller's workspace, or a new one, as flat memory.

    Raises:
        ValueError: it is too small, or not contiguous float32 on the device of the work.
    """
    floats, device = workspace_floats(work, num_heads, head_dim), work.parts.device
    if workspace is None:
        return torch.empty(floats, dtype=torch.float32, device=device)
    if (
        workspace.numel() < floats
        or workspace.dtype != torch.float32
        or workspace.device != device
        or not workspace.is_contiguous()
    ):
        raise ValueError(f"the workspace must be {floats} contiguous floats beside the work")
    return workspace.view(-1)


def plan_work(
    blocks: Sequence[NDArray[np.int64]],
    lengths_at_end: Sequence[int],
    block_tokens: int,
    *,
    share: bool,
    most_rows: int,
    piece_blocks: int,
    pad_works: int = 0,
) -> WorkPlan:
    """Cut the paths of a group's rows into pieces of work.

    With `share`, blocks that the same rows hold at the same index are one piece for all of these
    rows (a run of them is cut evenly, as are its rows); otherwise every piece has one row.

    Args:
        blocks: of each row its block ids from the beginning to the end of the step, blocks to grow
            into included. A row may have none, and sees nothing.
        lengths_at_end: tokens of each row at the end of the step; blocks beyond are left out.
        block_tokens: of a block.
        share: see above.
        most_rows: of a piece; the width of `rows`. See `most_rows_of`.
        piece_blocks: of a piece at most; see `PIECE_TOKENS`.
        pad_works: round the number of pieces up to a power of two, at least this, and that of the
            parts to a power of two, so that shapes repeat between steps; 0 pads nothing.

    Raises:
        ValueError: a row has fewer blocks than its length needs.
    """
    counts = np.array([-(-length // block_tokens) for length in lengths_at_end], dtype=np.int64)
    lengths = np.array([len(path) for path in blocks], dtype=np.int64)
    if lengths.shape != counts.shape or bool((lengths < counts).any()):
        raise ValueError("a row has fewer blocks than its length at the end of the step needs")
    if share and len(blocks) > 1:
        begins, ends, members = _shared_runs(blocks, counts)
    else:
        rows = np.flatnonzero(counts)
        begins, ends = np.zeros(len(rows), dtype=np.int64), counts[rows]
        members = np.arange(len(counts)) == rows[:, None]
    return _cut(begins, ends, members, most_rows, piece_blocks, pad_works)


def _shared_runs(
    blocks: Sequence[NDArray[np.int64]], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Maximal runs of blocks that the same rows hold: first block, end, and who. [runs(, rows)]"""
    num_rows, most = len(counts), int(counts.max())
    valid = np.arange(most)[:, None] < counts
    ids = np.zeros((most, num_rows), dtype=np.int64)
    for row, path in enumerate(blocks):
        ids[: counts[row], row] = path[: counts[row]]
    ids[~valid] = np.iinfo(np.int64).min
    # The leader of a row at an index: the first row that holds the same block there.
    order = np.argsort(ids, axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, 1)
    first = np.zeros((most, num_rows), dtype=np.int64)
    first[:, 1:] = np.where(ordered[:, 1:] != ordered[:, :-1], np.arange(1, num_rows), 0)
    np.maximum.accumulate(first, axis=1, out=first)
    leader = np.empty_like(order)
    np.put_along_axis(leader, order, np.take_along_axis(order, first, 1), 1)
    # A run goes on where no beam has come or gone.
    label = leader + np.arange(most)[:, None] * num_rows
    size = np.bincount(label.ravel(), minlength=label.size).reshape(most, num_rows)
    came = np.ones((most, num_rows), dtype=np.bool_)
    came[1:] = leader[1:] != leader[:-1]
    broken = np.zeros((most, num_rows), dtype=np.bool_)
    broken.ravel()[label[came]] = True
    broken[1:] |= size[1:] != size[:-1]
    leads = valid & (leader == np.arange(num_rows))
    # By row, each with an index more that ends its last run.
    starts = np.zeros((num_rows, most + 1), dtype=np.bool_)
    starts[:, :-1] = (leads & broken).T
    stops = np.ones((num_rows, most + 1), dtype=np.bool_)
    stops[:, :-1] = starts[:, :-1] | ~leads.T
    at, boundaries = np.flatnonzero(starts), np.flatnonzero(stops)
    after = boundaries[np.searchsorted(boundaries, at, side="right")]
    leaders, begins = at // (most + 1), at % (most + 1)
    members = valid[begins] & (leader[begins] == leaders[:, None])
    return begins, begins + after - at, members


def _cut(
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    members: NDArray[np.bool_],
    most_rows: int,
    piece_blocks: int,
    pad_works: int,
) -> WorkPlan:
    """Cut runs into pieces, evenly, and number the parts of each row."""
    num_rows = members.shape[1]
    run, row = np.nonzero(members)
    sizes = members.sum(axis=1)
    rank = np.arange(len(run)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    lanes = _balanced(sizes, most_rows)  # rows of a piece
    spans = _balanced(ends - begins, piece_blocks)  # blocks of a piece
    sheets, pieces = -(-sizes // lanes), -(-(ends - begins) // spans)
    base = np.cumsum(sheets * pieces) - sheets * pieces
    # Pieces are numbered run by run; within a run the sheets (chunks of rows) go fastest.
    works = int((sheets * pieces).sum())
    of = np.repeat(np.arange(len(begins)), sheets * pieces)
    piece = (np.arange(works) - base[of]) // sheets[of]
    start = begins[of] + piece * spans[of]
    # Every row of a run takes part in each of its pieces.
    again = pieces[run]
    turn = np.arange(int(again.sum())) - np.repeat(np.cumsum(again) - again, again)
    run, row, rank = np.repeat(run, again), np.repeat(row, again), np.repeat(rank, again)
    work, lane = base[run] + turn * sheets[run] + rank // lanes[run], rank % lanes[run]

    by_row = np.argsort(row, kind="stable")
    per_row = np.bincount(row, minlength=num_rows)
    part = np.empty_like(row)
    part[by_row] = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    most_parts, padded = max(1, int(per_row.max(initial=0))), max(1, works)
    if pad_works:
        most_parts = 1 << (most_parts - 1).bit_length()
        padded = 1 << (max(padded, pad_works) - 1).bit_length()
    plan = WorkPlan(
        rows=np.full((padded, most_rows), -1, dtype=np.int32),
        first_block=np.zeros(padded, dtype=np.int32),
        num_blocks=np.zeros(padded, dtype=np.int32),
        parts=np.full((num_rows, most_parts), -1, dtype=np.int32),
        places=np.full((padded, most_rows), -1, dtype=np.int32),
    )
    plan.rows[works:, 0] = 0
    plan.rows[work, lane] = row
    plan.first_block[:works] = start
    plan.num_blocks[:works] = np.minimum(start + spans[of], ends[of]) - start
    plan.parts[row, part] = work * most_rows + lane
    plan.places[work, lane] = row * most_parts + part
    return plan


def _balanced(sizes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """How many go into each part, so that there are as few parts as can be and they are alike."""
    balanced: NDArray[np.int64] = -(-sizes // np.maximum(1, -(-sizes // most)))
    return balanced
