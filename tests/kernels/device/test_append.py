"""Tokens written step by step against RollingWindow, and against plain copies to host memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.tiers.rolling_window import RollingWindow
from penstock.kernels.device import append


def kernel(name: str, form: str) -> Any:
    """The twin or the launcher of a kernel."""
    if form == "torch":
        return getattr(append, f"{name}_twin")
    from penstock.kernels.device import append_triton

    return getattr(append_triton, f"{name}_triton")


def host_tokens(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    tokens = torch.full(shape, -9.0, dtype=dtype)
    return tokens.pin_memory() if device.type == "cuda" else tokens


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("rows", "heads", "new", "dim", "dtype"),
    [
        (1, 1, 1, 32, torch.float32),
        (2, 3, 0, 16, torch.float32),
        (2, 3, 7, 24, torch.float16),
        (3, 1, 70, 64, torch.bfloat16),
        (1, 2, 33, 128, torch.bfloat16),
    ],
)
def test_prefill_is_stored(
    device: torch.device, form: str, rows: int, heads: int, new: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(new)
    first = 5
    # A projection gives [rows, new, heads, dim]: strided, as here.
    keys = torch.randn(rows, new, heads, dim, device=device).to(dtype).transpose(1, 2)
    values = torch.randn(rows, heads, new, dim, device=device).to(dtype)
    host = host_tokens((rows, first + new + 2, 2, heads, dim), dtype, device)
    kernel("store_tokens", form)(keys, values, host, first)
    finish(device)
    assert torch.equal(host[:, first : first + new, 0], keys.transpose(1, 2).cpu())
    assert torch.equal(host[:, first : first + new, 1], values.transpose(1, 2).cpu())
    assert (host[:, :first] == -9).all()
    assert (host[:, first + new :] == -9).all()


@pytest.mark.parametrize(
    ("group", "sinks", "newest", "dtype", "prompt"),
    [
        (4, 2, 2, torch.float32, 0),
        (4, 2, 2, torch.float32, 30),
        (1, 3, 5, torch.bfloat16, 7),
        (1, 3, 5, torch.bfloat16, 30),
        (3, 0, 3, torch.float16, 0),
        (3, 0, 3, torch.float16, 7),
        (4, 1, 4, torch.bfloat16, 7),
    ],
)
def test_steps_are_the_rolling_window_s(
    device: torch.device,
    form: str,
    prompt: int,
    group: int,
    sinks: int,
    newest: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(prompt)
    rows, heads, dim, steps, num_slots = 3, 2, 16, 14, 5
    padding = torch.tensor([0, min(prompt, 2), max(0, prompt - 1)])
    places, slot_places = (sinks + newest) * group, num_slots * group
    keys = torch.randn(rows, heads, prompt + steps, dim).to(dtype)
    values = torch.randn(rows, heads, prompt + steps, dim).to(dtype)

    twin_tokens = torch.zeros(rows, places, 2, heads, dim, dtype=dtype)
    twin_mask = torch.full((rows, places), -math.inf, dtype=dtype)
    twin = RollingWindow(
        twin_tokens, twin_mask, group_tokens=group, sink_slots=sinks, window_slots=newest
    )
    twin.set_start_units(padding // group)
    if prompt:
        twin.write_many(keys[:, :, :prompt], values[:, :, :prompt], 0)
        twin.refresh(prompt, torch.arange(prompt) >= padding[:, None])

    # The window lies in a pool, behind the slots.
    pool = torch.full((rows, slot_places + places, 2, heads, dim), 3.0, dtype=dtype, device=device)
    mask = torch.full((rows, slot_places + places), 7.0, dtype=dtype, device=device)
    window, window_mask = pool[:, slot_places:], mask[:, slot_places:]
    window.copy_(twin_tokens)
    window_mask.copy_(twin_mask)
    host = host_tokens((rows, prompt + steps + 1, 2, heads, dim), dtype, device)
    start = padding.int().to(device)
    on_device, position = (keys.to(device), values.to(device)), torch.tensor([prompt]).to(device)
    for now in range(prompt, prompt + steps):
        twin.write_one(keys[:, :, now : now + 1], values[:, :, now : now + 1], now)
        kernel("append_token", form)(
            on_device[0][:, :, now], on_device[1][:, :, now], host, window, window_mask,
            position, start,
            sink_places=sinks * group, window_slots=newest, group_tokens=group,
        )  # fmt: skip
        position += 1
        assert torch.equal(window_mask.cpu(), twin_mask), now
        assert torch.equal(window.cpu(), twin_tokens), now
    assert (window_mask == 0).any()
    assert (pool[:, :slot_places] == 3).all()
    assert (mask[:, :slot_places] == 7).all()
    stored = host[:, prompt : prompt + steps]
    assert torch.equal(stored[:, :, 0], keys[:, :, prompt:].transpose(1, 2))
    assert torch.equal(stored[:, :, 1], values[:, :, prompt:].transpose(1, 2))
    assert (host[:, :prompt] == -9).all()
    assert (host[:, prompt + steps :] == -9).all()


def test_public_functions_choose_a_form(device: torch.device) -> None:
    keys, values = torch.ones(1, 1, 3, 16, device=device), torch.zeros(1, 1, 3, 16, device=device)
    host = host_tokens((1, 5, 2, 1, 16), torch.float32, device)
    append.store_tokens(keys, values, host, 1)
    window = torch.zeros(1, 2, 2, 1, 16, device=device)
    mask = torch.full((1, 2), -math.inf, device=device)
    append.append_token(
        keys[:, :, 0] * 2, values[:, :, 0], host, window, mask,
        torch.tensor([3], device=device), torch.zeros(1, dtype=torch.int32, device=device),
        sink_places=0, window_slots=2, group_tokens=1,
    )  # fmt: skip
    finish(device)
    assert host[0, :, 0, 0, 0].tolist() == [-9.0, 1.0, 1.0, 2.0, -9.0]
    assert window[0, :, 0, 0, 0].tolist() == [0.0, 2.0]
    assert mask.tolist() == [[-math.inf, 0.0]]


@pytest.mark.gpu
def test_steps_are_captured(device: torch.device, form: str, capture: Any) -> None:
    """One graph that moves its own position on, against the twin on the host."""
    torch.manual_seed(0)
    shape, sizes = (4, 2, 64), {"sink_places": 8, "window_slots": 3, "group_tokens": 4}

    def state(on: torch.device) -> list[Tensor]:
        return [
            torch.zeros(shape, dtype=torch.bfloat16, device=on),
            torch.zeros(shape, dtype=torch.bfloat16, device=on),
            host_tokens((4, 40, 2, 2, 64), torch.bfloat16, on),
            torch.zeros(4, 20, 2, 2, 64, dtype=torch.bfloat16, device=on),
            torch.full((4, 20), -math.inf, dtype=torch.bfloat16, device=on),
            torch.zeros(1, dtype=torch.int64, device=on),
            torch.tensor([0, 0, 3, 5], dtype=torch.int32, device=on),
        ]

    def step(form: str, state: list[Tensor]) -> None:
        kernel("append_token", form)(*state, **sizes)
        state[5].add_(1)

    there, here = state(device), state(torch.device("cpu"))
    graph = capture(lambda: step(form, there))
    step("torch", here)
    for _ in range(30):
        for mine, its in zip(there[:2], here[:2], strict=True):
            mine.copy_(its.copy_(torch.randn(shape)))
        graph.replay()
        step("torch", here)
    finish(device)
    for mine, its in zip(there, here, strict=True):
        assert torch.equal(mine.cpu(), its)
    assert int(here[5]) == 31
