"""Every compiled kernel means what its plain twin means."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.selection import Selection
from penstock.engine import fetch_plan
from penstock.engine.tiers import fifo
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels import decode_attention as attention
from penstock.kernels import group_scores as scores
from penstock.kernels import low_rank, query_steps, slot_codes
from penstock.kernels import top_units as top
from penstock.kernels.group_products import group_products
from penstock.kernels.int8_linear import Int8Linear
from penstock.kernels.native import compiled
from penstock.storage import coalesce as coalescing
from penstock.storage import native_aio
from penstock.testing.integrity import check_slots
from penstock.testing.pairs import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs = pytest.mark.skipif(compiled.kernel("top_units") is None, reason="kernels were not compiled")
bytewise = pytest.mark.skipif(compiled.kernel("group_scores") is None, reason="no VNNI here")
vectors = pytest.mark.skipif(compiled.kernel("rms_norm") is None, reason="no AVX-512 here")


def random_codes(batch: int, blocks: int, group: int, groups: int, rank: int, bits: int) -> Any:
    size = (batch, blocks, group, groups, rank if bits == 8 else rank // 2)
    if bits == 8:
        return torch.randint(-127, 128, size, dtype=torch.int8)
    return torch.randint(0, 256, size, dtype=torch.uint8)


@bytewise
@pytest.mark.parametrize(
    ("width", "heads", "num_groups"),
    covering([(8, 4), (8, 48), (4, 8), (4, 40)], [1, 8, 16, 40], [1, 5, 63, 64, 3000]),
)
def test_group_scores(width: tuple[int, int], heads: int, num_groups: int) -> None:
    bits, rank = width
    torch.manual_seed(heads)
    codes = random_codes(2, -(-num_groups // 64), 4, 64, rank, bits)
    queries = torch.randn(2, heads, rank) * 4 / codes.float().std() / rank**0.5
    assert scores.is_compiled(codes, bits)
    fast = scores.group_scores(codes, queries, bits, num_groups)
    slow = scores.group_scores_twin(codes, queries, bits, num_groups)
    assert fast.shape == slow.shape == (2, num_groups)
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(fast.sum(1), torch.full((2,), float(heads)), rtol=1e-4, atol=0)
    fast = scores.group_scores(codes, queries, bits, num_groups, squares=True)
    slow = scores.group_scores_twin(codes, queries, bits, num_groups, squares=True)
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-6)


@bytewise
@pytest.mark.parametrize("num_groups", [70, 1030, 5000])
@pytest.mark.parametrize("bits", [4, 8])
def test_group_scores_without_what_is_padding(bits: int, num_groups: int) -> None:
    """As those of a row that begins there; one of the rows has no group at all."""
    torch.manual_seed(num_groups)
    starts = [0, 1, 3, 4, 66, num_groups - 1, num_groups, num_groups + 5]
    codes = random_codes(len(starts), -(-num_groups // 64), 4, 64, 32, bits)
    queries = torch.randn(len(starts), 20, 32) * 4 / codes.float().std() / 32**0.5
    first = torch.tensor(starts)
    fast = scores.group_scores(codes, queries, bits, num_groups, first)
    slow = scores.group_scores_twin(codes, queries, bits, num_groups, first)
    torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-6)
    products = group_products(codes, queries, bits)
    for row, start in enumerate(starts):
        assert not fast[row, :start].any()
        if start < num_groups:
            own = scores.scores_of_shares(products[row : row + 1, start:num_groups].clone(), 99999)
            torch.testing.assert_close(fast[row, start:], own[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 16, 37])
def test_scores_are_one_number_of_the_heads_shares(heads: int) -> None:
    torch.manual_seed(heads)
    logits = 5 * torch.randn(2, 300, heads)
    shares = torch.softmax(logits[:, :290].double(), dim=1)
    summed = scores.scores_of_shares(logits.clone(), 290)
    torch.testing.assert_close(summed.double(), shares.sum(2), rtol=1e-4, atol=1e-7)
    rooted = scores.scores_of_shares(logits.clone(), 290, squares=True)
    torch.testing.assert_close(rooted.double(), shares.square().sum(2).sqrt(), rtol=1e-4, atol=1e-7)


@bytewise
def test_group_scores_survive_extremes() -> None:
    codes = random_codes(1, 2, 2, 64, 8, 8)
    queries = torch.tensor([[[1e4] * 8, [0.0] * 8]])
    fast = scores.group_scores(codes, queries, 8, 100)
    assert fast.isfinite().all()
    assert torch.allclose(fast.sum(), torch.tensor(2.0))


@needs
@given(
    st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 0.25001, 7.0, 1e30]), min_size=1, max_size=80),
    st.integers(0, 5),
    st.integers(1, 90),
)
def test_top_units(values: list[float], first: int, wanted: int) -> None:
    given_scores = torch.tensor([values, values[::-1]])
    fast = top.top_units(given_scores, first, wanted)
    slow = top.top_units_twin(given_scores, first, wanted)
    assert fast.shape == slow.shape
    assert (np.diff(fast, axis=1) > 0).all()
    assert (fast >= first).all()
    for row, (a, b) in enumerate(zip(fast, slow, strict=True)):
        assert sorted(given_scores[row, a].tolist()) == sorted(given_scores[row, b].tolist())


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "places"),
    [
        (1, 4, 4, 16, 1),
        (2, 6, 2, 48, 33),
        (3, 16, 2, 128, 100),
        (1, 9, 1, 64, 470),
        (2, 8, 4, 80, 77),
        (1, 3, 3, 64, 50),
    ],
)
def test_decode_attention(
    batch: int, heads: int, kv_heads: int, dim: int, places: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(places)
    tokens = torch.randn(batch, places, 2, kv_heads, dim).to(dtype)
    query = torch.randn(batch, heads, 1, dim).to(dtype) * 3
    mask = torch.zeros(batch, places, dtype=dtype)
    mask[:, 1::3] = float("-inf")
    tokens[:, 1::3] = float("nan")  # hidden places may hold anything
    assert compiled.kernel("decode_attention") is not None
    sums, expected = torch.zeros(batch, heads), torch.zeros(batch, heads)
    fast = attention.decode_attention(query, tokens, mask, dim**-0.5, sums)
    wide = tokens.float().nan_to_num(0.0)
    slow = attention.decode_attention_twin(query.float(), wide, mask.float(), dim**-0.5, expected)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(attention.decode_attention(query, tokens, mask, dim**-0.5), fast)
    assert fast.dtype == dtype
    precision = 1e-5 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(fast.float(), slow, rtol=precision, atol=precision)


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5, 40])
def test_decode_attention_hides_no_nan(dtype: torch.dtype, bad: float, place: int) -> None:
    """What is not finite shows, as it does in torch: an answer of zeros would look like one."""
    torch.manual_seed(0)
    tokens, query = torch.randn(2, 41, 2, 2, 32).to(dtype), torch.randn(2, 4, 1, 32).to(dtype)
    mask = torch.zeros(2, 41, dtype=dtype)
    tokens[0, place, 0, 1, 3] = bad
    fast = attention.decode_attention(query, tokens, mask, 0.2)
    slow = attention.decode_attention_twin(
        query.float(), tokens.float(), mask.float(), 0.2
    )  # fmt: skip
    assert torch.equal(fast.isnan(), slow.isnan())
    assert not fast[1].isnan().any()
    assert not fast[0, :2].isnan().any(), "the other head's"
    if bad != float("-inf"):
        assert fast.isnan().any()
    query[1, 0, 0, 0] = float("nan")
    assert attention.decode_attention(query, tokens, mask, 0.2)[1, 0].isnan().all()


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "slots", "places"),
    [(1, 4, 4, 16, 1, 1), (3, 6, 2, 48, 7, 33), (2, 16, 2, 128, 160, 20), (1, 4, 2, 80, 9, 11)],
)
def test_slots_in_8_bits(
    batch: int, heads: int, kv_heads: int, dim: int, slots: int, places: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(slots)
    group, count = 3, batch * slots
    units = torch.randn(count, group, 2, kv_heads, dim + 16).to(dtype)[..., :dim].contiguous()
    units *= torch.rand(count, group, 2, kv_heads, 1).to(dtype) * 30
    units[0, 0, 0, 0] = 0.0
    assert compiled.kernel("code_units") is not None
    width = group * slot_codes.coded_token_bytes(kv_heads, dim)
    fast, slow = torch.full((2, count + 1, width), 7, dtype=torch.uint8)
    order = np.random.default_rng(0).permutation(count)
    slot_codes.code_units(units, fast, order)
    slot_codes.code_units_twin(units, slow, order)
    assert torch.equal(fast, slow)
    codes = fast[:count].view(batch, slots * group, -1)
    numbers = slot_codes.numbers_of(codes, kv_heads, dim, torch.float32)
    numbers = numbers.view(count, group, 2, kv_heads, dim)[torch.from_numpy(order)]
    wide = units.float()
    steps = wide.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)
    assert bool(((numbers - wide).abs() <= steps * 0.501).all())

    tokens = torch.randn(batch, places, 2, kv_heads, dim).to(dtype)
    query = torch.randn(batch, heads, 1, dim).to(dtype) * 0.3
    mask = torch.zeros(batch, slots * group + places, dtype=dtype)
    mask[:, :-1:3] = float("-inf")
    codes[:, ::3] = 255  # hidden places may hold anything; so many ones are no number
    sums, expected = torch.zeros(batch, heads), torch.zeros(batch, heads)
    found = attention.coded_attention(query, codes, tokens, mask, dim**-0.5, sums)
    wanted = attention.coded_attention_twin(
        query.float(), codes, tokens.float(), mask.float(), dim**-0.5, expected
    )
    assert found.dtype == dtype
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    precision = 1e-4 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(found.float(), wanted, rtol=precision, atol=30 * precision)


@vectors
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_slots_in_8_bits_hide_no_nan(bad: float) -> None:
    units = torch.ones(2, 1, 2, 2, 16)
    units[1, 0, 1, 0, 3] = bad
    for code in (slot_codes.code_units, slot_codes.code_units_twin):
        memory = torch.zeros(2, slot_codes.coded_token_bytes(2, 16), dtype=torch.uint8)
        code(units, memory, np.arange(2))
        numbers = slot_codes.numbers_of(memory, 2, 16, torch.float32)
        assert numbers[1, 1, 0].isnan().all()
        numbers[1, 1, 0] = 1.0
        assert torch.allclose(numbers, torch.ones(()), rtol=1e-2)
        out = attention.coded_attention(
            torch.ones(1, 2, 1, 16), memory[None], torch.ones(1, 1, 2, 2, 16), torch.zeros(1, 3), 1
        )
        assert out[0, :, 0, 0].isnan().tolist() == [True, False]


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.randn(64).to(dtype)
    precision: dict[str, Any] = {}
    if dtype != torch.float32:
        precision = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(
        query_steps.rms_norm(x, weight, 1e-6), query_steps.rms_norm_twin(x, weight, 1e-6),
        **precision,
    )  # fmt: skip
    cos, sin = torch.randn(2, 2, 64).to(dtype)
    for norm in (None, weight):
        torch.testing.assert_close(
            query_steps.turn_query(x, cos, sin, norm, 1e-6),
            query_steps.turn_query_twin(x, cos, sin, norm, 1e-6),
            **precision,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_query_on_a_gpu_is_turned_as_here(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, where the kernel is its twin; an angle for each row, or one for all."""
    torch.manual_seed(rows)
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.randn(64).to(dtype)
    cos, sin = torch.randn(2, rows, 64).to(dtype)
    monkeypatch.setattr(query_steps, "uses_triton", lambda tensor: True)
    for norm in (None, weight):
        found = query_steps.turn_query(x, cos, sin, norm, 1e-6)
        exact = query_steps.turn_query_twin(x, cos, sin, norm, 1e-6)
        assert torch.equal(found, exact)


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [16, 48, 80])
def test_low_rank_products(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    basis, factor = torch.randn(2 * 32, rank).to(dtype), torch.rand(rank)
    query = torch.randn(3, 6, 32).to(dtype)
    pool = torch.randn(3, 8, 2, 2, 32).to(dtype)
    exact = dtype == torch.float32
    precision: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 2e-2, "atol": 0.2}
    )
    torch.testing.assert_close(
        low_rank.project_queries(query, basis, 2, factor),
        low_rank.project_queries_twin(query, basis, 2, factor), **precision,
    )  # fmt: skip
    torch.testing.assert_close(
        low_rank.project_keys(pool[:, :, 0], basis, factor),
        low_rank.project_keys_twin(pool[:, :, 0], basis, factor), **precision,
    )  # fmt: skip


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_linear(with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(37, 128).to(dtype), torch.randn(2, 3, 128).to(dtype)
    bias = torch.randn(37).to(dtype) if with_bias else None
    layer = Int8Linear(weight, bias)
    precision: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {}
    torch.testing.assert_close(layer(x), layer.twin(x), **precision)
    true = torch.nn.functional.linear(x, weight, bias).float()
    assert (layer(x).float() - true).abs().max() < 0.02 * true.abs().max()
    held = layer.weight.nbytes + layer.scale.nbytes + (0 if bias is None else 4 * 37)
    assert held == Int8Linear.num_bytes(weight, bias)
    view = Int8Linear(weight.t().contiguous().t(), bias)  # the same, column by column
    torch.testing.assert_close(view(x), layer(x))


@needs
@given(st.data())
def test_fetch_plans(data: st.DataObject) -> None:
    """The compiled clock and the numpy one, step after step on tables of their own."""
    batch, slots, width, units = 2, 5, 3, 9
    tables = [SlotTable(batch, slots, units) for _ in range(2)]
    clocks: list[FIFO] = [FIFO(batch, slots), _PlainFIFO(batch, slots)]
    for _ in range(data.draw(st.integers(1, 6))):
        rows = [sorted(data.draw(st.permutations(range(units)))[:width]) for _ in range(batch)]
        valid = np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6))).reshape(2, 3)
        selection = Selection(np.array(rows), data.draw(st.sampled_from([None, valid])))
        fast, slow = (
            fetch_plan.plan_fetch(selection, table, clock)
            for table, clock in zip(tables, clocks, strict=True)
        )
        for name in ("rows", "units", "slots", "selected_slots"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist(), name
        assert (fast.num_wanted, fast.num_hit) == (slow.num_wanted, slow.num_hit)
        assert (tables[0].unit_in == tables[1].unit_in).all()
        check_slots(tables[0])


class _PlainFIFO(FIFO):
    """Not a FIFO to `plan_fetch`, which knows that class alone."""


@needs
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40), st.integers(1, 5))
def test_coalescing(pairs: list[tuple[int, int]], most: int) -> None:
    units, rows = (np.array(part, dtype=np.int64) for part in zip(*pairs, strict=True)) if pairs \
        else (np.empty(0, dtype=np.int64),) * 2  # fmt: skip
    fast, slow = (way(units, rows, most) for way in (coalescing.coalesce, coalescing.coalesce_twin))
    for a, b in zip(fast, slow, strict=True):
        assert a.tolist() == b.tolist()


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every caller has a plain way, which is what runs where nothing was compiled."""
    none: Callable[[str], None] = lambda name: None  # noqa: E731
    for module in (attention, scores, low_rank, query_steps, top, fifo, coalescing):
        monkeypatch.setattr(module, "kernel", none)
    test_results = (
        top.top_units(torch.tensor([[3.0, 1.0, 2.0]]), 0, 2).tolist(),
        coalescing.coalesce(np.array([4, 5]), np.array([0, 1]), 8).num_units.tolist(),
        query_steps.rms_norm(torch.ones(1, 16), torch.ones(16), 0.0).sum().item(),
        scores.is_compiled(random_codes(1, 1, 2, 4, 8, 8), 8),
        low_rank.store_codes(torch.ones(1, 2, 8), random_codes(1, 1, 2, 4, 8, 8), 8, 0),
    )
    assert test_results == ([[0, 2]], [2], 16.0, False, False)


@needs
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_stored_as_by_torch(bits: int) -> None:
    from penstock.core.shape import KVShape
    from penstock.engine.adapter import fit_layer
    from penstock.methods.kvswap.index import LowRankIndex

    torch.manual_seed(bits)
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
    )
    keys = torch.randn(2, 8, 2, 16)
    adapter = fit_layer(torch.randn(300, 32), 16)
    made = []
    for few in (64, 0):
        index = LowRankIndex(
            shape, batch=2, max_units=600, group_tokens=4, rank=16, bits=bits, scaling=0.25,
            head_reduction="softmax", adapter=adapter, device=torch.device("cpu"),
        )  # fmt: skip
        before, low_rank._FEW_TOKENS = low_rank._FEW_TOKENS, few
        try:
            index.append(keys, 255 * 4)  # across two blocks
        finally:
            low_rank._FEW_TOKENS = before
        made.append(index._codes)
    touched = [codes.flatten(1, 3)[codes.flatten(1, 3) != 0].numel() for codes in made]
    assert touched[0] == touched[1] > 0
    off = (made[0].int() - made[1].int()).abs()
    assert (off > 0).float().sum() <= 0.01 * touched[0], "a rounding apart at most, and rarely"


@needs
def test_events_are_told_apart() -> None:
    queue_like: Any = type("Q", (), {})()
    queue_like._events = np.array(
        [[7 << 32 | 0, 0, 512, 0], [8 << 32 | 0, 0, 100, 0], [7 << 32 | 1, 0, -5, 0]]
    )
    iocbs = np.zeros((2, 8), dtype=np.int64)
    iocbs[:, native_aio._LENGTH] = 512
    check = compiled.kernel("check_events")
    assert check is not None
    for number, expected in ((7, (2, 2)), (8, (1, 1)), (9, (0, -1))):
        ticket: Any = type("T", (), {"number": number, "iocbs": iocbs})()
        assert native_aio.AioQueue._check_twin(queue_like, ticket, 3) == expected
        found = np.empty(2, dtype=np.int64)
        check(
            compiled.address(queue_like._events), 3, number, compiled.address(iocbs),
            compiled.address(found),
        )  # fmt: skip
        assert found.tolist() == list(expected)


def test_stale_libraries_are_not_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled._FOLDER / compiled.file_name()
    if not found.exists():
        pytest.skip("kernels were not compiled")
    monkeypatch.setattr(compiled, "source_digest", lambda: "another")
    with pytest.warns(UserWarning, match="older than their sources"):
        assert compiled._load.__wrapped__(found) is None
    broken = tmp_path / found.name
    broken.write_bytes(b"no library")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert compiled._load.__wrapped__(broken) is None
