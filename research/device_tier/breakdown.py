"""Where a layer's time goes in a decode step: parts between events, launches not counted."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.engine.device_tier import device_layer
from penstock.engine.device_tier.device_layer import DeviceLayer
from research.device_tier.step_timer import new_event
from research.device_tier.streamed_index import StreamedIndex

STREAM = "stream of the bench"
SELECT, GATHER, APPEND = "select", "list and gather", "append and index"
ATTENTION, REST = "attention", "rest of the layer"
PARTS = (SELECT, GATHER, APPEND, ATTENTION, REST)
RETRIEVAL = (SELECT, GATHER)
"""Estimation and transfer, as the paper's Fig. 7 has it."""
_HEAD_START = 10_000_000
"""Clock cycles (5 ms at 2 GHz) that the device sleeps before a layer, while Python launches it."""
_STARTS = "starts"

Mark = tuple[str, Any]


class PartTimer:
    """Notes when each part of a layer's step ends, on the device's clock.

    A step launched by Python has gaps that a CUDA graph does not have. So the device sleeps before
    each layer's attention until the whole layer is in its queue; what follows runs without gaps.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.marks: list[Mark] = []

    def begin_layer(self) -> None:
        """The layer before has ended, and its attention function is entered."""
        self.end(REST)
        if self._cuda:
            torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        self.end(_STARTS)

    def end(self, part: str) -> None:
        """What was launched since the last call was this part."""
        if self._cuda:
            event = new_event()
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def parts_ms(self) -> dict[str, float]:
        """Milliseconds of each part, summed; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        total = dict.fromkeys((*PARTS, STREAM), 0.0)
        for (_, began), (part, ended) in zip(self.marks, self.marks[1:], strict=False):
            if part != _STARTS:
                total[part] += began.elapsed_time(ended) if self._cuda else 1e3 * (ended - began)
        return total


def time_parts(
    step: Callable[[], None], layers: Sequence[object], device: torch.device, steps: int
) -> dict[str, Any] | None:
    """Decode some steps without a CUDA graph and time the parts of their layers.

    Layers that follow on one another are counted, the last one's rest (the model's head is in it)
    is not. Means over steps, so that steps without retrieval count.

    Args:
        step: decodes one token, launch by launch.

    Returns:
        "layer_ms": milliseconds of one layer by part; "retrieval_share": of selecting, listing and
        gathering, without the bench's own stream; None where no layer is in the device tier.
    """
    tiered = [layer for layer in layers if isinstance(layer, DeviceLayer)]
    if len(tiered) < 2:
        return None
    totals = dict.fromkeys((*PARTS, STREAM), 0.0)
    timer = PartTimer(device)
    with _watched(tiered, timer):
        for _ in range(steps):
            timer.marks.clear()
            step()
            parts = timer.parts_ms()
            for part, value in parts.items():
                totals[part] += value
    counts = {part: steps * len(tiered) for part in totals}
    counts[REST] = steps * (len(tiered) - 1)
    layer_ms = {part: totals[part] / counts[part] for part in totals}
    whole = sum(layer_ms[part] for part in PARTS)
    share = sum(layer_ms[part] for part in RETRIEVAL) / whole
    return {"layer_ms": layer_ms, "retrieval_share": share, "steps": steps}


@contextmanager
def _watched(layers: Sequence[DeviceLayer], timer: PartTimer) -> Iterator[None]:
    """Put the timer between the calls of the layers' steps."""
    calls = {"gather_units": GATHER, "attend_pool": ATTENTION}
    module = vars(device_layer)
    found = {name: module[name] for name in calls}
    for name, part in calls.items():
        module[name] = _ended_by(timer, part, found[name])
    for layer in layers:
        _watch(layer, timer)
    try:
        yield
    finally:
        module.update(found)
        for layer in layers:
            _unwatch(layer)


def _ended_by(timer: PartTimer, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        timer.end(part)
        return out

    return timed


def _watch(layer: DeviceLayer, timer: PartTimer) -> None:
    attend, index = layer.attend, layer.index

    def attend_timed(call: Any) -> Any:
        timer.begin_layer()
        out = attend(call)
        timer.end(ATTENTION)  # nothing is left of it but where a layer streams everything
        return out

    vars(layer)["attend"] = attend_timed
    if index is None:
        return
    if isinstance(index, StreamedIndex):
        vars(index)["streamed_query"] = _ended_by(timer, STREAM, index.streamed_query)
    vars(index)["select"] = _ended_by(timer, SELECT, index.select)
    vars(index)["put"] = _ended_by(timer, APPEND, index.put)


def _unwatch(layer: DeviceLayer) -> None:
    vars(layer).pop("attend", None)
    for name in ("streamed_query", "select", "put"):
        if layer.index is not None:
            vars(layer.index).pop(name, None)
