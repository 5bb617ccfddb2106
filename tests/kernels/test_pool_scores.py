"""What a pool's tokens are worth: compiled kernels and their twins mean the same."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import pool_scores as module
from penstock.kernels.native import compiled
from penstock.kernels.pool_scores import logit_sums, pool_logits
from penstock.testing.pairs import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(1, 1), (8, 8), (8, 1), (8, 4), (8, 2), (16, 2)]
"""Query and KV heads: MHA, MQA, and GQA of 2, 4 and 8."""
HIDDEN = float("-inf")


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(module, "kernel", lambda name: None)
    elif compiled.kernel("pool_logits") is None:
        pytest.skip("no AVX-512 here")
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(
    rows: int, places: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A query, a pool of which every third place is hidden and holds no numbers, and its mask."""
    torch.manual_seed(places * dim + heads)
    tokens = torch.randn(rows, places, 2, kv_heads, dim).to(dtype)
    mask = torch.zeros(rows, places, dtype=dtype)
    mask[:, 1::3] = HIDDEN
    tokens[:, 1::3] = float("nan")
    return torch.randn(rows, heads, dim).to(dtype) * 2, tokens, mask


def pool_scores(
    query: Tensor, tokens: Tensor, mask: Tensor, scaling: float,
    normalisers: Tensor | None = None, *, products: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Worth of every place, as the near-storage index takes it, and each head's log-sum-exp."""
    logits, sums = pool_logits(query, tokens, mask, scaling)
    if products:
        return logit_sums(logits, None).div_(scaling), sums
    return logit_sums(logits, sums if normalisers is None else normalisers), sums


def exactly(query: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Raw products in double precision, zero in hidden places. [rows, heads, places]"""
    keys = tokens[:, :, 0].double().masked_fill((mask != 0)[:, :, None, None], 0.0)
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[2], dim=2)
    return torch.einsum("rhd,rphd->rhp", query.double(), keys)


@pytest.mark.parametrize(
    ("shape", "dim", "places", "dtype"),
    covering(HEADS, [32, 64, 80, 128], [1, 16, 131, 300], DTYPES),
)
def test_scores(
    shape: tuple[int, int], dim: int, places: int, dtype: torch.dtype, way: str
) -> None:
    heads, kv_heads = shape
    query, tokens, mask = made(2, places, heads, kv_heads, dim, dtype)
    hidden, scaling = mask != 0, dim**-0.5
    products = exactly(query, tokens, mask)
    logits = (products * scaling).masked_fill(hidden[:, None], HIDDEN)
    exact_sums = torch.logsumexp(logits, dim=2)
    given = exact_sums.float() + torch.randn(2, heads)
    for normalisers, rule, exact in (
        (None, False, torch.exp(logits - exact_sums[..., None]).sum(1)),
        (given, False, torch.exp(logits - given.double()[..., None]).sum(1)),
        (None, True, products.sum(1)),
        (given, True, products.sum(1)),
    ):
        scores, sums = pool_scores(query, tokens, mask, scaling, normalisers, products=rule)
        assert scores.dtype == sums.dtype == torch.float32
        assert (scores[hidden] == HIDDEN).all()
        kept = exact.masked_fill(hidden, HIDDEN).float()
        torch.testing.assert_close(scores, kept, rtol=2e-4, atol=1e-3 if rule else 1e-9)
        torch.testing.assert_close(sums, exact_sums.float(), rtol=1e-5, atol=1e-4)
    found, plain = (f(query, tokens.nan_to_num(0.0), mask, scaling)[0] for f in (
        pool_logits, module.pool_logits_twin,
    ))  # fmt: skip
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_own_shares_sum_to_the_heads(way: str) -> None:
    query, tokens, mask = made(3, 500, 8, 2, 64, torch.bfloat16)
    scores, _ = pool_scores(query, tokens, mask, 0.125)
    total = scores.masked_fill(mask != 0, 0.0).sum(1)
    torch.testing.assert_close(total, torch.full((3,), 8.0), rtol=1e-4, atol=0)


def test_rows_that_see_nothing(way: str) -> None:
    query, tokens, mask = made(2, 40, 4, 2, 64, torch.float32)
    mask[1] = HIDDEN
    for rule in (False, True):
        scores, sums = pool_scores(query, tokens, mask, 0.125, products=rule)
        assert (scores[1] == HIDDEN).all()
        assert (sums[1] == HIDDEN).all()
        assert scores[0, 0].isfinite()
        assert sums[0].isfinite().all()
    empty = pool_scores(query, tokens[:, :0], mask[:, :0], 0.125)
    assert empty[0].shape == (2, 0)
    assert (empty[1] == HIDDEN).all()


def test_far_from_the_normaliser(way: str) -> None:
    """Nothing overflows, whatever was seen last."""
    query, tokens, mask = made(1, 40, 4, 2, 64, torch.float32)
    seen = (mask == 0)[0]
    for given, expected in ((-1e6, 4 * torch.tensor(80.0).exp()), (1e6, torch.tensor(0.0))):
        scores, _ = pool_scores(query, tokens, mask, 0.125, torch.full((1, 4), given))
        torch.testing.assert_close(scores[0, seen], expected.expand(int(seen.sum())))


def test_threads_do_not_change_anything(two_threads: None) -> None:
    if compiled.kernel("pool_logits") is None:
        pytest.skip("no AVX-512 here")
    query, tokens, mask = made(3, 2111, 8, 4, 64, torch.bfloat16)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append([
            *pool_scores(query, tokens, mask, 0.125),
            *pool_scores(query, tokens, mask, 0.125, products=True),
        ])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_the_kernel_does_not_take() -> None:
    """Other widths, pools that lie apart and masks in another dtype go to the twin."""
    for dim in (20, 64):
        query, tokens, mask = made(2, 33, 4, 2, dim, torch.float32)
        wide = torch.zeros(2, 66, 2, 2, dim)
        wide[:, ::2] = tokens
        for pool, hiding in ((wide[:, ::2], mask), (tokens, mask.double())):
            scores, sums = pool_scores(query, pool, hiding, 0.125)
            logits, exact = module.pool_logits_twin(query, tokens, mask, 0.125)
            torch.testing.assert_close(sums, exact)
            torch.testing.assert_close(scores, module.logit_sums_twin(logits, exact))


def test_sums_of_logits() -> None:
    logits = torch.randn(2, 5, 700)
    logits[:, :, 3] = HIDDEN
    for normalisers in (None, torch.randn(2, 5)):
        torch.testing.assert_close(
            logit_sums(logits, normalisers), module.logit_sums_twin(logits, normalisers)
        )
