"""Replicas on Ray: Serve places, health-checks and restarts them, and carries the answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from penstock.cluster.front import ReplicaLostError
from penstock.cluster.ray_session import connect, first_line
from penstock.cluster.replica import Message, Replica
from penstock.core.errors import ConfigError

_OBJECT_BYTES = 128 << 20
"""Of Ray's object store: answers pass through it in small parts, KV never does."""
_REACH_S = 10.0
"""A request that has not reached its replica by then goes to another."""
_ONGOING = 100_000
"""Serve queues nothing: a replica's engine says how many may wait."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where replicas run, and with what."""

    address: str | None = None
    """Of a running Ray cluster; None: Ray is started on this machine, and ends with the server."""
    cpus: int = 1
    """Threads of each replica."""
    gpus: float = 0
    grace_s: float = 30.0
    """How long a replica may take to end."""
    most: int = 1
    """Replicas that there may be."""


@contextmanager
def ray_links(
    count: int, open_app: Callable[[], AbstractContextManager[Any]], placement: Placement
) -> Iterator[dict[str, "RayLink"]]:
    """Start replicas and yield the ways to them, by rank; stops them at the end.

    Args:
        count: started at once; for the rest of `placement.most` there is a way, and no replica.
        open_app: as for `Replica`; it is pickled.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, or a replica does not start.
    """
    if placement.address is None:
        ray = connect(
            "local", num_cpus=placement.most * placement.cpus, include_dashboard=False,
            object_store_memory=_OBJECT_BYTES,
        )  # fmt: skip
    else:
        ray = connect(placement.address)
    from ray import serve

    links: dict[str, RayLink] = {}
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ranks = range(placement.most)
        links = {str(rank): RayLink(rank, open_app, placement) for rank in ranks}
        start(list(links.values())[:count])
        yield links
    except ReplicaLostError as error:
        raise ConfigError(str(error)) from error
    finally:
        if placement.address is None:
            serve.shutdown()
        else:
            for link in links.values():
                link.stop()
        ray.shutdown()


class RayReplica(Replica):
    """A replica whose counters are Ray's metrics too, as gauges, as often as Serve checks it."""

    def __init__(self, open_app: Callable[[], AbstractContextManager[Any]]) -> None:
        """As `Replica`."""
        from ray import serve

        super().__init__(open_app)
        self._rank = serve.get_replica_context().app_name.rpartition("-")[2]
        self._gauges: dict[str, Any] = {}

    def check_health(self) -> None:
        """As `Replica.check_health`."""
        from ray.util.metrics import Gauge

        super().check_health()
        for name, labels, value in self.samples():
            if name not in self._gauges:
                tags = (*labels, "replica")
                self._gauges[name] = Gauge(name.replace(":", "_"), "See /metrics.", tags)
            self._gauges[name].set(value, {**labels, "replica": self._rank})


class RayLink:
    """The way to one replica, a Serve application of its own."""

    def __init__(
        self, rank: int, open_app: Callable[[], AbstractContextManager[Any]], placement: Placement
    ) -> None:
        from ray import serve

        resources: dict[str, float] = {"num_cpus": placement.cpus, "num_gpus": placement.gpus}
        deployment = serve.deployment(
            RayReplica, name="replica", num_replicas=1, max_ongoing_requests=_ONGOING,
            ray_actor_options=resources, graceful_shutdown_timeout_s=placement.grace_s,
            health_check_period_s=2, health_check_timeout_s=60,
        )  # fmt: skip
        self.name, self.target = f"penstock-{rank}", deployment.bind(open_app)
        self.handle: Any = None
        """Serve's; None before it is started."""

    def restart(self) -> None:
        """As `Link.restart`: Serve takes a further run of an application for a new version."""
        start([self])

    def stop(self) -> None:
        """As `Link.stop`."""
        from ray import serve

        if self.handle is not None:
            serve.delete(self.name)
            self.handle = None

    async def ask(self, scope: Message, body: bytes) -> AsyncIterator[Message | None]:
        """As `Replica.ask`."""
        stream = self.handle.options(method_name="ask", stream=True).remote(scope, body)
        try:
            answer = aiter(stream)
            yield await asyncio.wait_for(anext(answer), _REACH_S)
            async for message in answer:
                yield message
        except _lost() as error:
            raise ReplicaLostError(first_line(error)) from error
        finally:
            stream.cancel()

    async def let_go(self, name: str, salt: str) -> Literal["free", "given up", "asked"]:
        """As `Replica.let_go`."""
        said: Literal["free", "given up", "asked"] = await self._call("let_go", name, salt)
        return said

    async def life(self) -> str:
        """As `Replica.life`."""
        return str(await self._call("life"))

    async def _call(self, method: str, *values: str) -> Any:
        call = self.handle.options(method_name=method).remote(*values)
        try:
            return await asyncio.wait_for(call, _REACH_S)
        except _lost() as error:
            raise ReplicaLostError(first_line(error)) from error


def start(links: list[RayLink]) -> None:
    """Start replicas together, or others in their place, and return when they answer.

    Raises:
        ReplicaLostError: one does not start.
    """
    from ray import serve

    targets = [serve.RunTarget(each.target, name=each.name, route_prefix=None) for each in links]
    try:
        for link, handle in zip(links, serve.run_many(targets), strict=True):
            link.handle = handle
            handle.life.remote().result(timeout_s=60)
    except _lost(RuntimeError) as error:
        raise ReplicaLostError(f"a replica does not start: {first_line(error)}") from error


def _lost(*more: type[Exception]) -> tuple[type[Exception], ...]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return TimeoutError, RayError, RayServeException, *more
