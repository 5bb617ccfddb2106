"""Plans of work: every row reads each of its blocks once, and rows that share a block read it
together."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.tree_work import TreeWork, WorkPlan, most_rows_of, plan_work, taken
from penstock.kernels.tree_work import workspace_floats as floats_of


def arrays(blocks: list[list[int]]) -> list[Any]:
    return [np.array(path, dtype=np.int64) for path in blocks]


def plan(blocks: list[list[int]], **more: Any) -> WorkPlan:
    return plan_work(arrays(blocks), [16 * len(path) for path in blocks], 16, **more)


def pieces(made: WorkPlan) -> list[tuple[list[int], int, int]]:
    """Rows, first block and end of each piece that does not only pad."""
    return [
        (rows[rows >= 0].tolist(), int(first), int(first + count))
        for rows, first, count in zip(made.rows, made.first_block, made.num_blocks, strict=True)
        if count
    ]


@settings(deadline=None, max_examples=35)
@given(data=st.data())
def test_each_block_is_read_once(tree_case: Any, data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**31))
    blocks = tree_case.paths(seed, draw(st.integers(1, 12)), draw(st.integers(0, 9)))
    share, most_rows = draw(st.booleans()), draw(st.integers(1, 13))
    piece_blocks = draw(st.integers(1, 10))
    made = plan(blocks, share=share, most_rows=most_rows, piece_blocks=piece_blocks)
    seen: dict[tuple[int, int], int] = {}
    together = 0
    for rows, first, end in pieces(made):
        assert 1 <= len(rows) <= (most_rows if share else 1)
        assert end - first <= piece_blocks
        for index in range(first, end):
            assert len({blocks[row][index] for row in rows}) == 1
            together += 1
            for row in rows:
                seen[row, index] = seen.get((row, index), 0) + 1
    assert seen == {(r, i): 1 for r, path in enumerate(blocks) for i in range(len(path))}
    if share:
        holders: dict[int, int] = {}
        for path in blocks:
            for block in path:
                holders[block] = holders.get(block, 0) + 1
        assert together == sum(-(-count // most_rows) for count in holders.values())


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_places_are_where_the_merge_looks(tree_case: Any, data: st.DataObject) -> None:
    draw = data.draw
    blocks = tree_case.paths(draw(st.integers(0, 2**31)), draw(st.integers(1, 12)), 9)
    made = plan(
        blocks, share=draw(st.booleans()), most_rows=draw(st.integers(1, 5)),
        piece_blocks=draw(st.integers(1, 5)), pad_works=draw(st.sampled_from([0, 1, 64])),
    )  # fmt: skip
    most_rows, most_parts = made.rows.shape[1], made.parts.shape[1]
    found = 0
    for row, parts in enumerate(made.parts):
        held = parts[parts >= 0]
        assert (parts[len(held) :] == -1).all()
        for k, part in enumerate(held):
            work, lane = divmod(int(part), most_rows)
            assert made.rows[work, lane] == row
            assert made.places[work, lane] == row * most_parts + k
            found += 1
    assert found == (made.places >= 0).sum()
    assert (made.rows[:, 0] >= 0).all()
    real = made.num_blocks > 0
    assert ((made.rows >= 0) == (made.places >= 0))[real].all()
    assert (made.places[~real] == -1).all()


def test_runs_end_where_rows_part() -> None:
    blocks = [[1, 2, 3, 4, 10], [1, 2, 3, 5, 6, 7], [1, 2, 3, 5, 6, 8], [1, 2, 3], []]
    made = plan(blocks, share=True, most_rows=8, piece_blocks=99)
    assert sorted(pieces(made)) == [
        ([0], 3, 5), ([0, 1, 2, 3], 0, 3), ([1], 5, 6), ([1, 2], 3, 5), ([2], 5, 6),
    ]  # fmt: skip


def test_pieces_are_alike() -> None:
    """Seventeen blocks of ten rows, at most 16 blocks and 8 rows: 9 + 8, and 5 + 5."""
    made = plan([list(range(17))] * 10, share=True, most_rows=8, piece_blocks=16)
    first, second = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    assert sorted(pieces(made)) == [
        (first, 0, 9), (first, 9, 17), (second, 0, 9), (second, 9, 17),
    ]  # fmt: skip


def test_a_block_at_another_index_is_another() -> None:
    made = plan([[1, 2, 3], [2, 3, 1]], share=True, most_rows=8, piece_blocks=9)
    assert sorted(pieces(made)) == [([0], 0, 3), ([1], 0, 3)]


def test_blocks_beyond_the_end_are_left_out() -> None:
    made = plan_work(
        arrays([[1, 2, 3], [1, 2]]), [33, 16], 16, share=True, most_rows=2, piece_blocks=9
    )
    assert sorted(pieces(made)) == [([0], 1, 3), ([0, 1], 0, 1)]
    with pytest.raises(ValueError, match="fewer blocks"):
        plan_work(arrays([[1, 2]]), [33], 16, share=True, most_rows=2, piece_blocks=9)


@pytest.mark.parametrize("share", [False, True])
def test_shapes_repeat(share: bool) -> None:
    shapes = set()
    for grown in range(7, 14):
        blocks = [[1, 2, *range(10 * r + 10, 10 * r + 10 + grown)] for r in range(6)]
        made = plan(blocks, share=share, most_rows=4, piece_blocks=2, pad_works=64)
        shapes.add((made.rows.shape, made.parts.shape, made.places.shape))
        assert len(made.first_block) == len(made.num_blocks) == len(made.rows)
    assert len(shapes) == 1


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("blocks", [[], [[]], [[], []]])
def test_nothing_to_do(blocks: list[list[int]], share: bool) -> None:
    made = plan(blocks, share=share, most_rows=3, piece_blocks=2)
    assert made.rows.tolist() == [[0, -1, -1]]
    assert made.num_blocks.tolist() == [0]
    assert made.parts.tolist() == [[-1]] * len(blocks)


def test_tensors_are_filled_anew() -> None:
    cut: dict[str, Any] = {"share": True, "most_rows": 2, "piece_blocks": 2}
    first = plan([[1, 2, 3, 4], [1, 2, 5, 6]], **cut)
    other = plan([[1, 2, 3, 4], [5, 6]], **cut)
    work = TreeWork.of(first, torch.zeros(2, 4, dtype=torch.int32))
    assert work.rows.dtype == work.places.dtype == torch.int32
    before = work.rows
    work.fill(other)
    assert work.rows is before
    assert work.rows.numpy().tolist() == other.rows.tolist() != first.rows.tolist()
    assert work.places.numpy().tolist() == other.places.tolist() != first.places.tolist()
    with pytest.raises(ValueError, match="has shape"):
        work.fill(plan([[1, 2], [5]], **cut))
    assert taken(None, work, 4, 16).numel() == floats_of(work, 4, 16)


def test_rows_of_a_piece() -> None:
    assert most_rows_of("cpu", 100, 8) == 64
    assert most_rows_of("cpu", 5, 8) == 8
    assert most_rows_of("cuda", 100, 8) == 8
    assert most_rows_of("cuda", 3, 1) == 4
    assert most_rows_of("cuda", 3, 100) == 1
