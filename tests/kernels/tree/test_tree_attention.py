"""Attention over a tree of blocks against plain attention of every row over its own tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels import tree_attention as tree
from penstock.kernels.native import compiled
from penstock.kernels.tree_work import workspace_floats

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["torch", "compiled"]


def form_of(form: str) -> Any:
    if form == "torch":
        return tree.tree_attention_twin
    if compiled.kernel("tree_attention") is None:
        pytest.skip("no AVX-512 here, or kernels were not compiled")
    return tree.tree_attention


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_tree_is_plain_attention(tree_case: Any, form: str, data: st.DataObject) -> None:
    draw = data.draw
    seed = draw(st.integers(0, 2**31))
    case = tree_case(
        tree_case.paths(seed, draw(st.integers(1, 9)), draw(st.integers(0, 6))),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        queries=draw(st.sampled_from([1, 2, 3, 5, 8])),
        dim=draw(st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256])),
        block_tokens=draw(st.sampled_from([16, 16, 1, 8, 24, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        share=draw(st.booleans()),
        most_rows=draw(st.integers(1, 9)),
        piece_blocks=draw(st.integers(1, 7)),
        pad_works=draw(st.sampled_from([0, 1, 16])),
        seed=seed,
    )
    case.spoil_unwritten()
    window = draw(st.one_of(st.none(), st.integers(1, 120)))
    softcap = draw(st.sampled_from([None, None, 1.5, 30.0]))
    case.check(form_of(form), softcap, window)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_shows(
    tree_case: Any, form: str, share: bool, dtype: torch.dtype
) -> None:
    case = tree_case([[0, 1, 2, 3], [0, 1, 4, 5]], share=share, dtype=dtype, kv_heads=1)
    case.query[1, 2:] = float("nan")
    out, lse = form_of(form)(case.query, case.slots, case.work, case.lengths, case.scaling)
    assert not out[0].isnan().any()
    assert not out[1, :2].isnan().any()
    assert out[1, 2:].isnan().all()
    assert lse[1, 2:].isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [False, True])
def test_long_paths(tree_case: Any, form: str, share: bool) -> None:
    """Many tiles and many queries of one piece."""
    shared = list(range(40))
    rows = [[*shared, *range(100 * r + 100, 100 * r + 109)] for r in range(11)]
    case = tree_case(rows, share=share, most_rows=16, piece_blocks=25, dim=64, queries=3)
    assert (case.work.rows.ge(0).sum(1).amax() > 1) == share
    case.check(form_of(form))
    case.check(form_of(form), window=100)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_sees_nothing(tree_case: Any, form: str) -> None:
    case = tree_case([[], [1, 2], []])
    attend = form_of(form)
    out, lse = attend(case.query, case.slots, case.work, case.lengths, 1.0)
    assert not out[[0, 2]].any()
    assert lse[[0, 2]].isneginf().all()
    assert lse[1].isfinite().all()
    case.lengths.zero_()
    out, lse = attend(case.query, case.slots, case.work, case.lengths, 1.0)
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("form", FORMS)
def test_large_logits(tree_case: Any, form: str) -> None:
    """Neither the running maximum nor the merge overflows."""
    case = tree_case(tree_case.paths(5, 6, 6), dim=16)
    case.query *= 300
    case.check(form_of(form))


def test_the_caller_s_workspace(tree_case: Any) -> None:
    case = tree_case(tree_case.paths(3, 5, 5))
    attend = form_of("compiled")
    heads, dim = case.query.shape[1:]
    floats = workspace_floats(case.work, heads, dim)
    space = torch.full((floats + 5,), math.nan)
    case.check(attend, workspace=space)
    assert space[:floats].isfinite().any()
    assert space[floats:].isnan().all()
    with pytest.raises(ValueError, match="workspace"):
        case.check(attend, workspace=space[: floats - 1])
    with pytest.raises(ValueError, match="workspace"):
        case.check(attend, workspace=space.double())


def test_what_the_compiled_form_cannot_take_the_twin_does(tree_case: Any) -> None:
    tree_case(tree_case.paths(1, 4, 4), dim=24).check(tree.tree_attention)
    case = tree_case(tree_case.paths(1, 4, 4))
    case.query = case.query.double()
    out, _ = tree.tree_attention(case.query, case.slots, case.work, case.lengths, case.scaling)
    assert out.dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_appended_tokens_are_found(tree_case: Any, dtype: torch.dtype) -> None:
    """Tokens that rows write one by one, with forks sharing what is full, are what they see."""
    case = tree_case([[0, 1, 4], [0, 1, 5], [0, 2], []], block_tokens=8, dtype=dtype)
    rows, tokens = len(case.lengths), 8
    shape = (rows, 2 * tokens + 5, *case.slots[0, :, :, 0].shape)  # [rows, tokens, 2, heads, dim]
    new = torch.randn(shape).to(dtype)
    before = case.layers.clone()
    for position in range(2 * tokens + 5):
        lengths = torch.tensor([position + 1, position + 1, min(position + 1, 13), 0])
        at = lengths.sub(1).clamp_min(0)
        # Rows 0 and 1 hold two blocks together, and write the same into them.
        if position < 2 * tokens:
            new[1, position] = new[0, position]
        if position < tokens:
            new[2, position] = new[0, position]
        token = new[torch.arange(rows), at]
        tree.append_rows(
            case.slots, token[:, 0], token[:, 1], case.work.table, lengths.to(torch.int32)
        )
    for row, length in enumerate([21, 21, 13]):
        held = case.slots[case.work.table[row].long()].permute(0, 3, 1, 2, 4).flatten(0, 1)
        assert torch.equal(held[:length], new[row, :length])
    assert torch.equal(case.layers[:, [0, 2]], before[:, [0, 2]])
    unused = sorted(set(range(len(before))) - set(case.work.table[:3].flatten().tolist()))
    assert torch.equal(case.layers[unused], before[unused])
