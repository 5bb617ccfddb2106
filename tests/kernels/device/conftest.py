"""Where the kernels of the device tier are tested: on CUDA, or in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """A CUDA device where there is one, else the host (see tests/conftest.py)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def triton() -> None:
    """For tests of the Triton form: skips where Triton is not installed."""
    pytest.importorskip("triton")


@pytest.fixture(params=["torch", "triton"])
def form(request: pytest.FixtureRequest) -> str:
    """Both forms of a kernel in turn; skips Triton's where it is not installed."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return str(request.param)


Capture = Callable[[Callable[[], None]], torch.cuda.CUDAGraph]


@pytest.fixture
def capture() -> Capture:
    """Run a call once, to warm it up, then capture it (which does not run it)."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")

    def warm_up_and_capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    return warm_up_and_capture
