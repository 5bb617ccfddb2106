"""RollingWindow against a list of positions: nothing twice, nothing missing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.tiers.rolling_window import RollingWindow

HIDDEN = -math.inf


class Twin:
    """A window beside the positions that it should hold. Position p has the key p + 1000 * row."""

    def __init__(self, batch: int, group: int, sinks: int, newest: int) -> None:
        self.group, self.sinks, self.newest = group, sinks, newest
        places = (sinks + newest) * group
        self.tokens = torch.zeros(batch, places, 2, 1, 1)
        self.mask = torch.full((batch, places), HIDDEN)
        self.window = RollingWindow(
            self.tokens, self.mask, group_tokens=group, sink_slots=sinks, window_slots=newest
        )
        self.first = [0] * batch
        self.length = 0
        self.disk: Tensor = torch.zeros(batch, 0)

    @property
    def batch(self) -> int:
        return len(self.first)

    def visible(self) -> Tensor:
        """False before each row's first token. [batch, length]"""
        return torch.arange(self.length) >= torch.tensor(self.first)[:, None]

    def new_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(self.length, self.length + count).float()
        keys = positions + 1000 * torch.arange(self.batch)[:, None]
        self.disk = torch.cat([self.disk[:, : self.length], keys], dim=1)
        shaped = keys.view(self.batch, 1, count, 1)
        return shaped, -shaped

    def prefill(self, count: int, first: list[int] | None = None) -> None:
        if self.length == 0:
            self.first = first or [0] * self.batch
            self.window.set_start_units(torch.tensor(self.first) // self.group)
        keys, values = self.new_tokens(count)
        self.window.write_many(keys, values, self.length)
        self.length += count
        self.window.refresh(self.length, self.visible() if any(self.first) else None)

    def decode(self) -> None:
        keys, values = self.new_tokens(1)
        self.window.write_one(keys, values, self.length)
        self.length += 1

    def crop(self, length: int) -> None:
        """As `LayerCache.crop`: groups that come back into the window are read from the disk."""
        held = self.window.first_window_unit(self.length)
        self.length = length
        started = -(-length // self.group)
        for group in range(self.window.first_window_unit(length), min(held, started)):
            start = self.window.window_slot(group) * self.group
            keys = self.disk[:, group * self.group : (group + 1) * self.group]
            self.tokens[:, start : start + self.group, 0, 0, 0] = keys
            self.tokens[:, start : start + self.group, 1, 0, 0] = -keys
        self.window.refresh_cropped(length)

    def expected(self, row: int) -> list[int]:
        """Visible positions: the row's sinks, and the newest `newest` started groups."""
        window_start = max(0, -(-self.length // self.group) - self.newest) * self.group
        sink_start = self.first[row] // self.group * self.group
        sinks = range(sink_start, sink_start + self.sinks * self.group)
        shown = [p for p in sinks if p < window_start] + list(range(window_start, self.length))
        return [p for p in shown if p >= self.first[row]]

    def check(self) -> None:
        for row in range(self.batch):
            places = (self.mask[row] == 0).nonzero()[:, 0]
            held = self.tokens[row, places, 0, 0, 0] - 1000 * row
            assert sorted(held.int().tolist()) == self.expected(row)
            assert torch.equal(self.tokens[row, places, 1, 0, 0], -held - 1000 * row)
            assert set(self.mask[row].tolist()) <= {0.0, HIDDEN}


@st.composite
def histories(draw: st.DrawFn) -> tuple[Twin, list[int], list[tuple[str, int]]]:
    group, sinks, newest = (draw(st.integers(*x)) for x in ((1, 4), (0, 2), (2, 4)))
    batch = draw(st.integers(1, 2))
    padding = [draw(st.integers(0, 9)) if batch > 1 else 0 for _ in range(batch)]
    kinds = st.sampled_from(["prefill", "decode", "decode", "decode", "crop"])
    steps = draw(st.lists(st.tuples(kinds, st.integers(1, 14)), min_size=1, max_size=12))
    return Twin(batch, group, sinks, newest), padding, steps


@settings(max_examples=80, deadline=None)
@given(histories())
def test_random_histories(history: tuple[Twin, list[int], list[tuple[str, int]]]) -> None:
    twin, padding, steps = history
    twin.prefill(max(padding) + 1, padding)
    twin.check()
    for kind, count in steps:
        if kind == "prefill":
            twin.prefill(count)
        elif kind == "decode":
            for _ in range(count):
                twin.decode()
                twin.check()
        else:
            twin.crop(max(max(padding) + 1, twin.length - count))
        twin.check()


def test_sinks_decoded_one_by_one() -> None:
    """A prompt shorter than the sinks: decoded tokens become sinks too."""
    twin = Twin(batch=1, group=4, sinks=2, newest=2)
    twin.prefill(3)
    for _ in range(40):
        twin.decode()
        twin.check()


def test_crop_to_nothing_and_again() -> None:
    twin = Twin(batch=2, group=2, sinks=1, newest=2)
    twin.prefill(12, [0, 5])
    twin.crop(0)
    assert (twin.mask == HIDDEN).all()
    twin.prefill(9)
    twin.check()


def test_rows_move_with_their_padding() -> None:
    twin = Twin(batch=2, group=2, sinks=1, newest=2)
    twin.prefill(7, [0, 4])
    rows = torch.tensor([1, 1])
    twin.tokens.copy_(twin.tokens[rows])
    twin.mask.copy_(twin.mask[rows])
    twin.window.take_rows_from(twin.window, rows)
    twin.first = [4, 4]
    twin.tokens[0] -= 1000 * twin.tokens[0].sign()
    twin.disk[0] = twin.disk[1] - 1000
    for _ in range(12):
        twin.decode()
        twin.check()


def test_a_ring_of_one_group_is_refused() -> None:
    with pytest.raises(AssertionError, match="beside the unfinished one"):
        Twin(batch=1, group=2, sinks=0, newest=1)
