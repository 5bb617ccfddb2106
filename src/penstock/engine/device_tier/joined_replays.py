"""JoinedReplays: what caches of the device tier compute in a joined step, from CUDA graphs."""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.device_index import SETTLE_STEPS
from penstock.engine.device_tier.device_steps import make_ready
from penstock.engine.device_tier.recording import recording
from penstock.engine.tiered_runtime import TieredRuntime

_LOG = logging.getLogger(__name__)
LANES = 4
"""Short launches of so many caches run beside each other."""


class Recording:
    """What a function queues, as a CUDA graph."""

    def __init__(self, run: Callable[[], Tensor | None], pool: Any) -> None:
        """Record; nothing of it runs.

        Raises:
            RuntimeError: it could not be recorded.
        """
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, pool):
            self.out = run()

    def replay(self) -> None:
        """Run it; its result is in `out` again."""
        self._graph.replay()


@dataclass(slots=True)
class _Piece:
    """One recorded part of a layer, and the memory that it reads."""

    recording: Recording
    inputs: list[Tensor]
    """[rows of the cache, ...] each, flat, or copying them would take a launch each."""


@dataclass(slots=True)
class _Lane:
    """Two streams: what is fetched for the next layer does not hold back this one's attention."""

    choosing: torch.cuda.Stream
    attending: torch.cuda.Stream
    fetched: list[torch.cuda.Event]
    """Of even layers and of odd ones."""
    done: torch.cuda.Event


