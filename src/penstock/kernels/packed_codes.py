"""best_codes() and symmetric_codes(): groups of weights in 4 and 8 bits, with the least error."""

import torch
from torch import Tensor

_SHARES = (1.0, 0.92, 0.84)
"""Of a group's range, tried as the range of its codes: outliers cost the others their precision."""
_LEAST_SPREAD = 3e-5
"""Of codes, for which a slope means something."""
_ROUNDS = 2
"""Of: the best scale and offset for the codes, the best codes for these."""
_STEPS = range(15, 6, -1)
"""Of a grid, that a group's range may be."""
_OFF_THE_GRID = 0.2
"""Of a step: more than bfloat16 moves weights on one, and the ends of their range."""
_SHARE_ON_A_GRID = 0.25
"""Of a row's groups, from which on all others are looked at."""

_LARGEST = 127
"""Code of 8 bits."""
_FINENESSES = 16
"""Parts that a grid's step may be divided into: tried from the most on."""


def best_codes(
    weight: Tensor, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scales and offsets: weight = (code - 8) * scale + offset.

    Alternating least squares from several ranges, the best of which is taken. It is the search of
    llama.cpp's `make_qkx2_quants`. Weights that lie on a grid of 16 levels already, as those of
    quantisation-aware training do and those of a 4-bit file that was made plain, stay on it.

    Args:
        weight: float32 [rows, groups, group]
        dtype: that scales and offsets are rounded to, before codes are chosen for them.
        importance: what a column's squared error counts, such as the mean square of its input;
            None: all the same. float32 [groups, group]

    Returns:
        uint8 [..., group]; scales and offsets in `dtype` [...].
    """
    low, high = weight.amin(dim=-1), weight.amax(dim=-1)
    middle, range_ = (low + high) / 2, high - low
    count = weight.shape[-1]
    if importance is None:
        share_of = torch.full_like(weight[0], 1 / count)
    else:  # a column that is never used counts a little, so that no group is without any
        share_of = importance + 1e-6 * importance.mean() + 1e-30
        share_of = share_of / share_of.sum(dim=-1, keepdim=True)
    starts = [(range_ * (share / 15), middle) for share in _SHARES]
    if (grid := _grid(weight, low, range_)) is not None:
        starts.append(grid)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for start in starts:
        scale, offset = _rounded(*start, dtype)
        codes = _nearest(weight, scale, offset)
        for _ in range(_ROUNDS):
            scale, offset = _rounded(*_fit(weight, codes, scale, offset, share_of), dtype)
            codes = _nearest(weight, scale, offset)
        wrong = (
            codes.mul(scale[..., None])
            .add_(offset[..., None])
            .sub_(weight)
            .square_()
            .mul_(share_of)
        )
        error = wrong.sum(dim=-1)
        if best is None:
            best, least = (codes, scale, offset), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, offset, best[2]),
        )
    assert best is not None
    return best[0].add_(8).to(torch.uint8), best[1].to(dtype), best[2].to(dtype)


def symmetric_codes(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes -127 to 127 and scales: weight = code * scale.

    A group's largest weight gets the largest code. A group on a grid gets the scale, of 16 that
    divide the grid's step, of which its offset from zero is nearest to a multiple.

    Args:
        weight: float32 [rows, groups, group]
        dtype: that scales are rounded to, before codes are chosen for them.

    Returns:
        int8 [..., group]; scales in `dtype` [...].
    """
    low, high = weight.amin(dim=-1), weight.amax(dim=-1)
    peak = torch.maximum(high, -low)
    tiny = torch.finfo(dtype).tiny
    scale = (peak / _LARGEST).clamp_min(tiny)
    codes, scale = _on_scale(weight, scale, dtype)
    if not _is_on_grids(weight, low, high - low):
        return codes.to(torch.int8), scale
    steps = _steps(weight, low, high - low)
    step = ((high - low) / steps.clamp_min(1.0)).clamp_min(tiny)
    finest = (step * _LARGEST / peak.clamp_min(tiny)).floor()
    wrong = torch.full_like(low, torch.inf)
    fine = finest.clamp_min(1.0)
    for less in range(_FINENESSES):
        times = (finest - less).clamp_min(1.0)
        at = low * times / step
        off = at.sub_(at.round()).abs_() / times
        fine = torch.where(off < wrong, times, fine)
        wrong = torch.minimum(wrong, off)
    better, fitted = _on_scale(weight, step / fine, dtype)
    gain = _squares(weight, codes, scale) > _squares(weight, better, fitted)
    gain &= (steps > 0) & (finest > 0)
    codes = torch.where(gain[..., None], better, codes)
    return codes.to(torch.int8), torch.where(gain, fitted, scale)


def _on_scale(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes as floats, and the scale in `dtype`."""
    scale = scale.to(dtype)
    codes = weight.div(scale.float()[..., None]).round_()
    return codes.clamp_(-_LARGEST, _LARGEST), scale


def _squares(weight: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """What codes and scales miss, squared, by group."""
    return codes.mul(scale.float()[..., None]).sub_(weight).square_().sum(dim=-1)


def _grid(weight: Tensor, low: Tensor, range_: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales and offsets of the grids that groups lie on, something else where they lie on none.

    Returns:
        Alike [rows, groups]; None where hardly any group of the first row lies on one.
    """
    if not _is_on_grids(weight, low, range_):
        return None
    scale = range_ / _steps(weight, low, range_).clamp_min(1.0)
    return scale, low + 8 * scale


def _is_on_grids(weight: Tensor, low: Tensor, range_: Tensor) -> bool:
    """Whether groups of the first row lie on grids, so that it is worth to look for others."""
    first = _steps(weight[:1], low[:1], range_[:1])
    return bool((first > 0).float().mean() >= _SHARE_ON_A_GRID)


def _steps(weight: Tensor, low: Tensor, range_: Tensor) -> Tensor:
    """How many steps of a grid each group's range is, 0 where it is on none. [rows, groups]"""
    above = (weight - low[..., None]) / range_.clamp_min(1e-30)[..., None]
    found = torch.zeros_like(low)
    nearest = torch.full_like(low, _OFF_THE_GRID)
    for steps in _STEPS:
        at = above * steps
        off = at.sub_(at.round()).abs_().amax(dim=-1)
        found = torch.where(off < nearest, float(steps), found)
        nearest = torch.minimum(nearest, off)
    return found


def _rounded(scale: Tensor, offset: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return scale.clamp_min(1e-8).to(dtype).float(), offset.to(dtype).float()


def _nearest(weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Codes less 8, as floats."""
    return weight.sub(offset[..., None]).div_(scale[..., None]).round_().clamp_(-8, 7)


def _fit(
    weight: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, share_of: Tensor
) -> tuple[Tensor, Tensor]:
    """The scale and offset of the least squared error for codes; as they were for equal codes."""
    weighted = codes * share_of
    mean_code, mean = weighted.sum(dim=-1), (weight * share_of).sum(dim=-1)
    spread = (codes * weighted).sum(dim=-1) - mean_code.square()
    slope = weighted.mul_(weight).sum(dim=-1).sub_(mean_code * mean).div_(spread.clamp_min(1e-6))
    usable = (spread > _LEAST_SPREAD) & (slope > 0)
    slope = torch.where(usable, slope, scale)
    return slope, torch.where(usable, mean - slope * mean_code, offset)
