"""The calls that do several steps at once: the same as one step after the other."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels import group_selection
from penstock.kernels.group_products import group_products
from penstock.kernels.group_scores import group_scores, scores_of_shares
from penstock.kernels.group_selection import GroupSelection
from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.key_rotation import KeyRotation
from penstock.kernels.low_rank import project_queries
from penstock.kernels.native import compiled
from penstock.kernels.predicted_query import PredictedQuery
from penstock.kernels.put_token import PutToken
from penstock.storage.aligned_buffer import AlignedBuffer
from penstock.storage.coalesce import coalesce_twin, plan_reads
from penstock.testing.pairs import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs = pytest.mark.skipif(compiled.kernel("top_units") is None, reason="kernels were not compiled")
bytewise = pytest.mark.skipif(compiled.kernel("group_scores") is None, reason="no VNNI here")
vectors = pytest.mark.skipif(compiled.kernel("rms_norm") is None, reason="no AVX-512 here")


@vectors
@pytest.mark.parametrize(
    ("batch", "with_bias", "with_norm", "dtype"),
    covering([1, 3], [True, False], [True, False], DTYPES),
)
def test_predicted_query(batch: int, with_bias: bool, with_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(batch)
    width, heads, dim = 192, 5, 64
    linear = Int8Linear(
        torch.randn(heads * dim, width).to(dtype),
        torch.randn(heads * dim).to(dtype) if with_bias else None,
    )
    norm, head_norm = torch.rand(width).to(dtype), torch.rand(dim).to(dtype)
    step = PredictedQuery(norm, 1e-5, linear, dim, head_norm if with_norm else None, 1e-6)
    hidden = torch.randn(batch, 1, width).to(dtype)
    cos, sin = torch.randn(1, 1, dim).to(dtype), torch.randn(1, 1, dim).to(dtype)
    assert step._kernel is not None
    fast, slow = step(hidden, cos, sin), step.twin(hidden, cos, sin)
    assert fast.shape == slow.shape == (batch, heads, dim)
    assert fast.dtype == dtype
    torch.testing.assert_close(fast, slow)
    turned = torch.randn(batch, 1, dim).to(dtype)
    torch.testing.assert_close(step(hidden, turned, turned), step.twin(hidden, turned, turned))


@bytewise
@pytest.mark.parametrize(
    ("asked", "code", "dtype"),
    covering([(0, 500, 20), (3, 130, 127), (7, 90, 400)], [(8, 16), (8, 48), (4, 32)], DTYPES),
)
@pytest.mark.parametrize("squares", [False, True])
def test_group_selection(
    asked: tuple[int, int, int], code: tuple[int, int], dtype: torch.dtype, squares: bool
) -> None:
    (first, end, wanted), (bits, rank) = asked, code
    torch.manual_seed(end)
    batch, heads, kv_heads, dim = 2, 6, 3, 32
    width = rank if bits == 8 else rank // 2
    codes = torch.randint(-127, 128, (batch, 8, 4, 64, width), dtype=torch.int8)
    codes = codes if bits == 8 else codes.view(torch.uint8)
    basis = torch.randn(kv_heads * dim, rank).to(dtype)
    factor = torch.rand(rank) / 100
    best = GroupSelection(codes, basis, factor, bits, heads, kv_heads, squares=squares)
    assert best.is_compiled
    query = torch.randn(batch, heads, dim).to(dtype)
    fast, slow = best.best(query, first, end, wanted), best.twin(query, first, end, wanted)
    assert fast.shape == (batch, min(wanted, end - first))
    np.testing.assert_array_equal(fast, slow)
    resident = np.array([[-1, first, end - 1, end + 1], [end, first + 5, -1, 0]], dtype=np.int32)
    fast, slow = (each(query, first, end, wanted, resident, 3.0) for each in (best.best, best.twin))
    np.testing.assert_array_equal(fast, slow)
    assert best.best(query, end, end, wanted).shape == (batch, 0)


SHAPES = [(6, 3, 32, 16, 8), (20, 4, 64, 48, 4), (14, 2, 64, 24, 8), (5, 1, 16, 8, 8)]
"""Heads, KV heads, their width, components and bits."""


@bytewise
@pytest.mark.parametrize(
    ("shape", "turning", "asked", "dtype"),
    covering(SHAPES, [(1, False), (0.5, True)], [(0, 1024), (3, 2001), (70, 530)], DTYPES),
)
def test_selection_of_turned_keys(
    shape: tuple[int, int, int, int, int], turning: tuple[float, bool], asked: tuple[int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Every block's query is made in 8 bits: what is chosen has the shares of the twin's choice."""
    (heads, kv_heads, dim, rank, bits), (share, interleaved), (first, end) = shape, turning, asked
    torch.manual_seed(end)
    pairs = int(share * dim) // 2
    frequencies = 1e4 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    turns = KeyRotation(frequencies, interleaved).turns(64, 8 * 16, torch.device("cpu"))
    codes = torch.randint(-127, 128, (2, 8, 4, 256, rank * bits // 8), dtype=torch.int8)
    codes = codes if bits == 8 else codes.view(torch.uint8)
    basis = torch.linalg.qr(torch.randn(kv_heads * dim, kv_heads * dim))[0][:, :rank]
    factor = torch.rand(rank) * (0.01 if bits == 8 else 0.12)
    selection = GroupSelection(
        codes, basis.to(dtype).contiguous(), factor, bits, heads, kv_heads, turns
    )
    assert selection.is_compiled
    query = torch.randn(2, heads, dim).to(dtype)
    parts = turns.queries(query, basis.to(dtype), kv_heads, factor, 0, 8 * 16)
    logits = group_products(codes, parts, bits)
    starts = torch.tensor([0, first])
    expected = scores_of_shares(logits.clone(), end, starts)
    scores = selection.scores(query, end, starts)
    assert torch.equal(scores[1, :first], torch.zeros(first))
    torch.testing.assert_close(scores.sum(1), torch.full((2,), float(heads)), rtol=1e-4, atol=0)
    assert (scores - expected).abs().max() < 0.05 * expected.max()
    by_head = selection.logits(query, end)
    assert (by_head - logits[:, :end]).abs().max() < 0.02 * logits.abs().max()
    own = scores_of_shares(by_head.clone(), end, starts)
    torch.testing.assert_close(own, scores, rtol=1e-4, atol=1e-6)
    rooted = GroupSelection(
        codes, basis.to(dtype).contiguous(), factor, bits, heads, kv_heads, turns, squares=True
    ).scores(query, end, starts)
    own = scores_of_shares(by_head, end, starts, squares=True)
    torch.testing.assert_close(rooted, own, rtol=1e-4, atol=1e-6)
    whole = scores_of_shares(logits, end)
    fast, slow = (
        torch.from_numpy(chosen(query, first, end, 50))
        for chosen in (selection.best, selection.twin)
    )
    assert fast.shape == slow.shape == (2, 50)
    assert (fast[:, 1:] > fast[:, :-1]).all()
    assert int(fast.min()) >= first
    assert (whole.gather(1, fast).sum(1) > 0.995 * whole.gather(1, slow).sum(1)).all()


@bytewise
def test_turned_queries_are_those_of_eight_bits() -> None:
    """Where nothing turns, products of the codes are what one query for all groups gives them."""
    torch.manual_seed(0)
    heads, kv_heads, dim, rank = 16, 4, 32, 32
    still = KeyRotation(torch.zeros(dim // 2, dtype=torch.float64))
    turns = still.turns(64, 32, torch.device("cpu"))
    codes = torch.randint(-127, 128, (1, 2, 4, 256, rank), dtype=torch.int8)
    given = (codes, torch.randn(kv_heads * dim, rank), torch.rand(rank) / 500, 8, heads, kv_heads)
    turned, plain = GroupSelection(*given, turns), GroupSelection(*given)
    query = torch.randn(1, heads, dim)
    low_rank = project_queries(query, given[1], kv_heads, given[2])
    expected = group_scores(codes, low_rank, 8, 512)
    torch.testing.assert_close(turned.scores(query, 512), expected, rtol=0.2, atol=2e-3)
    fast, slow = turned.best(query, 0, 512, 60), plain.best(query, 0, 512, 60)
    assert len(np.intersect1d(fast, slow)) >= 57


@bytewise
def test_queries_that_are_no_numbers() -> None:
    turns = KeyRotation(torch.ones(8, dtype=torch.float64)).turns(64, 16, torch.device("cpu"))
    codes = torch.randint(-127, 128, (1, 1, 4, 256, 16), dtype=torch.int8)
    selection = GroupSelection(codes, torch.randn(32, 16), torch.ones(16), 8, 2, 2, turns)
    for number in (float("nan"), float("inf"), -float("inf"), 3e38):
        query = torch.full((1, 2, 16), number)
        chosen = selection.best(query, 5, 250, 20)
        assert chosen.shape == (1, 20)
        assert chosen.min() >= 5
        assert chosen.max() < 250


def test_without_a_kernel_the_steps_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_selection, "kernel", lambda name: None)
    codes = torch.randint(-127, 128, (1, 1, 2, 64, 16), dtype=torch.int8)
    basis = torch.randn(32, 16)
    best = GroupSelection(codes, basis, torch.ones(16), 8, 2, 1)
    assert not best.is_compiled
    assert best.best(torch.randn(1, 2, 32), 0, 60, 5).shape == (1, 5)


@needs
@pytest.mark.parametrize("dtype", DTYPES)
def test_put_token(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool, shown = torch.randn(2, 2, 9, 2, 3, 8).to(dtype), torch.ones(2, 2, 9).to(dtype)
    keys, values = torch.randn(2, 3, 1, 8).to(dtype), torch.randn(2, 3, 1, 8).to(dtype)
    put = [PutToken(pool[i][:, 2:], shown[i][:, 2:]) for i in range(2)]
    pool[1], shown[1] = pool[0], shown[0]
    assert put[0]._kernel is not None
    for place, new in ((0, keys), (6, keys.transpose(1, 3).contiguous().transpose(1, 3))):
        put[0](new, values, place)
        put[1].twin(new, values, place)
    assert torch.equal(pool[0], pool[1])
    assert torch.equal(shown[0], shown[1])
    assert shown[0][:, 2].eq(0).all()
    assert shown[0][:, [0, 1, 3]].eq(1).all()


@needs
@given(st.data())
def test_plan_reads(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    units = np.array(sorted(data.draw(st.permutations(range(60)))[:count]), dtype=np.int64)
    first = data.draw(st.integers(0, 3))
    rows = np.arange(first, first + count, dtype=np.int64)
    if data.draw(st.booleans()):
        rows = np.array(data.draw(st.permutations(rows.tolist())), dtype=np.int64)
    most = data.draw(st.integers(1, 5))
    buffer = AlignedBuffer(50, 512)
    reads = plan_reads(units, rows, most, buffer)
    assert reads is not None
    runs = coalesce_twin(units, rows, most)
    expected = (runs.first_units * 512, runs.num_units * 512, runs.first_slots * 512)
    for found, wanted, base in zip(reads, expected, (0, 0, buffer.address), strict=True):
        np.testing.assert_array_equal(found - base, wanted)


@needs
def test_plan_reads_leaves_the_rest_to_others() -> None:
    buffer = AlignedBuffer(4, 512)
    ids = np.array([1, 2], dtype=np.int64)
    assert plan_reads(ids[::-1].copy(), ids, 4, buffer) is None, "units that do not ascend"
    assert plan_reads(ids, ids + 2, 4, buffer) is None, "a row behind the buffer"
    assert plan_reads(ids, ids - 2, 4, buffer) is None, "a row in front of it"
    assert plan_reads(np.arange(4)[::2], ids, 4, buffer) is None, "not contiguous"
