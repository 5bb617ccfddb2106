"""Scorer: scores the cold tokens, in this process or on near-storage devices."""

from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.channel import Exchange, ScorerError
from penstock.methods.hillinfer.near_storage.cold_keys import UNMAPPED, ColdKeys
from penstock.methods.hillinfer.near_storage.device_client import NearDevice
from penstock.methods.hillinfer.near_storage.holders import Holders
from penstock.methods.hillinfer.near_storage.settings import ScoreSettings
from penstock.methods.hillinfer.near_storage.shared_memory import NUM_AREAS

SLOWEST_RATE = 1e6
"""Tokens per second and layer below which a device counts as hanging."""


class Moved(NamedTuple):
    """What changed between the pools since the layer was asked last."""

    promoted: NDArray[np.int64]
    """Tokens that became hot, as row * max_tokens + position. [count]"""
    demoted: NDArray[np.int64]
    """Tokens that became cold. [count]"""
    reset: bool = False
    """All were cold at first."""
    first: int = 0
    """First token of those that are mapped on the way."""
    units: NDArray[np.int64] | None = None
    """Their units, `MOST_NEW` of a row at most. [rows, count]"""


class Scoring(ABC):
    """One request under way."""

    @abstractmethod
    def log_sums(self) -> NDArray[np.float32]:
        """Rule "attention", first: log of the summed exponentials of all cold logits.

        Returns:
            [rows, query_heads], minus infinity where nothing is cold.
        """

    @abstractmethod
    def merge(self, normalisers: NDArray[np.float32] | None, out: NDArray[np.float32]) -> float:
        """Put the scores into `out` as they come.

        Args:
            normalisers: log-sums over all tokens, for the rule "attention". [rows, query_heads]
            out: not-a-number where no score is in yet. [rows, max_tokens]

        Returns:
            Seconds that the slowest device worked.

        Raises:
            ScorerError: a device died, hung or answered nonsense.
        """


