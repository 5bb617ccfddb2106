"""`penstock serve --replicas` from its options on, with Ray's part played in this process."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.loading import ModelSource
from penstock.cli.served import ServedModel
from penstock.cli.served_replicas import absolute, open_front
from penstock.cluster import ray_replicas
from penstock.cluster.ray_replicas import Placement
from penstock.cluster.replica import Replica
from penstock.server.settings import ServerSettings

SERVED = ServedModel(
    model="recall", source=ModelSource(None, False, False), device="cpu", dtype=None, weights=None,
    config=None, policy=None, memory="64MiB", disk="memory", exact=False, adapter=None, seal=False,
    max_context=1024, max_running=2, max_waiting=4, chunk=256, documents=Path("documents"),
    key=None, sessions=Path("sessions"), max_disk="1GiB",
)  # fmt: skip
TURN = {"messages": [{"role": "user", "content": "The pass is 7."}], "max_tokens": 2}


class Here(Replica):
    """A replica without a process of its own."""

    def restart(self) -> None:
        """Not asked for."""
        raise AssertionError

    stop = restart


def test_replicas_have_the_folders_of_where_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(home)
    replicas: list[Here] = []

    @contextmanager
    def links(
        count: int, make: Callable[[], AbstractContextManager[Any]], placement: Placement
    ) -> Iterator[dict[str, Here]]:
        monkeypatch.chdir(elsewhere)
        replicas.extend(Here(pickle.loads(pickle.dumps(make))) for _ in range(count))
        yield {str(rank): each for rank, each in enumerate(replicas)}
        for each in replicas:
            each.close()

    monkeypatch.setattr(ray_replicas, "ray_links", links)
    settings = ServerSettings(model_name="recall")

    async def ask(app: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=TURN)

    with open_front(SERVED, settings, count=2, most=2, address=None, grace_s=1) as app:
        said = asyncio.run(ask(app))
    assert said.status_code == 200, said.text
    assert said.json()["usage"]["completion_tokens"] > 0
    assert (home / "sessions").is_dir()
    assert not list(elsewhere.iterdir())


def test_what_may_be_a_name_is_a_path_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = replace(SERVED, adapter=Path("none"), config=Path("tuned.json"))
    assert absolute(given) == replace(
        given, config=tmp_path / "tuned.json", documents=tmp_path / "documents",
        sessions=tmp_path / "sessions",
    )  # fmt: skip
    for name in ("recall", "memory", "none"):
        (tmp_path / name).mkdir()
    found = absolute(given)
    assert (found.model, found.disk) == (str(tmp_path / "recall"), str(tmp_path / "memory"))
    assert found.adapter == tmp_path / "none"
