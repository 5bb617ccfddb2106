"""Recording a CUDA graph leaves the caller's stream as it was, with stand-ins for CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.models.recording import recording


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

    @contextmanager
    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        """As torch's: on a stream of its own, which stays current where ending it raises."""
        assert capture_error_mode == "thread_local", "other threads may allocate"
        self.pools.append(pool)
        before, self.current = self.current, "the recording's"
        try:
            yield
        finally:
            if not self.ends_well:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    return made


def test_a_recording_that_ends_well(cuda: Cuda) -> None:
    graph: Any = object()
    with recording(graph, pool="shared"):
        assert cuda.current == "the recording's"
    assert cuda.current == "the caller's"
    assert cuda.pools == ["shared"]


def record(call: Callable[[], None]) -> None:
    graph: Any = object()
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
        record(call)
    assert cuda.current == "the caller's"
