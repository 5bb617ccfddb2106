"""Streams beside a decode step's: one chooses for the next layer, the other waits for the link.

Two of them, because a layer's choosing is a dozen short launches, each of which waits for room
among the step's own products, and its gather is one that waits for the link: on one stream the next
layer would not choose before the link is free again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def choosing_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all caches, since cuBLAS keeps memory for each stream. What runs there has few
    blocks, which are to start before a product's many."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@cache
def _stream_of_link(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def on_link(device: torch.device) -> Iterator[None]:
    """Queue what follows behind what was queued so far, where only gathers are; on a CPU it simply
    runs."""
    if device.type != "cuda":
        yield
        return
    link = _stream_of_link(device)
    link.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(link):
        yield
