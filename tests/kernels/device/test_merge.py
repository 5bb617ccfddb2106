"""A block's attention merged into what was attended to, on the device."""

import math

import pytest
import torch

from penstock.kernels.prompt_attention import Softmax, merge_into_twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_torch_merges(device: torch.device, triton: None, dtype: torch.dtype) -> None:
    """Of one dtype after the other; a query that sees nothing in either, and one in both."""
    from penstock.kernels.device.merge_triton import merge_into_triton

    torch.manual_seed(0)
    made = torch.randn(2, 3, 5, 24), torch.randn(2, 3, 5)
    other = torch.randn(2, 5, 3, 24).to(dtype).transpose(1, 2)
    other_lse = torch.randn(2, 3, 5) * 20
    made[1][0, 0, :2] = -math.inf
    other_lse[0, 0, 1:3] = -math.inf
    made[0][0, 0, :2], other[0, 0, 1:3] = 0.0, 0.0

    def fresh() -> Softmax:
        out = made[0].transpose(1, 2).contiguous()
        return out.to(device, copy=True), made[1].to(device, copy=True)

    expected = merge_into_twin(fresh(), other.to(device), other_lse.to(device))
    found = fresh()
    merge_into_triton(*found, other.to(device), other_lse.to(device))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
