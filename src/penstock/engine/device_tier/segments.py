"""Segments: a forward pass as CUDA graphs, between which runs what no graph may hold."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


class Segments:
    """A model's own launches for so many rows, of one token each, recorded from break to break.

    What depends on which caches join (fetches, attention) runs at the breaks, over memory that
    stays where it is; the rest is the same for any caches.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """Hold nothing yet.

        Args:
            rows: of every pass.
        """
        self._ids = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._positions = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._parts: list[Callable[[], object]] = []
        """Replays and what runs between them, in order."""
        self._logits = torch.empty(0)
        self._graph: Any = None
        self._pool: Any = None
        self.has_failed = False

    @property
    def is_recorded(self) -> bool:
        """Whether `replay` can be called."""
        return bool(self._parts) and self._graph is None

    def record(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Record a pass; nothing of it runs. `has_failed` where that is not possible.

        Args:
            forward: makes logits of ids and positions, both [rows, 1]; it comes to `between` where
                the pass has to stop.
        """
        stream: Any = torch.cuda.Stream(self._ids.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._ids.device))
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            self._begin()
            try:
                self._logits = forward(self._ids, self._positions)
                self._end()
            except (RuntimeError, ValueError, TypeError) as error:
                _LOG.warning("joined steps are launched without CUDA graphs: %s", error)
                self.has_failed = True
                self._give_up()
        torch.cuda.current_stream(self._ids.device).wait_stream(stream)

    def between(self, run: Callable[[], None]) -> None:
        """End a segment; each replay calls `run` before the next one."""
        self._end()
        self._parts.append(run)
        self._begin()

    def replay(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the pass.

        Returns:
            The logits, until the next replay.
        """
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        for part in self._parts:
            part()
        return self._logits

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        graph.capture_end()
        self._parts.append(graph.replay)

    def _give_up(self) -> None:
        self._parts.clear()
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # what has failed says so once more
                graph.capture_end()
