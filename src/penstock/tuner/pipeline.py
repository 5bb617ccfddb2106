"""Pipeline: how long a step takes when one layer's reads run behind the layer before.

Source: KVSwap (arXiv 2511.11907), section 3.4 and appendix A.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

QUERY_SHARE = 0.3
"""Part of a block before its attention: norm and projections. Only layers that wait for their true
query feel it, and only as the time in which nothing of theirs is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """One layer of all sequences, in seconds."""

    block_s: float
    """Its own work (T_model without prediction)."""
    rank_s: float
    """Prediction, ranking, fetch plan, submission."""
    io_s: float
    """The device's time for its reads (T_io)."""
    is_predicted: bool
    """Ranked before the layer before it starts; else behind its own projections, and waited for."""


def step_time(
    layers: Sequence[LayerTimes], *, latency_s: float = 0.0, head_s: float = 0.0
) -> tuple[float, float]:
    """Seconds of a step, and of these the seconds that attention waits for reads.

    Args:
        latency_s: of the device, once per layer that reads; overlaps with other layers' reads.
        head_s: of everything outside the layers.
    """
    now = free_at = stall = 0.0
    done = [0.0] * len(layers)

    def submit(number: int) -> None:
        nonlocal now, free_at
        layer = layers[number]
        now += layer.rank_s
        if layer.io_s > 0:
            free_at = max(free_at, now) + layer.io_s
            done[number] = free_at + latency_s

    for number, layer in enumerate(layers):
        if number + 1 < len(layers) and layers[number + 1].is_predicted:
            submit(number + 1)
        now += QUERY_SHARE * layer.block_s
        if not layer.is_predicted or number == 0:
            submit(number)
        waited = max(0.0, done[number] - now)
        stall += waited
        now += waited + (1 - QUERY_SHARE) * layer.block_s
    return now + head_s, stall
