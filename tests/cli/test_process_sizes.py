"""What a run takes beside its cache: weights, each once, and the process at its peak."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from penstock.cli import process_sizes
from penstock.cli.process_sizes import ProcessSizes, process_peak_bytes


class Halves(torch.Tensor):
    """A tensor of two others, as quantised weights are."""

    parts: tuple[torch.Tensor, ...]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None


def test_weights_are_counted_once_and_only_where_they_are() -> None:
    model: Any = torch.nn.Linear(8, 4, dtype=torch.float16)
    model.device = "cpu"
    model.tied = model.weight
    model.register_buffer("rest", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("elsewhere", torch.zeros(1000, device="meta"))
    assert ProcessSizes.of(model).weights_bytes == 8 * 4 * 2 + 4 * 2 + 3 * 8
    quantised: Any = torch.zeros(100).as_subclass(Halves)
    quantised.codes = torch.zeros(50, dtype=torch.int8)
    quantised.scales = torch.zeros(2)
    model.register_buffer("rest", quantised)
    assert ProcessSizes.of(model).weights_bytes == 8 * 4 * 2 + 4 * 2 + 50 + 8


def test_the_peak_is_at_least_what_is_held_now() -> None:
    peak = process_peak_bytes()
    assert peak is not None
    assert peak >= psutil.Process().memory_info().rss * 0.9


@pytest.mark.parametrize("system", ["darwin", "win32", "freebsd"])
def test_the_peak_on_other_systems(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(process_sizes, "sys", SimpleNamespace(platform=system))
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=5 << 20))
    monkeypatch.setitem(sys.modules, "resource", usage)
    if system == "win32":
        monkeypatch.setitem(sys.modules, "resource", None)
        held = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=5 << 20))
        monkeypatch.setattr(psutil, "Process", lambda: held)
    assert process_peak_bytes() == (5 << 30 if system == "freebsd" else 5 << 20)
