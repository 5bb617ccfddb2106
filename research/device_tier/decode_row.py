"""DecodeRow: one method over one pattern and batch: filled, decoded at some places, measured."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import BudgetError, ConfigError, StoreFullError
from penstock.methods.louiskv.device_index import DeviceSemanticUnits
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.plain_model import plain_cache, vocabulary_size
from penstock.storage.pinned_memory import pinned_bytes
from research.device_tier.breakdown import time_parts
from research.device_tier.decode_bench import DecodeBench
from research.device_tier.methods import Method, Pattern
from research.device_tier.plain_kernels import as_flagged
from research.device_tier.row_counts import Counts, GpuMemory, count
from research.device_tier.stated_units import StatedUnits
from research.device_tier.step_timer import time_steps
from research.device_tier.streamed_index import lay_stream, selecting_layers

WARM_UP = 8
"""Uncounted steps at the first place at most: kernels are compiled, the CUDA graph is recorded."""
WARM_AGAIN = 2
"""Uncounted steps at the other places: a new place begins with empty selections."""
GROUP = 8
"""Steps between two waits for the device."""
HEADROOM = 2 << 30
"""Of GPU memory beside a whole cache: what a forward pass takes."""


def places_of(pattern: Pattern, steps: int, others: int, count: int = 3) -> list[int]:
    """Lengths of the cache at which steps are measured, from the answer's beginning to its end.

    Args:
        others: steps that are not counted, at each place.
        count: places, as many as do not overlap.

    Raises:
        ConfigError: the answer is too short for them.
    """
    last = pattern.prompt + pattern.output - steps - others
    if last < pattern.prompt:
        raise ConfigError(f"the answer of {pattern.text} is too short for {steps + others} steps")
    between = [pattern.prompt + i * pattern.output // (count - 1) for i in range(1, count - 1)]
    places: list[int] = []
    for place in (pattern.prompt, *between, last):
        if not places or place >= places[-1] + steps + others:
            places.append(place)
    return places


class DecodeRow:
    """A cache of one method, and the model that decodes over it."""

    def __init__(self, bench: DecodeBench, method: Method, pattern: Pattern, batch: int) -> None:
        """Make the cache; nothing large is allocated yet.

        Raises:
            BudgetError: a cache in GPU memory would not fit.
            StoreFullError: more pinned memory than a row may take.
            PenstockError: the method cannot be planned so.
        """
        self._bench, self._method, self._pattern, self._batch = bench, method, pattern, batch
        self._noise, self._stream = bench.noise(batch), bench.stream(batch)
        self._steps_done = self._streamed = 0
        self._stated: StatedUnits | None = None
        self.memory = GpuMemory(bench.device)
        max_tokens = pattern.prompt + pattern.output
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=bench.device)
        self._position = torch.zeros_like(self._token)
        self.figures: dict[str, Any] = {}
        if method.plain is not None:
            self._require_room(bench.shape.full_cache_bytes(batch, max_tokens))
            self._cache: Any = plain_cache(bench.model, method.plain, max_tokens)
            return
        assert method.policy is not None
        self._cache = TieredCache(
            bench.model, method.policy, memory=method.memory, store="host", max_tokens=max_tokens,
            batch_size=batch, adapter=bench.adapter if method.policy.uses_adapter else None,
            cuda_graphs="eager" not in method.flags,
        )  # fmt: skip
        layers = bench.shape.num_layers
        layer_bytes = self._cache.plan.host_bytes // layers
        pinned = layers * pinned_bytes(layer_bytes)
        self.figures.update(host_bytes=self._cache.plan.host_bytes, pinned_bytes=pinned)
        if pinned > bench.host_bytes:
            self.close()
            raise StoreFullError(
                f"{pinned / 2**30:.0f} GiB of pinned memory; give --host-gib to allow it"
            )

    def _require_room(self, cache_bytes: int) -> None:
        if self._bench.device.type != "cuda":
            return
        free = self.memory.free_bytes()
        layer = cache_bytes // self._bench.shape.num_layers
        if cache_bytes + 6 * layer + HEADROOM > free:
            raise BudgetError(
                f"the cache takes {cache_bytes / 2**30:.1f} GiB and the GPU has "
                f"{free / 2**30:.1f} GiB left",
                needed_bytes=cache_bytes + HEADROOM,
            )

    def run(self) -> dict[str, Any]:
        """Fill, warm up and measure at every place.

        Returns:
            The row's figures.
        """
        bench, flags = self._bench, self._method.flags
        others = WARM_UP + bench.breakdown_steps
        places = places_of(self._pattern, bench.steps, others, bench.places)
        measured = []
        with torch.no_grad():
            for number, length in enumerate(places):
                began = time.perf_counter()
                self._fill_to(length)
                self.figures.setdefault("fill_s", time.perf_counter() - began)
                with as_flagged(flags):
                    self._warm_up(first=number == 0)
                    measured.append(self._measure(length))
            with as_flagged(flags):
                self._break_down()
        self.figures["places"] = measured
        self.figures.update(_whole_answer(measured, self._pattern.output, self._batch))
        self.figures["memory"] = self.memory.figures(self._ledger())
        if isinstance(self._cache, TieredCache):
            self.figures["notices"] = list(self._cache.notices)
        return self.figures

    def _fill_to(self, length: int) -> None:
        held = self._length()
        self._noise.fill(self._cache, length - held)
        self._position.fill_(length)
        if isinstance(self._cache, TieredCache) and not self._streamed:
            layers = self._cache.tiers.layers
            self._stated = self._state_units(layers)
            self._streamed = lay_stream(layers, self._stream, self._stated)
            self.figures["streamed_layers"] = self._streamed
        if self._stated is not None:
            self.figures.setdefault("stated", []).append(self._stated.state(length))
        _wait(self._bench.device)
        self.memory.filled()

    def _state_units(self, layers: Sequence[object]) -> StatedUnits | None:
        selecting = selecting_layers(layers)
        if self._bench.stays is None or not selecting:
            return None
        _, layer = selecting[0]
        at_turns = isinstance(layer.index, DeviceSemanticUnits)
        stated = StatedUnits(
            self._stream, layer.setup.plan, at_turns=at_turns,
            stays=self._bench.stays[0 if at_turns else 1], seed=self._bench.seed,
        )  # fmt: skip
        self.memory.leave_out(stated.num_bytes)
        return stated

    def _length(self) -> int:
        return int(self._cache.get_seq_length()) if self._steps_done else 0

    def _step(self) -> None:
        model: Any = self._bench.model
        out = model(
            input_ids=self._token, **cache_argument(model, self._cache),
            position_ids=self._position, use_cache=True,
        )  # fmt: skip
        chosen: Tensor = out.logits[:, -1:].argmax(-1)
        self._token = chosen % vocabulary_size(model)
        self._position += 1
        self._steps_done += 1

    def _warm_up(self, *, first: bool) -> None:
        """Steps that do not count; those of the first place until a graph is there."""
        for number in range(WARM_UP if first else WARM_AGAIN):
            if first and number == WARM_AGAIN:
                self.memory.warm()
            self._step()
        _wait(self._bench.device)
        if first:
            self.memory.recorded()
            decoder = getattr(self._cache, "_decoder", None)
            self.figures["graph"] = decoder is not None and decoder._graph is not None

    def _measure(self, length: int) -> dict[str, Any]:
        bench, before = self._bench, self._count()
        times = time_steps(self._step, bench.steps, bench.device, group=GROUP, most_s=bench.most_s)
        after = self._count()
        self.memory.measured()
        return {
            "length": length, **times.figures(self._batch),
            **(after - before).figures(len(times.steps_ms), self._batch),
        }  # fmt: skip

    def _count(self) -> Counts:
        return count(self._cache) if isinstance(self._cache, TieredCache) else Counts()

    def _break_down(self) -> None:
        """Parts of a step, launch by launch; the graph is gone then. Not of a method that chooses
        ahead: its parts lie beside one another."""
        room = self._pattern.prompt + self._pattern.output - self._length()
        steps = min(self._bench.breakdown_steps, room)
        if not isinstance(self._cache, TieredCache) or steps < 1:
            return
        if self._cache.tiers.policy.predicts_on_device:
            return
        if self._cache._decoder is not None:
            self._cache._decoder.remove()
        layers = self._cache.tiers.layers
        self.figures["breakdown"] = time_parts(self._step, layers, self._bench.device, steps)

    def _ledger(self) -> dict[str, int] | None:
        if not isinstance(self._cache, TieredCache):
            return None
        return dict(self._cache.report().items)

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        if isinstance(self._cache, TieredCache):
            self._cache.close()
        self._cache = None
        gc.collect()
        if self._bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _whole_answer(places: list[dict[str, Any]], output: int, batch: int) -> dict[str, float]:
    """The whole answer's time, as if a step's time went in straight lines from place to place."""
    means = [place["mean_ms"] for place in places]
    lengths = [place["length"] for place in places]
    mean = means[0]
    if len(means) > 1:
        area = sum(
            (b - a) * (x + y) / 2
            for a, b, x, y in zip(lengths, lengths[1:], means, means[1:], strict=False)
        )
        mean = area / (lengths[-1] - lengths[0])
    return {
        "answer_s": mean * output / 1e3, "answer_mean_ms": mean,
        "tokens_per_s": 1e3 * batch / mean,
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
