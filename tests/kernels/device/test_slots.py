"""Planning against the engine's plan_fetch, and copies against a loop over the lists."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.selection import Selection
from penstock.core.shape import KVShape
from penstock.engine.fetch_plan import plan_fetch
from penstock.engine.tiers.fifo import FIFO
from penstock.engine.tiers.slot_table import SlotTable
from penstock.kernels.device import slots
from penstock.kernels.device.slots import FetchLists
from penstock.kernels.slot_codes import coded_token_bytes, codes_of
from penstock.testing.pairs import covering


def kernel(name: str, form: str) -> Any:
    """The twin or the launcher of a kernel."""
    if form == "torch":
        return getattr(slots, f"{name}_twin")
    from penstock.kernels.device import slots_triton

    return getattr(slots_triton, f"{name}_triton")


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """Pinned where a kernel on CUDA is to reach it."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("rows", "wanted", "num_slots", "units"),
    [(1, 1, 1, 3), (3, 5, 5, 9), (2, 4, 11, 30), (4, 16, 16, 40), (2, 13, 40, 14)],
)
def test_plan_is_the_engine_s(
    device: torch.device, form: str, rows: int, wanted: int, num_slots: int, units: int
) -> None:
    plan = kernel("plan_slots", form)
    generator = np.random.default_rng(rows * 100 + wanted)
    tables = [SlotTable(1, num_slots, units) for _ in range(rows)]
    clocks = [FIFO(1, num_slots) for _ in range(rows)]
    unit_in = torch.full((rows, num_slots), -1, dtype=torch.int32, device=device)
    slot_of = torch.full((rows, units), -1, dtype=torch.int32, device=device)
    heads = torch.zeros(rows, dtype=torch.int32, device=device)
    lists = FetchLists.allocate(rows, wanted, num_slots, device)
    traffic = np.zeros((rows, 2), dtype=np.int64)
    for step in range(12):
        ids = np.stack([generator.permutation(units)[:wanted] for _ in range(rows)])
        # Rows want all, some or none; what is not valid is unit 0 (as `select_tokens` leaves it).
        real = generator.integers(0, wanted + 1, rows) if step % 3 else np.full(rows, wanted)
        valid = np.arange(wanted) < real[:, None]
        ids = np.where(valid, ids, 0)
        if step % 2:  # scattered, not side by side
            shuffled = generator.permutation(wanted)
            ids, valid = ids[:, shuffled].copy(), valid[:, shuffled].copy()
        due = generator.random(rows) < 0.7
        plan(
            torch.from_numpy(ids).int().to(device), torch.from_numpy(valid).to(device),
            torch.from_numpy(due).to(device), unit_in, slot_of, heads, lists,
        )  # fmt: skip
        for row in range(rows):
            count = int(lists.counts[row])
            if not due[row]:
                assert count == 0
                continue
            one = slice(row, row + 1)
            wants = Selection(unit_ids=ids[one].astype(np.int64), valid=valid[one])
            expected = plan_fetch(wants, tables[row], clocks[row])
            assert lists.units[row, :count].tolist() == expected.units.tolist()
            assert lists.slots[row, :count].tolist() == expected.slots.tolist()
            traffic[row] += expected.num_wanted, len(expected.units)
        assert unit_in.tolist() == [table.unit_in[0].tolist() for table in tables]
        assert slot_of.tolist() == [table.slot_of[0].tolist() for table in tables]
        assert heads.tolist() == [int(clock.heads[0]) for clock in clocks]
        assert lists.traffic.tolist() == traffic.tolist()
    assert traffic[:, 1].min() > 0
    assert (traffic[:, 1] < traffic[:, 0]).any(), "some units were resident"


