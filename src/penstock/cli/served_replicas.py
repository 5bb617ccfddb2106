"""open_front(): the application of `penstock serve --replicas`, in front of servers on Ray."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.served import ServedModel, open_app
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.server.app import Application
    from penstock.server.settings import ServerSettings


@contextmanager
def open_front(
    served: ServedModel, settings: "ServerSettings", *, count: int, most: int,
    address: str | None, grace_s: float, at_random: bool = False,
) -> Iterator["Application"]:  # fmt: skip
    """Start replicas and yield the application in front of them; they end with it.

    The front alone wants the key and looks at hosts: a replica has no socket of its own.
    """
    from penstock.cluster.front import Front
    from penstock.cluster.ray_replicas import Placement, ray_links
    from penstock.cluster.scaling import Scaler
    from penstock.server.app import make_front

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    inside = replace(settings, api_key=None, cors_origins=(), allowed_hosts=("*",))
    placement = Placement(
        address=address, cpus=max(1, (os.cpu_count() or 1) // most) if address is None else 1,
        gpus=float(served.device.startswith("cuda")), grace_s=grace_s, most=most,
    )  # fmt: skip
    scaler = Scaler(count, most, served.max_running)
    make = partial(open_app, absolute(served), inside)
    with ray_links(count, make, placement) as links:
        front = Front(links, together=served.max_running, running=count, at_random=at_random)
        if most > count:
            threading.Thread(
                target=front.scale, args=(scaler, grace_s), name="penstock-scale", daemon=True
            ).start()
        with _rolled_by_signal(front, grace_s):
            yield make_front(front, settings)


def absolute(served: ServedModel) -> ServedModel:
    """Paths that mean the same in a process that starts elsewhere."""
    adapter = served.adapter
    return replace(
        served, model=_if_there(served.model), disk=_if_there(served.disk),
        adapter=None if adapter is None else Path(_if_there(str(adapter))),
        config=_whole(served.config), documents=_whole(served.documents),
        sessions=_whole(served.sessions),
    )  # fmt: skip


def _whole(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _if_there(name: str) -> str:
    """The path of what is there; what else a name may mean stays as it is."""
    return os.path.abspath(name) if Path(name).exists() else name


@contextmanager
def _rolled_by_signal(front: Any, grace_s: float) -> Iterator[None]:
    def roll() -> None:
        try:
            front.roll(grace_s)
        except ConfigError:  # it is going on already, which is what was asked for
            return

    def begin(number: int, frame: Any) -> None:
        threading.Thread(target=roll, name="penstock-roll", daemon=True).start()

    former = signal.signal(signal.SIGUSR1, begin)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, former)
