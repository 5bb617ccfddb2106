"""Scores as a step chooses by them: both forms against a loop."""

import pytest
import torch

from penstock.kernels.device import rank_units


@pytest.mark.parametrize("resident_factor", [1.0, 3.0])
def test_hides_and_favours(form: str, device: torch.device, resident_factor: float) -> None:
    torch.manual_seed(0)
    rows, units, end, first = 2, 1100, 1050, [1, 7]
    scores = torch.rand(rows, units)
    slot_of = torch.where(torch.rand(rows, units) < 0.1, 5, -1).int()
    ranked = rank_units.rank_units_twin
    if form == "triton":
        from penstock.kernels.device.rank_units_triton import rank_units_triton as ranked
    found = ranked(
        scores.to(device), torch.tensor(first, dtype=torch.int32, device=device),
        torch.tensor([end], device=device), slot_of.to(device) if resident_factor > 1 else None,
        resident_factor,
    ).cpu()  # fmt: skip
    for row in range(rows):
        for unit in range(units):
            expected = float(scores[row, unit]) * (
                resident_factor if slot_of[row, unit] >= 0 else 1
            )
            if not first[row] <= unit < end:
                expected = -float("inf")
            assert float(found[row, unit]) == pytest.approx(expected)