@dataclass(slots=True)
class _Recorded:
    """A cache's parts of a step. No launch of theirs depends on which other caches join."""

    first_layer: Any
    """Of those that it was recorded with (weak)."""
    layers: int
    calls: dict[int, AttentionCall] = field(default_factory=dict)
    """By layer, what it attends with; a step that was launched piece by piece has shown it."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """By layer, what a fetch that begins ahead is begun with."""
    fetches: dict[int, _Piece] = field(default_factory=dict)
    attentions: dict[int, _Piece] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def is_recorded(self) -> bool:
        return len(self.attentions) == self.layers

    @property
    def may_be_recorded(self) -> bool:
        return not self.has_failed and len(self.calls) == self.layers

    def record(self, runtime: TieredRuntime) -> None:
        """Record every layer; nothing of it runs. Where that fails, the cache is as before."""
        steps = runtime.device_steps
        assert steps is not None
        lengths = runtime.lengths
        runtime.end_step()
        steps.begin(runtime.length)  # queued now, not recorded
        pools = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        try:
            for number in range(self.layers):
                self._record_layer(runtime, number, pools)
        except (RuntimeError, ValueError, TypeError) as error:
            _LOG.warning("a cache's joined steps go without CUDA graphs: %s", error)
            self.has_failed = True
            self.fetches.clear()
            self.attentions.clear()
        runtime.forget_recording(lengths)  # where it went well, too

    def _record_layer(self, runtime: TieredRuntime, number: int, pools: tuple[Any, Any]) -> None:
        if number in self.queries:
            query = self.queries[number]

            def fetch() -> None:
                runtime.begin_fetch(number, query)
                runtime.layers[number].land()

            self.fetches[number] = _Piece(Recording(fetch, pools[0]), [query.flatten(1)])
        call = self.calls[number]
        self.attentions[number] = _Piece(
            Recording(lambda: runtime.attend(number, call), pools[1]),
            [each.flatten(1) for each in (call.query, call.keys, call.values)],
        )


class JoinedReplays:
    """Replays, of each cache by itself, what a layer selects, fetches and attends to.

    A cache's first joined step is launched piece by piece. The next one records two graphs a layer:
    one for a fetch that begins a layer ahead, one for the attention. Who joins and who leaves
    changes nothing in them, so nothing is recorded again. What all rows share, the model's
    products, is launched between them.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self._device = device
        self._known: weakref.WeakKeyDictionary[TieredRuntime, _Recorded] = (
            weakref.WeakKeyDictionary()
        )
        self._lanes = [_lane(device) for _ in range(LANES)]
        self._ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._members: list[tuple[TieredRuntime, _Recorded, slice]] = []
        self._begun: set[int] = set()

    def begin(self, members: Sequence[TieredRuntime], rows: Sequence[slice]) -> set[int]:
        """A step begins; returns the numbers of the members that will be replayed in it."""
        for closed in [each for each in self._known if not each.layers]:
            del self._known[closed]
        self._begun.clear()
        numbers = set()
        for number, (member, part) in enumerate(zip(members, rows, strict=True)):
            recorded = self._recorded(member)
            if recorded is None:
                continue
            assert member.device_steps is not None
            member.device_steps.begin(member.length)
            self._members.append((member, recorded, part))
            numbers.add(number)
        return numbers

    def _recorded(self, member: TieredRuntime) -> _Recorded | None:
        """What is recorded of a cache; None where its step has to be launched piece by piece."""
        if member.is_torn or not 0 < member.length < member.settings.max_tokens:
            return None
        known, layers = self._known.get(member), member.layers
        if known is None or known.first_layer() is not layers[0]:
            known = self._known[member] = _Recorded(weakref.ref(layers[0]), len(layers))
        if not known.may_be_recorded or not make_ready(member.layers):
            return None
        if not known.is_recorded and member.length % SETTLE_STEPS:
            known.record(member)
        return known if known.is_recorded else None

    def saw_call(self, member: TieredRuntime, layer: int, call: AttentionCall) -> None:
        """A layer was launched with this call."""
        known, sinks = self._known.get(member), call.sink_logits
        if known is not None and layer not in known.calls and (sinks is None or sinks.ndim == 1):
            given = [_like(each) for each in (call.query, call.keys, call.values)]
            known.calls[layer] = replace(call, query=given[0], keys=given[1], values=given[2])

    def saw_query(self, member: TieredRuntime, layer: int, query: Tensor) -> None:
        """A fetch was begun with this query."""
        known = self._known.get(member)
        if known is not None and layer not in known.queries:
            known.queries[layer] = _like(query)

    def wants_query(self, layer: int) -> bool:
        """Whether a replay begins a fetch of this layer."""
        return any(layer in recorded.fetches for _, recorded, _ in self._members)

    def begin_fetch(self, layer: int, query: Tensor) -> None:
        """Begin the layer's fetches, beside the layer before. query: [rows, num_heads, head_dim]"""
        fetching = [each for each in self._members if layer in each[1].fetches]
        if not fetching:
            return
        flat = query.flatten(1)
        torch._foreach_copy_(
            [recorded.fetches[layer].inputs[0] for _, recorded, _ in fetching],
            [flat[part] for _, _, part in fetching],
        )
        self._begun.add(layer)
        self._ready.record(torch.cuda.current_stream(self._device))
        for lane, members in self._by_lane():
            lane.choosing.wait_event(self._ready)
            with torch.cuda.stream(lane.choosing):
                for recorded in members:
                    if layer in recorded.fetches:
                        recorded.fetches[layer].recording.replay()
                lane.fetched[layer % 2].record(lane.choosing)

    def attend(self, layer: int, call: AttentionCall, out: Tensor) -> None:
        """Attend, and write it into the members' rows of `out`: [rows, 1, num_heads, head_dim]."""
        if not self._members:
            return
        main = torch.cuda.current_stream(self._device)
        given = [each.flatten(1) for each in (call.query, call.keys, call.values)]
        pieces = [recorded.attentions[layer] for _, recorded, _ in self._members]
        parts = [part for _, _, part in self._members]
        torch._foreach_copy_(
            [each for piece in pieces for each in piece.inputs],
            [each[part] for part in parts for each in given],
        )
        self._ready.record(main)
        for lane, members in self._by_lane():
            lane.attending.wait_event(self._ready)
            if layer in self._begun:
                lane.attending.wait_event(lane.fetched[layer % 2])
            with torch.cuda.stream(lane.attending):
                for recorded in members:
                    recorded.attentions[layer].recording.replay()
                lane.done.record(lane.attending)
            main.wait_event(lane.done)
        found = [piece.recording.out for piece in pieces if piece.recording.out is not None]
        torch._foreach_copy_([out[part] for part in parts], found)

    def _by_lane(self) -> Iterator[tuple[_Lane, list[_Recorded]]]:
        for number, lane in enumerate(self._lanes[: len(self._members)]):
            yield lane, [recorded for _, recorded, _ in self._members[number::LANES]]

    def end(self, *, is_done: bool) -> None:
        """The step is over.

        Args:
            is_done: all layers were passed; otherwise the caches are torn.
        """
        for member, _, _ in self._members:
            if is_done:
                member.replayed()
            else:
                member.mixed_up()
        self._members = []


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _lane(device: torch.device) -> _Lane:
    made: Any = torch.cuda
    return _Lane(
        made.Stream(device, priority=-1), made.Stream(device), [made.Event(), made.Event()],
        made.Event(),
    )  # fmt: skip