class Scorer(ABC):
    """Scores the cold tokens of every layer; the cold pool's other half is a `KVFile`.

    Attributes:
        generation: changes when the scorer has forgotten which tokens are hot
    """

    settings: ScoreSettings
    generation: int
    wants_keys: ClassVar[bool]
    """Whether keys must be `put`, since writing them to the store is not enough."""

    def ensure_alive(self) -> None:  # noqa: B027 - optional
        """Start again what was lost; asked before `generation` is looked at.

        Raises:
            StorageError: it does not start.
        """

    def turn(self) -> bool:
        """Whether a request that failed may be made again, of others, with everything told anew."""
        return False

    @abstractmethod
    def map(self, layer: int, first: int, unit_ids: NDArray[np.int64]) -> None:
        """Tokens from `first` on are in these units, and cold. unit_ids: [rows, count]"""

    @abstractmethod
    def put(self, layer: int, unit_ids: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        """Take in keys, where writing them is not enough (`ColdKeys.put`)."""

    def link_rate(self) -> float:
        """Tokens per second that came from the cold pool so far; 0 when none did."""
        return 0.0

    def forget_from(self, layer: int, token: int) -> None:  # noqa: B027 - optional
        """A layer's tokens from this one on are gone."""

    @abstractmethod
    def begin(self, layer: int, query: NDArray[np.float32], end: int, moved: Moved) -> Scoring:
        """Broadcast a query and begin to score every cold token before `end`.

        Args:
            query: [rows, query_heads, head_dim]
        """


class _LocalScoring(Scoring):
    def __init__(self, keys: ColdKeys, query: NDArray[np.float32], end: int) -> None:
        self._keys, self._query, self._end = keys, query, end

    @override
    def log_sums(self) -> NDArray[np.float32]:
        return self._keys.log_sums(self._query, self._end)

    @override
    def merge(self, normalisers: NDArray[np.float32] | None, out: NDArray[np.float32]) -> float:
        if normalisers is None:
            blocks = self._keys.blocks_of_products(self._query, self._end)
        else:
            blocks = self._keys.blocks_of_shares(normalisers)
        for block in blocks:
            out[block.row, block.positions] = block.scores
        return 0.0


class LocalScorer(Scorer):
    """All codes in this process, scored by it: the same policy without near-storage scoring."""

    wants_keys: ClassVar[bool] = True

    def __init__(self, settings: ScoreSettings, layers: int) -> None:
        self.settings, self.generation = settings, 1
        self._keys = [ColdKeys(settings) for _ in range(layers)]

    @override
    def map(self, layer: int, first: int, unit_ids: NDArray[np.int64]) -> None:
        self._keys[layer].map(first, unit_ids)

    @override
    def put(self, layer: int, unit_ids: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        self._keys[layer].put(unit_ids, raw)

    @override
    def begin(self, layer: int, query: NDArray[np.float32], end: int, moved: Moved) -> Scoring:
        keys = self._keys[layer]
        if moved.units is not None:
            keys.map(moved.first, moved.units)
        keys.change(moved.promoted, moved.demoted, reset=moved.reset)
        return _LocalScoring(keys, query, end)


class _RemoteScoring(Scoring):
    """One request to every device; blocks are merged in whatever order devices answer."""

    def __init__(
        self, scorer: "RemoteScorer", area: int, exchanges: list[tuple[NearDevice, Exchange]]
    ) -> None:
        self._scorer, self._area, self._exchanges = scorer, area, exchanges

    @override
    def log_sums(self) -> NDArray[np.float32]:
        parts = []
        for device, exchange in self._exchanges:
            message = exchange.next(device.deadline(self._scorer.patience_s))
            if not isinstance(message, protocol.Logits):
                raise device.scores.nonsense(f"{type(message).__name__} where Logits was expected")
            sums = device.areas[self._area].log_sums.copy()
            if np.isnan(sums).any() or (sums == np.inf).any():
                raise device.scores.nonsense("log-sums that are no numbers")
            parts.append(sums)
        total: NDArray[np.float32] = np.logaddexp.reduce(np.stack(parts), axis=0)
        return total

    @override
    def merge(self, normalisers: NDArray[np.float32] | None, out: NDArray[np.float32]) -> float:
        if normalisers is not None:
            for device, exchange in self._exchanges:
                device.areas[self._area].normalisers[:] = normalisers
                device.scores.send(exchange, protocol.Normalise(self._area))
        slowest = 0
        for device, exchange in self._exchanges:
            slowest = max(slowest, self._merge_one(device, exchange, out))
        return slowest / 1e9

    def _merge_one(self, device: NearDevice, exchange: Exchange, out: NDArray[np.float32]) -> int:
        area, at, number = device.areas[self._area], 0, 0
        deadline = device.deadline(self._scorer.patience_s)
        while isinstance(message := exchange.next(deadline), protocol.Block):
            end = at + message.count
            if message.number != number or message.first != at or end > len(area.positions):
                raise device.scores.nonsense("score blocks out of order")
            if message.row >= len(out):
                raise device.scores.nonsense(f"scores of row {message.row} of {len(out)}")
            positions, scores = area.positions[at:end].copy(), area.scores[at:end].copy()
            if len(positions) and not 0 <= positions[0] <= positions[-1] < out.shape[1]:
                raise device.scores.nonsense("a score of a token that does not exist")
            if not (positions[1:] > positions[:-1]).all():
                raise device.scores.nonsense("positions that do not ascend")
            row = out[message.row]
            if not np.isnan(row[positions]).all():
                raise device.scores.nonsense("a score of a token that is hot, or scored already")
            if not np.isfinite(scores).all():
                raise device.scores.nonsense("a score that is no number")
            row[positions] = scores
            at, number = end, number + 1
        if not isinstance(message, protocol.Done):
            raise device.scores.nonsense(f"{type(message).__name__} among score blocks")
        device.scores.forget(exchange)
        return message.nanoseconds


class RemoteScorer(Scorer):
    """One near-storage device or several, over which the units are striped.

    Every device is asked at once and scores what it answers for; the merge does not know how many
    there are.
    """

    wants_keys: ClassVar[bool] = False

    def __init__(self, holders: Holders) -> None:
        self.devices, self._stripes = holders.devices, holders.stripes
        self._holders = holders
        self.settings = self.devices[0].settings
        self._answering = holders.answering()
        """The device that answers for the units of each."""
        self._told: tuple[object, ...] = self._who()
        """Who that was when all were told, and how often one had come back."""
        self._turns, self._asked_at = 0, -1
        self._next_area = 0
        self._maps: dict[int, NDArray[np.int64]] = {}
        self._restarted: set[int] = set()
        """Devices that may have units in their files of which they have no codes."""
        for i, device in enumerate(self.devices):
            device.restore = partial(self._restore, i)

    @property
    @override
    def generation(self) -> int:  # type: ignore[override]
        return self._turns + sum(device.generation for device in self.devices)

    @override
    def ensure_alive(self) -> None:
        """Where others answer from now on, they are told which tokens those are."""
        self._holders.ensure_alive()
        while (who := self._who()) != self._told:
            self._answering, self._told = who[0], ()
            self._turns += 1
            try:
                for i in sorted(set(self._answering)):
                    self._say_maps(i, encode=i in self._restarted)
            except ScorerError:
                if not self.turn():
                    raise
            else:
                self._told = who
            self._holders.ensure_alive()

    @override
    def turn(self) -> bool:
        if not self._holders.has_copies:
            return False
        self._holders.look()
        return self._who() != self._told or self.generation != self._asked_at

    def _who(self) -> tuple[tuple[int, ...], int]:
        """Raises as `Holders.answering`."""
        with self._holders.lock:
            return self._holders.answering(), self._holders.returned

    @property
    def patience_s(self) -> float:
        """More time for what takes long where much is cold."""
        return self.settings.rows * self.settings.max_tokens / SLOWEST_RATE

    @override
    def map(self, layer: int, first: int, unit_ids: NDArray[np.int64]) -> None:
        """What was said is kept, to be said again after a restart."""
        self._remember(layer, first, unit_ids)
        for i in sorted(set(self._answering)):
            if not self._holders.has_copies:
                self.devices[i].ensure_alive()
            self._send_map(i, layer, first, unit_ids, encode=i in self._restarted)

    def _remember(self, layer: int, first: int, unit_ids: NDArray[np.int64]) -> None:
        s = self.settings
        if layer not in self._maps:
            self._maps[layer] = np.full((s.rows, s.max_tokens), UNMAPPED, dtype=np.int64)
        self._maps[layer][:, first : first + unit_ids.shape[1]] = unit_ids

    def forget(self) -> None:
        """Nothing is mapped any more, and the devices serve other settings (`NearStore.serve`)."""
        self._maps.clear()
        self._restarted = set(range(len(self.devices)))
        there = (each for i, each in enumerate(self.devices) if i not in self._holders.away)
        self.settings = next(there, self.devices[0]).settings

    @override
    def link_rate(self) -> float:
        """Devices work side by side."""
        return sum(device.link.rate for device in self.devices)

    @override
    def forget_from(self, layer: int, token: int) -> None:
        if layer in self._maps:
            self._maps[layer][:, token:] = UNMAPPED

    @override
    def put(self, layer: int, unit_ids: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        """Nothing to do: a device makes its codes of what is written to it."""

    def _send_map(
        self, i: int, layer: int, first: int, unit_ids: NDArray[np.int64], *, encode: bool
    ) -> None:
        device = self.devices[i]
        local = self._stripes.local_units(unit_ids, i, self._answering)
        most = device.settings.section_bytes // (8 * len(local))
        patience = local.size * device.settings.unit_bytes / 20e6 if encode else 0.0
        with device.lock:  # also held when this is said again after a restart
            for begin in range(0, local.shape[1], most):
                part = local[:, begin : begin + most]
                at = device.map_section
                device.memory[at : at + 8 * part.size].view(np.int64)[:] = part.reshape(-1)
                message = protocol.Map(layer, first + begin, part.shape[1], at, encode)
                device.call(device.scores, message, patience)

    def _restore(self, i: int) -> None:
        """Say again what was mapped, so that the codes are made from the files. What was written
        and is not mapped yet gets its codes when it is."""
        self._restarted.add(i)
        if i not in self._holders.away:  # one that comes back is told when it may answer
            self._say_maps(i, encode=True)

    def _say_maps(self, i: int, *, encode: bool) -> None:
        for layer, units in list(self._maps.items()):
            known = int((units >= 0).any(axis=0).sum())
            if known:
                self._send_map(i, layer, 0, units[:, :known], encode=encode)

    @override
    def begin(self, layer: int, query: NDArray[np.float32], end: int, moved: Moved) -> Scoring:
        i, self._next_area = self._next_area, (self._next_area + 1) % NUM_AREAS
        exchanges: list[tuple[NearDevice, Exchange]] = []
        count, self._asked_at = 0, self.generation
        if moved.units is not None:
            count = moved.units.shape[1]
            self._remember(layer, moved.first, moved.units)
        for number in sorted(set(self._answering)):
            device = self.devices[number]
            area = device.areas[i]
            area.query[:] = query
            area.promoted[: len(moved.promoted)] = moved.promoted
            area.demoted[: len(moved.demoted)] = moved.demoted
            if moved.units is not None:
                local = self._stripes.local_units(moved.units, number, self._answering)
                area.units[: local.size] = local.reshape(-1)
            exchanges.append((device, device.scores.begin(protocol.Score(
                layer, i, end, moved.first, count, len(moved.promoted), len(moved.demoted),
                moved.reset,
            ))))  # fmt: skip
        return _RemoteScoring(self, i, exchanges)
