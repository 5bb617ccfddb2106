"""A row of `device_tier.speed`: one method decoding at places of an answer."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import BudgetError, ConfigError, StoreFullError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.device_tier import device_layer
from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.methods.louiskv.device_index import DeviceSemanticUnits
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM
from penstock.models.plain_model import plain_cache, vocabulary_size
from penstock.storage.pinned_memory import pinned_bytes
from penstock.workloads.synthetic_kv import SyntheticKV
from research.device_tier.methods import Method, Pattern
from research.device_tier.recorded_units import RecordedUnits, read_recording
from research.device_tier.streamed_index import (
    QueryStream,
    StatedUnits,
    StreamedIndex,
    lay_stream,
    selecting_layers,
)
from research.device_tier.timers import as_flagged, new_event, time_steps

# What the rows of `device_tier.speed` share, and the state of the GPU -----------------------------


@dataclass(kw_only=True)
class DecodeBench:
    """What the rows of a run share."""

    model: CausalLM
    adapter: LowRankAdapter
    shape: KVShape
    device: torch.device
    steps: int
    places: int
    """Stretches of so many steps, from the answer's beginning to its end."""
    segment: int
    sameness: float
    most_s: float
    breakdown_steps: int
    host_bytes: int
    """Most pinned memory of a row."""
    seed: int
    stays: Sequence[float] | None = None
    """Share of a selection that is in the next one: of methods that retrieve at turns, and of those
    that do at every step. None: what the queries make of it."""
    recorded: Path | None = None
    """Folder with what a model selected by each method, to be played instead."""
    _noise: dict[int, SyntheticKV] = field(default_factory=dict)
    _streams: dict[int, QueryStream] = field(default_factory=dict)

    def noise(self, batch: int) -> SyntheticKV:
        """Keys and values of documents; drawn once for a batch."""
        if batch not in self._noise:
            self._noise.clear()
            self._noise[batch] = SyntheticKV(self.shape, batch, self.device, self.seed)
        return self._noise[batch]

    def stream(self, batch: int) -> QueryStream:
        """Queries that select; drawn once for a batch."""
        if batch not in self._streams:
            self._streams.clear()
            self._streams[batch] = QueryStream(
                sequences=batch, heads=self.shape.num_query_heads, head_dim=self.shape.head_dim,
                layers=self.shape.num_layers, segment=self.segment, sameness=self.sameness,
                dtype=self.shape.dtype, device=self.device, seed=self.seed,
            )  # fmt: skip
        return self._streams[batch]


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Have libraries take now what they keep for good: cuBLAS's 32 MiB for the steps, and as many
    with the first CUDA graph of a process. They are no cache's, and come once."""
    if device.type != "cuda":
        return
    small = torch.ones(16, 16, dtype=dtype, device=device)
    small @ small
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        small @ small


# Counters of its cache, and GPU memory beside the ledger ------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sums over layers and sequences since the cache was made."""

    wanted: int = 0
    hit: int = 0
    fetched_bytes: int = 0
    layer_steps: int = 0
    """Steps of layers that look for boundaries, each sequence counted."""
    boundaries: int = 0
    retrievals: float = 0
    """A step counts by the share of its heads that retrieve."""
    selecting_layers: int = 0
    """Layers that select (not a sum: what the newer of two counts says)."""

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came since; `selecting_layers` stays."""
        changed = {
            one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)
        }
        return Counts(**{**changed, "selecting_layers": self.selecting_layers})

    def figures(self, steps: int, batch: int) -> dict[str, Any]:
        """For result files, per step of the whole batch.

        "retrieval_share": of a layer's steps; methods without boundaries retrieve at each.
        """
        if not self.selecting_layers:
            return {}
        bounded = self.layer_steps > 0
        return {
            "units_wanted": self.wanted / steps, "fetched_bytes": self.fetched_bytes / steps,
            "hit_rate": self.hit / self.wanted if self.wanted else None,
            "retrieval_share": self.retrievals / self.layer_steps if bounded else 1.0,
            "mean_segment": self.layer_steps / self.boundaries if self.boundaries else None,
        }  # fmt: skip


def count(cache: TieredCache) -> Counts:
    """Read a cache's counters; waits for the device."""
    phase = cache.stats.decode
    selecting, steps, boundaries, retrievals = 0, 0, 0, 0.0
    for layer in cache.tiers.layers:
        if not isinstance(layer, DeviceLayer) or layer.index is None:
            continue
        selecting += 1
        index = layer.index.inner if isinstance(layer.index, StreamedIndex) else layer.index
        if isinstance(index, DeviceSemanticUnits):
            found = index.counters.sum(dim=0).tolist()
            steps, boundaries = steps + int(found[0]), boundaries + int(found[1])
            retrievals += float(index.retrievals.sum())
    return Counts(
        wanted=phase.units_wanted, hit=phase.units_hit, fetched_bytes=phase.read_bytes,
        layer_steps=steps, boundaries=boundaries, retrievals=retrievals, selecting_layers=selecting,
    )  # fmt: skip


class GpuMemory:
    """What PyTorch has allocated beyond what was there before the cache; zeros on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base = self._allocated()
        self._held = self._graph = self._fill_peak = self._step_peak = 0
        self._reset_peak()

    def free_bytes(self) -> int:
        """Bytes that can be had, those that PyTorch keeps for later among them."""
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def leave_out(self, num_bytes: int) -> None:
        """So many of what was allocated since are not the cache's."""
        if self._cuda:
            self._base += num_bytes

    def filled(self) -> None:
        """Tokens were put in."""
        self._fill_peak = max(self._fill_peak, self._peak())

    def warm(self) -> None:
        """Workspaces are there, a CUDA graph is not."""
        self._held = self._allocated() - self._base

    def recorded(self) -> None:
        """A CUDA graph is there, if there is to be one."""
        self._graph = self._allocated() - self._base - self._held
        self._reset_peak()

    def measured(self) -> None:
        """Counted steps have run."""
        self._step_peak = max(self._step_peak, self._peak())
        self._reset_peak()

    def figures(self, ledger: dict[str, int] | None) -> dict[str, Any]:
        """For result files, in bytes. "held": between steps, before a graph; "ratio": of that to
        the ledger, whose scratch stands for what is there for a moment only."""
        total = sum(ledger.values()) if ledger is not None else None
        known = self._cuda and total
        return {
            "held": self._held, "graph": self._graph, "fill_peak": self._fill_peak,
            "step_peak": self._step_peak, "ledger": total, "ledger_items": ledger,
            "ratio": self._held / total if known and total else None,
            "peak_ratio": self._step_peak / total if known and total else None,
            "fill_ratio": self._fill_peak / total if known and total else None,
        }  # fmt: skip

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base if self._cuda else 0

    def _reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()


# Parts between events, launches not counted -------------------------------------------------------

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


# Filled, decoded at some places, measured ---------------------------------------------------------

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
        self._stated: StatedUnits | RecordedUnits | None = None
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

    def _state_units(self, layers: Sequence[object]) -> StatedUnits | RecordedUnits | None:
        selecting = selecting_layers(layers)
        if not selecting:
            return None
        _, layer = selecting[0]
        if self._bench.recorded is not None:
            plan = layer.setup.plan
            played = RecordedUnits(
                read_recording(self._bench.recorded, self._method.text), plan,
                plan.batch // self._batch, self._bench.device,
            )  # fmt: skip
            self.figures["recorded_share"] = played.share
            self.memory.leave_out(played.num_bytes)
            return played
        if self._bench.stays is None:
            return None
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
        if self._cache.graph_decoder is not None:
            self._cache.graph_decoder.remove()
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
