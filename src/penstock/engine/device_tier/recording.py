"""recording(): record a CUDA graph on a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def recording(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Record what is queued meanwhile; nothing of it runs. The caller's stream is current again
    behind it, come what may.

    `torch.cuda.graph` would give the allocators' caches back to the system first, which wait for
    the device; a server records while others are served.

    Args:
        pool: memory shared with other graphs, see `torch.cuda.graph`.

    Raises:
        RuntimeError: it could not be recorded.
    """
    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        # Other threads may allocate meanwhile: a server stores what one request has while the next
        # one's step is recorded.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The default stream cannot be recorded."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
