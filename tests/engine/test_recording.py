"""Recording a CUDA graph leaves the caller's stream as it was, with stand-ins for CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.engine.device_tier.recording import recording


class Cuda:
    """Knows which stream is current, and whether the next recording ends well."""

    def __init__(self) -> None:
        self.current, self.ends_well = "the caller's", True
        self.pools: list[Any] = []

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Graph:
    """Of such a device; it must be recorded on another stream than the caller's."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.is_recording = cuda, False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads may allocate"
        assert self._cuda.current != "the caller's"
        self._cuda.pools.append(pool)
        self.is_recording = True

    def capture_end(self) -> None:
        self.is_recording = False
        if not self._cuda.ends_well:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"another of {device}")
    return made


def test_a_recording_that_ends_well(cuda: Cuda) -> None:
    graph: Any = Graph(cuda)
    with recording(graph, pool="shared"):
        assert cuda.current == "another of 0"
        assert graph.is_recording
    assert not graph.is_recording
    assert cuda.current == "the caller's"
    assert cuda.pools == ["shared"]


def record(cuda: Cuda, call: Callable[[], None]) -> None:
    graph: Any = Graph(cuda)
    with recording(graph):
        call()


def refuse() -> None:
    raise ValueError("what cannot be recorded")


@pytest.mark.parametrize("call", [refuse, lambda: None])
def test_one_that_cannot_be_ended_gives_the_stream_back(
    cuda: Cuda, call: Callable[[], None]
) -> None:
    cuda.ends_well = False
    with pytest.raises(RuntimeError, match="during capture"):
        record(cuda, call)
    assert cuda.current == "the caller's"
