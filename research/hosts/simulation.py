"""Discrete events: requests about documents, on hosts that hold some of them.

Assumptions:

* Requests come as a Poisson process. Documents are asked for by Zipf's law.
* A host runs `workers` requests together, none slower than alone, and the rest in order of arrival.
* First token, prefill and steps are drawn, independently, from what one host measured. All
  documents are as large as the measured ones. An answer's length is geometric.
* Every host knows all loads at once. Routing takes no time.
* A host keeps its own documents, and copies of others in a bounded LRU.
* A document that is elsewhere is copied whole before its first token, over the sender's and the
  receiver's network card, each one copy after another. Without any copy it is prefilled.
* A host that goes takes its requests with it: they start anew elsewhere, their age kept.
* Moving documents after a host came or went takes `rebalance_share` of each card until it is done;
  a document that has not moved yet is served where it is.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.cluster.affinity import Ring, route

POLICIES = ("bounded", "plain", "random", "least")
_LOST, _MOVED = "lost", "moved"
WARM = 0.2
"""Share of the requests that is not counted."""


@dataclass(frozen=True, kw_only=True)
class Single:
    """What one host measured; seconds and bytes."""

    first_s: Sequence[float]
    prefill_s: Sequence[float]
    step_s: Sequence[float]
    document_bytes: int

    @classmethod
    def of_figures(cls, figures: dict[str, Any]) -> "Single":
        """From a result of `research.hosts.single`."""
        stored = figures["stored"]
        return cls(
            first_s=figures["first_token_s"], prefill_s=[one["prefill_s"] for one in stored],
            step_s=figures["step_s"],
            document_bytes=round(sum(one["bytes"] for one in stored) / len(stored)),
        )  # fmt: skip

    def hit_s(self, answer: int) -> float:
        """A request's mean time on a worker where its document is stored."""
        return float(np.mean(self.first_s) + (answer - 1) * np.mean(self.step_s))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One simulation.

    Attributes:
        load: share of all workers' time that requests would take if every document was at hand.
        skew: Zipf's exponent; 0: all documents alike.
        copies: hosts that keep a document from the start.
        cached: documents of others that a host keeps, in what its own are on average.
        network_bytes_s: of a host's card, each way.
        lost: hosts that go, at once, when half of the requests have come.
        answer: mean tokens of an answer.
    """

    policy: str
    hosts: int = 100
    workers: int = 4
    documents: int = 10_000
    requests: int = 20_000
    load: float = 0.6
    skew: float = 0.9
    copies: int = 1
    cached: float = 0.5
    network_bytes_s: float = 1.25e9
    lost: int = 0
    rebalance_share: float = 0.5
    factor: float = 1.25
    answer: int = 64


@dataclass(eq=False)
class _Request:
    document: int
    came_s: float
    counted: bool
    late: bool
    """Whether it came after hosts were lost."""
    missed: str = ""
    epoch: int = 0
    """Grows when its host is lost: what was planned for it is void."""


@dataclass(eq=False)
class _Host:
    name: str
    cached: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    queue: "deque[_Request]" = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    sent_bytes: int = 0

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)


class Walks:
    """Walks of documents over the ring of some hosts, each found once."""

    def __init__(self, names: Sequence[str]) -> None:
        """Place the hosts."""
        self._ring = Ring(names)
        self._found: dict[int, list[str]] = {}

    def of(self, document: int) -> list[str]:
        """All hosts, in the order in which the document meets them."""
        if document not in self._found:
            self._found[document] = self._ring.walk(str(document))
        return self._found[document]


def host_names(hosts: int, lost: int = 0) -> list[str]:
    """Names of the hosts that are left when the first are lost."""
    return [f"host-{number}" for number in range(lost, hosts)]


class Simulation:
    """Hosts, documents and requests of one scenario."""

    def __init__(
        self, scenario: Scenario, single: Single, seed: int, walks: Walks | None = None,
        walks_after: Walks | None = None,
    ) -> None:  # fmt: skip
        """Place all documents.

        Args:
            seed: of everything that is drawn.
            walks: of all hosts, if they are known already.
            walks_after: of those that are left.
        """
        self._of, self._single = scenario, single
        self._draw = np.random.default_rng(seed)
        names, left = host_names(scenario.hosts), host_names(scenario.hosts, scenario.lost)
        self._hosts = {name: _Host(name) for name in names}
        self._walks = walks or Walks(names)
        self._walks_after = walks_after or (Walks(left) if scenario.lost else self._walks)
        self._moving: dict[int, list[str]] = {}
        self._keepers: dict[int, list[str]] = {}
        self._room = round(scenario.cached * scenario.documents / scenario.hosts)
        ranks = np.arange(1, scenario.documents + 1, dtype=np.float64)
        shares = ranks**-scenario.skew
        self._popular = np.cumsum(shares / shares.sum())
        self._hits = self._copied = self._prefilled = self._restarted = self._spilled = 0
        self._first: list[tuple[float, bool]] = []
        self._events: list[tuple[float, int, Any]] = []
        self._order = 0
        self._busy_from_s = self._busy_to_s = 0.0
        self._rebalanced_bytes = 0

    # Who has what --------------------------------------------------------------------------------

    def _kept_by(self, document: int) -> list[str]:
        """Hosts whose own the document is."""
        if document not in self._keepers:
            self._keepers[document] = self._walks.of(document)[: self._of.copies]
        return self._keepers[document]

    def _has(self, host: _Host, document: int) -> bool:
        if host.name in self._kept_by(document):
            return True
        if document in host.cached:
            host.cached.move_to_end(document)
            return True
        return False

    def _cache(self, host: _Host, document: int) -> None:
        if self._room:
            host.cached[document] = None
            while len(host.cached) > self._room:
                host.cached.popitem(last=False)

    # Requests ------------------------------------------------------------------------------------

    def _target(self, document: int) -> _Host:
        hosts, policy = self._hosts, self._of.policy
        if policy == "plain":
            return hosts[self._walks.of(document)[0]]
        if policy == "bounded":
            walk = self._walks.of(document)
            loads = {name: host.load for name, host in hosts.items()}
            went = route(walk, loads, least=self._of.workers, factor=self._of.factor)
            self._spilled += went.is_spill
            return hosts[went.replica]
        if policy == "random":
            return list(hosts.values())[int(self._draw.integers(len(hosts)))]
        least = min(host.load for host in hosts.values())
        idle = [host for host in hosts.values() if host.load == least]
        return idle[int(self._draw.integers(len(idle)))]

    def _at(self, time_s: float, event: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, event))

    def _put(self, request: _Request, now_s: float) -> None:
        host = self._target(request.document)
        host.queue.append(request)
        self._serve(host, now_s)

    def _serve(self, host: _Host, now_s: float) -> None:
        while host.queue and len(host.running) < self._of.workers:
            request = host.queue.popleft()
            host.running.append(request)
            ready_s = self._fetched(host, request, now_s)
            first_s = ready_s + self._drawn(self._single.first_s)
            steps = int(self._draw.geometric(1 / self._of.answer)) - 1
            end_s = first_s + float(self._draw.choice(self._single.step_s, steps).sum())
            self._at(end_s, (host, request, request.epoch, first_s))

    def _fetched(self, host: _Host, request: _Request, now_s: float) -> float:
        """When the document is at hand."""
        document = request.document
        if self._has(host, document):
            request.missed = ""
            return now_s
        senders = [self._hosts[name] for name in self._kept_by(document) if name in self._hosts]
        senders = senders or [one for one in self._hosts.values() if document in one.cached]
        if not senders:
            request.missed = "prefilled"
            self._keepers[document] = [host.name]
            return now_s + self._drawn(self._single.prefill_s)
        sender = min(senders, key=lambda one: one.out_free_s)
        request.missed = "copied"
        share = 1 - self._of.rebalance_share * (self._busy_from_s <= now_s < self._busy_to_s)
        seconds = self._single.document_bytes / (share * self._of.network_bytes_s)
        start_s = max(now_s, sender.out_free_s, host.in_free_s)
        sender.out_free_s = host.in_free_s = start_s + seconds
        sender.sent_bytes += self._single.document_bytes
        self._cache(host, document)
        return start_s + seconds

    def _drawn(self, values: Sequence[float]) -> float:
        return float(values[int(self._draw.integers(len(values)))])

    # A host's loss -------------------------------------------------------------------------------

    def _lose(self, now_s: float) -> None:
        gone = [self._hosts.pop(name) for name in host_names(self._of.lost)]
        names = {host.name for host in gone}
        received = dict.fromkeys(self._hosts, 0)
        for document in range(self._of.documents):
            old = self._kept_by(document)
            left = [name for name in old if name not in names]
            if len(left) == len(old):
                continue
            # A copy that is left is copied again; without one the next request prefills.
            self._keepers[document] = left
            if left:
                new = self._walks_after.of(document)[: self._of.copies]
                self._moving[document] = new
                for name in set(new) - set(left):
                    received[name] += self._single.document_bytes
        self._walks = self._walks_after
        self._rebalanced_bytes = sum(received.values())
        seconds = max(received.values()) / (self._of.rebalance_share * self._of.network_bytes_s)
        self._busy_from_s, self._busy_to_s = now_s, now_s + seconds
        self._at(self._busy_to_s, _MOVED)
        for host in gone:
            for request in [*host.running, *host.queue]:
                request.epoch += 1
                self._restarted += 1
                self._put(request, now_s)

    # All of it -----------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Simulate; rates, bytes and percentiles."""
        of, count = self._of, self._of.requests
        rate = of.load * of.hosts * of.workers / self._single.hit_s(of.answer)
        came = np.cumsum(self._draw.exponential(1 / rate, count))
        documents = np.searchsorted(self._popular, self._draw.random(count))
        for number in range(count):
            late = of.lost > 0 and number >= count // 2
            self._at(float(came[number]), _Request(
                min(int(documents[number]), of.documents - 1), float(came[number]),
                number >= WARM * count, late,
            ))  # fmt: skip
            if of.lost and number == count // 2:
                self._at(float(came[number]), _LOST)
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            if event == _LOST:
                self._lose(now_s)
            elif event == _MOVED:
                self._keepers |= self._moving
            elif isinstance(event, _Request):
                self._put(event, now_s)
            else:
                self._ended(now_s, *event)
        return self._figures(rate, float(came[-1]))

    def _ended(
        self, now_s: float, host: _Host, request: _Request, epoch: int, first: float
    ) -> None:
        if request.epoch != epoch:
            return  # its host is gone, and it runs elsewhere
        host.running.remove(request)
        if request.counted:
            self._first.append((first - request.came_s, request.late))
            self._hits += not request.missed
            self._copied += request.missed == "copied"
            self._prefilled += request.missed == "prefilled"
        self._serve(host, now_s)

    def _figures(self, rate: float, last_s: float) -> dict[str, Any]:
        counted = len(self._first)
        waits = [seconds for seconds, late in self._first if late or not self._of.lost]
        p50, p99, p999 = np.percentile(waits, (50, 99, 99.9))
        sent = [host.sent_bytes for host in self._hosts.values()]
        return {
            "requests_per_s": rate, "counted": counted, "seconds": last_s,
            "hit_rate": self._hits / counted, "copied": self._copied / counted,
            "prefilled": self._prefilled / counted, "spilled": self._spilled / self._of.requests,
            "restarted": self._restarted, "first_p50_s": float(p50), "first_p99_s": float(p99),
            "first_p999_s": float(p999), "sent_bytes": sum(sent),
            "busiest_card": max(sent) / last_s / self._of.network_bytes_s,
            "rebalanced_bytes": self._rebalanced_bytes,
            "rebalance_s": self._busy_to_s - self._busy_from_s,
        }  # fmt: skip
