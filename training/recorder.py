"""Recorder: work that is the same at every step, recorded as CUDA graphs and replayed.

A step of a small model is many short launches, and takes as long as Python takes to queue them
(`training.feed`). A graph of them is one.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable

import torch

AHEAD = 3
"""Steps that are queued before the one that is under way must be over: time is the clock's."""
WARM_UP = 2
"""Runs of a piece of work before it is recorded: kernels are compiled, buffers are made."""


class Recorder:
    """Runs pieces of work, each known by a key; all are queued on the current stream.

    A piece reads and writes memory that stays where it is, and nothing of it is looked at by the
    host. What a piece allocates is scratch for all others when it is over.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._runs: Counter[Hashable] = Counter()
        self._under_way: deque[torch.cuda.Event] = deque()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the piece of work that `key` names; from the third time on it is replayed.

        Args:
            key: of all that changes what is launched.
            work: the same at every call with this key.

        Raises:
            RuntimeError: it does something that cannot be recorded.
        """
        graph = self._graphs.get(key)
        if graph is None and self._runs[key] < WARM_UP:
            self._runs[key] += 1
            now = torch.cuda.current_stream()
            self._side.wait_stream(now)
            with torch.cuda.stream(self._side):
                work()
            now.wait_stream(self._side)
            return
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            # Another thread packs batches into pinned memory meanwhile, which is no part of it.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                work()
            self._graphs[key] = graph
        graph.replay()

    def end_step(self) -> None:
        """Wait for the step before the last few; replays are queued much sooner than done."""
        over: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        over.record()
        self._under_way.append(over)
        if len(self._under_way) > AHEAD:
            self._under_way.popleft().synchronize()