@pytest.mark.parametrize(
    ("sizes", "programs", "leaves_room"),
    covering(
        [
            (1, 1, 16, 1, torch.float32),
            (3, 7, 48, 1, torch.bfloat16),
            (2, 20, 512, 1, torch.bfloat16),
            (2, 5, 1040, 3, torch.float16),
            (2, 3, 4112, 4, torch.float32),
            (1, 2, 8192, 8, torch.bfloat16),
        ],
        [None, 1, 9],
        [False, True],
    ),
)
def test_gathered_units_are_in_their_slots(
    device: torch.device,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    programs: int | None,
    leaves_room: bool,
    sizes: tuple[int, int, int, int, torch.dtype],
) -> None:
    rows, wanted, unit_bytes, group, dtype = sizes
    """Also where a program copies several tiles, as with many rows or beside other work."""
    gather = kernel("gather_units", form)
    if form == "triton":
        if programs is not None:
            monkeypatch.setattr("penstock.kernels.device.slots_triton._PROGRAMS", programs)
            monkeypatch.setattr("penstock.kernels.device.slots_triton._STAYING_PROGRAMS", programs)
            monkeypatch.setattr("penstock.kernels.device.slots_triton._STAYING_WORDS", 128)
        gather = partial(gather, leaves_room=leaves_room)
    torch.manual_seed(unit_bytes)
    units, num_slots, kept = 3 * wanted, wanted + 2, 2
    host = on_host(torch.randint(0, 256, (rows, units, unit_bytes), dtype=torch.uint8), device)
    pool = torch.randint(0, 256, (rows, num_slots + kept, unit_bytes), dtype=torch.uint8)
    # Neighbours of the mask's rows must stay, and so must the kept slots' places.
    mask = torch.full((rows, (num_slots + kept) * group + 1), 7.0, dtype=dtype)
    start = torch.tensor([0, 2 * group + 1, 5][:rows], dtype=torch.int32)
    lists = FetchLists.allocate(rows, wanted, num_slots, device)
    for row in range(rows):
        lists.units[row] = torch.randperm(units)[:wanted].int()
        lists.slots[row] = torch.randperm(num_slots)[:wanted].int()
    lists.counts.copy_(torch.tensor([wanted, 0, wanted // 2][:rows]))

    expected, expected_mask = pool.clone(), mask.clone()
    for row in range(rows):
        for entry in range(int(lists.counts[row])):
            unit, slot = int(lists.units[row, entry]), int(lists.slots[row, entry])
            expected[row, slot] = host[row, unit]
            for token in range(group):
                shown = unit * group + token >= int(start[row])
                expected_mask[row, slot * group + token] = 0.0 if shown else -math.inf

    pool, mask = pool.to(device), mask.to(device)
    gather(host, pool, mask[:, :-1], start.to(device), lists, group)
    assert torch.equal(pool.cpu(), expected)
    assert torch.equal(mask.cpu(), expected_mask)


@pytest.mark.parametrize(
    ("dtype", "leaves_room"),
    [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)],
)
def test_units_become_codes_on_their_way(
    device: torch.device, form: str, dtype: torch.dtype, leaves_room: bool
) -> None:
    """The bits of `codes_of`, where numbers are zero, tiny, and not finite too."""
    torch.manual_seed(0)
    rows, units, wanted, num_slots, group = 2, 9, 5, 7, 3
    shape = KVShape(num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=24, dtype=dtype)
    tokens = torch.randn(rows, units, group, *shape.token_size).to(dtype)
    tokens[0, 0], tokens[:, 1, 0, 0, 0, 3], tokens[:, 2, 1, 1, 1, 0] = 0.0, math.inf, math.nan
    tokens[:, 3] *= 1e-4
    host = on_host(tokens.view(torch.uint8).view(rows, units, -1), device)
    lists = FetchLists.allocate(rows, wanted, num_slots, device)
    for row in range(rows):
        lists.units[row] = torch.tensor([0, 3, 1, 2, 8], dtype=torch.int32)
        lists.slots[row] = torch.randperm(num_slots)[:wanted].int()
    lists.counts.copy_(torch.tensor([wanted, 4]))
    pool = torch.full(
        (rows, num_slots, group * coded_token_bytes(2, 24)), 9, dtype=torch.uint8, device=device
    )
    mask = torch.full((rows, num_slots * group + 1), 7.0, dtype=dtype, device=device)
    start = torch.tensor([0, 10], dtype=torch.int32, device=device)
    expected, expected_mask = pool.clone(), mask.clone()
    for row in range(rows):
        for entry in range(int(lists.counts[row])):
            unit, slot = int(lists.units[row, entry]), int(lists.slots[row, entry])
            expected[row, slot] = codes_of(tokens[row, unit]).flatten().to(device)
            for token in range(group):
                shown = unit * group + token >= int(start[row])
                expected_mask[row, slot * group + token] = 0.0 if shown else -math.inf
    more = {"leaves_room": leaves_room} if form == "triton" else {}
    kernel("gather_units", form)(host, pool, mask[:, :-1], start, lists, group, coded=shape, **more)
    finish(device)
    assert torch.equal(pool, expected)
    assert torch.equal(mask, expected_mask)


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 9), (3, 1), (2, 7)])
@pytest.mark.parametrize("unit_bytes", [16, 272, 4096])
def test_range_lies_side_by_side(
    device: torch.device, first: int, count: int, unit_bytes: int
) -> None:
    torch.manual_seed(count)
    host = on_host(torch.randint(0, 256, (3, 9, unit_bytes), dtype=torch.uint8), device)
    out = torch.full((3, 11, unit_bytes), 5, dtype=torch.uint8, device=device)
    slots.gather_range(host, out, first, count)
    assert torch.equal(out[:, :count].cpu(), host[:, first : first + count])
    assert (out[:, count:] == 5).all()


