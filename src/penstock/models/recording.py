"""recording(): record a CUDA graph, and leave the stream that was current before, come what may."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recording(graph: "torch.cuda.CUDAGraph", pool: Any = None) -> Iterator[None]:
    """Record what is queued meanwhile; nothing of it runs.

    `torch.cuda.graph` records on a stream of its own and puts the caller's back when the recording
    ends well. Where ending it raises (something in it had to wait for the device, say), the caller
    would stay on that stream, which nothing else waits for.

    Args:
        pool: memory shared with other graphs, see `torch.cuda.graph`.

    Raises:
        RuntimeError: it could not be recorded.
    """
    # Other threads may allocate meanwhile: a server stores what one request has while the next
    # one's step is recorded.
    made = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with torch.cuda.stream(torch.cuda.current_stream()), made:
        yield
