"""Attention over a tree of blocks in Triton, on CUDA or in Triton's interpreter."""

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.kernels.tree_attention import append_rows, append_rows_twin, tree_attention
from penstock.kernels.tree_work import workspace_floats

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")
from penstock.kernels.tree_attention_triton import (  # noqa: E402
    append_rows_triton,
    tree_attention_triton,
)

DEVICE = "cuda" if HAS_CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("bounds_of_loops")


@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_tree_is_plain_attention(tree_case: Any, data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**31))
    case = tree_case(
        tree_case.paths(seed, draw(st.integers(1, 7)), draw(st.integers(0, 8))),
        kv_heads=draw(st.sampled_from([1, 2])),
        queries=draw(st.sampled_from([1, 2, 3, 8])),
        dim=draw(st.sampled_from([32, 64, 80])),
        block_tokens=draw(st.sampled_from([16, 16, 1, 8, 24])),
        dtype=draw(st.sampled_from(DTYPES)),
        share=draw(st.booleans()),
        most_rows=draw(st.sampled_from([1, 2, 3, 5, 8])),
        piece_blocks=draw(st.integers(1, 9)),
        pad_works=draw(st.sampled_from([0, 1, 8])),
        seed=seed,
        device=DEVICE,
    )
    case.spoil_unwritten()
    window = draw(st.one_of(st.none(), st.integers(1, 120)))
    softcap = draw(st.sampled_from([None, None, 1.5, 30.0]))
    case.check(tree_attention_triton, softcap, window)


@pytest.mark.parametrize(
    ("dim", "kv_heads", "queries", "most_rows", "dtype", "window"),
    [
        (64, 2, 1, 16, torch.float32, 77), (80, 1, 1, 1, torch.bfloat16, None),
        (96, 1, 4, 16, torch.float16, None), (128, 2, 8, 8, torch.bfloat16, 77),
        (256, 1, 2, 2, torch.float32, None),
    ],
)  # fmt: skip
def test_shapes_of_models(
    tree_case: Any, dim: int, kv_heads: int, queries: int, most_rows: int, dtype: torch.dtype,
    window: int | None,
) -> None:  # fmt: skip
    """Several tiles of a piece, more parts than the merge reads at a time."""
    rows = [[*range(16), *range(100 * r + 100, 100 * r + 102)] for r in range(2 + HAS_CUDA)]
    case = tree_case(
        rows, dim=dim, kv_heads=kv_heads, queries=queries, most_rows=most_rows, dtype=dtype,
        piece_blocks=9 if most_rows > 1 else 1, pad_works=16, device=DEVICE,
    )  # fmt: skip
    case.check(tree_attention_triton, window=window)


def test_a_row_that_sees_nothing(tree_case: Any) -> None:
    case = tree_case([[], [1, 2], []], device=DEVICE)
    heads, dim = case.query.shape[1:]
    space = torch.full((workspace_floats(case.work, heads, dim),), math.nan, device=DEVICE)
    out, lse = tree_attention_triton(
        case.query, case.slots, case.work, case.lengths, 1.0, workspace=space
    )
    assert not out[[0, 2]].any()
    assert lse[[0, 2]].isneginf().all()
    assert lse[1].isfinite().all()
    case.lengths.zero_()
    out, lse = tree_attention_triton(case.query, case.slots, case.work, case.lengths, 1.0)
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append(tree_case: Any, dtype: torch.dtype) -> None:
    """The same bytes as the twin's, with strided keys, and nowhere else."""
    case = tree_case([[0, 1], [0, 2], [], [3, 4, 5]], dim=24, block_tokens=8, dtype=dtype)
    lengths = torch.tensor([16, 9, 0, 17], dtype=torch.int32)
    both = torch.randn(4, 2, 3, 24).to(dtype)  # [rows, heads, keys and values and more, dim]
    twin = case.layers.clone()
    append_rows_twin(twin[:, 1], both[:, :, 0], both[:, :, 2], case.work.table, lengths)
    assert (twin != case.layers).any()
    layers, both = case.layers.to(DEVICE), both.to(DEVICE)
    append_rows_triton(
        layers[:, 1], both[:, :, 0], both[:, :, 2], case.work.table.to(DEVICE), lengths.to(DEVICE)
    )
    assert torch.equal(layers.cpu(), twin)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_follows_its_tensors(tree_case: Any, dtype: torch.dtype) -> None:
    """Recorded once; then new tokens, new lengths and another plan of the same shapes."""
    shared = list(range(30))
    trees = [
        [[*shared, *range(100 * r + 100, 100 * r + 106)] for r in range(6)],
        [[*shared[: 4 * r], *range(100 * r + 100, 100 * r + 136 - 4 * r)] for r in range(6)],
    ]
    made = [
        tree_case(
            blocks, dim=64, most_rows=8, piece_blocks=4, pad_works=128, dtype=dtype, seed=seed,
            device="cuda",
        )
        for seed, blocks in enumerate(trees)
    ]  # fmt: skip
    one, other = made
    assert one.plan.rows.shape == other.plan.rows.shape
    num_slots = max(len(case.layers) for case in made)
    layers = torch.zeros(num_slots, *one.layers.shape[1:], dtype=dtype, device="cuda")
    slots = layers[:, 1]
    keys = torch.randn(6, 2, 64, device="cuda").to(dtype)

    def step() -> None:
        append_rows(slots, keys, keys, one.work.table, one.lengths)
        results[:] = tree_attention(one.query, slots, one.work, one.lengths, one.scaling)

    results: list[Any] = []
    layers[: len(one.layers)] = one.layers
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in (one, other):
        layers[: len(case.layers)] = case.layers
        if case is other:
            one.work.fill(case.plan)
            one.work.table.copy_(case.work.table)
            one.query.copy_(case.query)
        for _ in range(3):
            case.lengths.add_(1).clamp_(max=36 * 16)
            one.lengths.copy_(case.lengths)
            keys.normal_()
            graph.replay()
            append_rows_twin(case.slots, keys, keys, case.work.table, case.lengths)
            assert torch.equal(layers[: len(case.layers)], case.layers)
            case.check(lambda *_, **__: results)


@pytest.mark.gpu
def test_pieces_that_pad_read_nothing(tree_case: Any) -> None:
    """A pipelined loop loads ahead: one without tokens must not begin where adding overflows."""
    case = tree_case([[0, 1]], dim=64, dtype=torch.float16, pad_works=512, device="cuda")
    case.check(tree_attention_triton)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_slots_far_apart(tree_case: Any) -> None:
    """Offsets of more than 2^31 elements, in a tensor of more than 4 GiB."""
    case = tree_case([[0, 1, 2], [0, 1, 3]], dim=128, dtype=torch.bfloat16, device="cuda")
    used = sorted(set(case.work.table.flatten().tolist()))
    per_slot = 2 * 2 * 16 * 128
    far = torch.empty((2**31 // per_slot) + len(case.slots), 2, 2, 16, 128, dtype=torch.bfloat16,
                      device="cuda")  # fmt: skip
    shift = len(far) - len(case.slots)
    far[shift:] = case.slots
    assert (shift + used[-1]) * per_slot > 2**31
    expected = tree_attention(case.query, case.slots, case.work, case.lengths, case.scaling)
    case.work.table.add_(shift)
    out = tree_attention(case.query, far, case.work, case.lengths, case.scaling)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