def test_public_functions_choose_a_form(device: torch.device) -> None:
    """One fetch through the names that the runtime calls."""
    host = on_host(torch.arange(64, dtype=torch.uint8).reshape(1, 4, 16), device)
    pool = torch.zeros(1, 2, 16, dtype=torch.uint8, device=device)
    mask = torch.full((1, 2), -math.inf, device=device)
    table: dict[str, Any] = {"dtype": torch.int32, "device": device}
    unit_in, slot_of = torch.full((1, 2), -1, **table), torch.full((1, 4), -1, **table)
    heads, start = torch.ones(1, **table), torch.zeros(1, **table)
    lists = FetchLists.allocate(1, 2, 2, device)
    valid, due = torch.tensor([[True, True]]).to(device), torch.tensor([True]).to(device)
    slots.plan_slots(torch.tensor([[3, 1]], **table), valid, due, unit_in, slot_of, heads, lists)
    slots.gather_units(host, pool, mask, start, lists, 1)
    assert unit_in.tolist() == [[1, 3]]
    assert torch.equal(pool[0].cpu(), host[0, [1, 3]])
    assert mask.tolist() == [[0.0, 0.0]]
    slots.gather_range(host, pool, 2, 2)
    finish(device)
    assert torch.equal(pool[0].cpu(), host[0, 2:])


def test_lists_say_their_size(device: torch.device) -> None:
    lists = FetchLists.allocate(3, 5, 8, device)
    tensors = (lists.units, lists.slots, lists.counts, lists.traffic, lists.pinned)
    assert sum(tensor.nbytes for tensor in tensors) == FetchLists.num_bytes(3, 5, 8)
    with pytest.raises(AssertionError, match="needs a slot"):
        FetchLists.allocate(1, 5, 4, device)


@pytest.mark.gpu
@pytest.mark.parametrize("leaves_room", [False, True])
def test_fetches_are_captured(
    device: torch.device, form: str, leaves_room: bool, capture: Any
) -> None:
    """One graph replayed with other wishes does what the twins do on the host."""
    torch.manual_seed(0)
    rows, wanted, num_slots, units = 4, 40, 50, 200
    host = torch.randint(0, 256, (rows, units, 512), dtype=torch.uint8)

    def state(on: torch.device) -> list[Tensor]:
        table: dict[str, Any] = {"dtype": torch.int32, "device": on}
        return [
            torch.zeros(rows, wanted, **table),
            torch.zeros(rows, wanted, dtype=torch.bool, device=on),
            torch.zeros(rows, dtype=torch.bool, device=on),
            torch.full((rows, num_slots), -1, **table),
            torch.full((rows, units), -1, **table),
            torch.zeros(rows, **table),
            torch.zeros(rows, num_slots, 512, dtype=torch.uint8, device=on),
            torch.full((rows, num_slots), -math.inf, device=on),
            torch.full((rows,), 3, **table),
        ]

    def fetch(form: str, state: list[Tensor], host: Tensor, lists: FetchLists) -> None:
        kernel("plan_slots", form)(*state[:6], lists)
        more = {"leaves_room": leaves_room} if form == "triton" else {}
        kernel("gather_units", form)(host, *state[6:], lists, 1, **more)

    cpu = torch.device("cpu")
    there, here = state(device), state(cpu)
    lists = FetchLists.allocate(rows, wanted, num_slots, device)
    twin_lists = FetchLists.allocate(rows, wanted, num_slots, cpu)
    pinned = on_host(host, device)
    graph = capture(lambda: fetch(form, there, pinned, lists))
    fetch("torch", here, host, twin_lists)
    for _ in range(5):
        here[0].copy_(torch.stack([torch.randperm(units)[:wanted] for _ in range(rows)]))
        here[1].copy_(torch.rand(rows, wanted) < 0.8)
        here[2].copy_(torch.rand(rows) < 0.7)
        for mine, its in zip(there[:3], here[:3], strict=True):
            mine.copy_(its)
        graph.replay()
        fetch("torch", here, host, twin_lists)
        for mine, its in zip(there, here, strict=True):
            assert torch.equal(mine.cpu(), its)
    assert torch.equal(lists.traffic.cpu(), twin_lists.traffic)
    assert int(twin_lists.traffic[:, 1].sum()) > 0
