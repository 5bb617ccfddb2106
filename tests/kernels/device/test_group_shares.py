"""Shares of groups in a softmax per head: both forms against torch's softmax of what is seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.device.group_shares import group_shares, group_shares_twin

Kernel = Callable[..., Tensor]


@pytest.fixture
def shares(form: str) -> Kernel:
    if form == "torch":
        return group_shares_twin
    from penstock.kernels.device.group_shares_triton import group_shares_triton

    return group_shares_triton


@pytest.mark.parametrize(
    ("batch", "groups", "heads", "end"),
    [(1, 700, 32, 700), (2, 300, 8, 129), (3, 40, 5, 1), (2, 9000, 2, 5000), (1, 2, 20, 2)],
)
def test_shares_are_those_of_a_softmax(
    shares: Kernel, device: torch.device, batch: int, groups: int, heads: int, end: int
) -> None:
    """Logits of thousands, rows that are farther apart than long, and what is hidden is larger."""
    torch.manual_seed(groups)
    held = 5 * torch.randn(batch, groups + 3, heads, device=device)
    held[:, end // 2, 0] += 4000.0
    held[:, end:] = 1e6
    logits = held[:, :groups]
    before = held.clone()
    actual = shares(logits, torch.tensor([end], device=device))
    expected = torch.softmax(before[:, :end].double(), dim=1)
    assert actual.shape == (batch, groups)
    assert torch.equal(held, before)
    torch.testing.assert_close(actual[:, :end].double(), expected.sum(2), atol=1e-6, rtol=1e-5)
    assert not actual[:, end:].any()
    actual = shares(logits, torch.tensor([end], device=device), squares=True)
    rooted = expected.square().sum(2).sqrt()
    torch.testing.assert_close(actual[:, :end].double(), rooted, atol=1e-6, rtol=1e-5)
    assert not actual[:, end:].any()


def test_nothing_is_there(shares: Kernel, device: torch.device) -> None:
    logits = torch.randn(2, 50, 4, device=device)
    found = shares(logits, torch.zeros(1, dtype=torch.int64, device=device))
    assert bool(found.isfinite().all())


def test_public_function_chooses_a_form(device: torch.device) -> None:
    logits, end = torch.randn(2, 50, 4, device=device), torch.tensor([20], device=device)
    assert torch.allclose(group_shares(logits, end), group_shares_twin(logits, end), atol=1e-6)


@pytest.mark.gpu
def test_a_call_is_captured(device: torch.device, form: str, capture: Any, shares: Kernel) -> None:
    """A replay sees other logits and another end."""
    logits = torch.randn(2, 500, 4, device=device)
    end, out = torch.tensor([20], device=device), torch.zeros(2, 500, device=device)
    graph = capture(lambda: out.copy_(shares(logits, end)))
    logits.normal_()
    end.fill_(333)
    graph.replay()
    assert torch.allclose(out, group_shares_twin(logits, end), atol=1e-6)
