"""merge_into() in Triton: one launch for what torch does in ten."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found"

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit
def _merge(
    out_ptr, lse_ptr, other_ptr, other_lse_ptr, count, heads, queries, dim,
    other_row, other_head, other_query, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = number < count
    query, head = number % queries, number // queries % heads
    row = number // queries // heads
    mine = tl.load(lse_ptr + number, mask=inside, other=0.0)
    theirs = tl.load(other_lse_ptr + number, mask=inside, other=0.0)
    most = tl.maximum(mine, theirs)
    seen = most > float("-inf")
    safe = tl.where(seen, most, 0.0)
    part, other_part = tl.exp(mine - safe), tl.exp(theirs - safe)
    whole = tl.where(seen, part + other_part, 1.0)
    tl.store(lse_ptr + number, tl.where(seen, safe + tl.log(whole), most), mask=inside)
    column = tl.arange(0, WIDE)
    both = inside[:, None] & (column < dim)[None, :]
    place = out_ptr + (((row * queries + query) * heads + head) * dim)[:, None] + column[None, :]
    source = other_ptr + (row * other_row + head * other_head + query * other_query)[:, None]
    former = tl.load(place, mask=both, other=0.0)
    added = tl.load(source + column[None, :], mask=both, other=0.0).to(tl.float32)
    merged = former * (part / whole)[:, None] + added * (other_part / whole)[:, None]
    tl.store(place, merged, mask=both)


def merge_into_triton(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Change `out` and `lse`; see `prompt_attention.merge_into`.

    Args:
        out: contiguous. float32 [batch, queries, num_heads, value_width]
        lse: contiguous. float32 [batch, num_heads, queries]
        other: [batch, num_heads, queries, value_width]
        other_lse: float32 [batch, num_heads, queries]
    """
    assert out.is_contiguous()
    assert lse.is_contiguous()
    other_lse = other_lse.contiguous()
    if other.stride(3) != 1:
        other = other.contiguous()
    _, heads, queries, dim = other.shape
    count = lse.numel()
    _merge[(triton.cdiv(count, _ROWS),)](
        out, lse, other, other_lse, count, heads, queries, dim, *other.stride()[:3],
        ROWS=_ROWS, WIDE=triton.next_power_of_2(dim),
    )  # fmt: skip
