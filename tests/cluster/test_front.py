"""The front of replicas: what it passes on, asks all for, and says where one is lost."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Literal

import httpx
import pytest

from penstock.cluster.front import Front, ReplicaLostError
from penstock.cluster.replica import Message
from penstock.cluster.scaling import Scaler
from penstock.core.errors import ConfigError
from penstock.server.app import make_front
from penstock.server.settings import ServerSettings

CHAT = "/v1/chat/completions"


class Link:
    """A replica that answers what it is told to."""

    def __init__(self, name: str) -> None:
        """Well."""
        self.name = name
        self.answer: Any = {"by": name}
        self.kind = b"application/json"
        self.lost_after: int | None = None
        """Messages; 0 is before the request was there."""
        self.holds: Literal["free", "given up", "asked"] = "free"
        self.asked: list[str] = []
        self.lives = 1
        self.answers = asyncio.Event()
        """Not set: it takes requests and says nothing."""
        self.answers.set()

    async def ask(self, scope: Message, body: bytes) -> AsyncIterator[Message | None]:
        """Answer."""
        text = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        messages: Iterable[Message | None] = (
            None,
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", self.kind)],
            },
            {"type": "http.response.body", "body": text, "more_body": False},
        )
        for count, message in enumerate(messages):
            if count == self.lost_after:
                raise ReplicaLostError("killed")
            if count == 0:
                self.asked.append(scope["path"])
            yield message
            await self.answers.wait()

    async def let_go(self, name: str, salt: str) -> Literal["free", "given up", "asked"]:
        """As it is told."""
        return self.holds

    async def life(self) -> str:
        """The number of its start."""
        if self.lost_after is not None:
            raise ReplicaLostError("killed")
        return str(self.lives)

    def restart(self) -> None:
        """Start anew."""
        self.lives += 1

    def stop(self) -> None:
        """Stop."""
        self.lives = 0


class Site:
    """Two links, a front, and a client of it."""

    def __init__(self, running: int = 2) -> None:
        """Start with both up."""
        self.links = {name: Link(name) for name in ("0", "1")}
        self.front = Front(self.links, together=2, running=running, patience_s=0.1)
        settings = ServerSettings(model_name="tiny", api_key="k", max_body_bytes=1000)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_front(self.front, settings)),
            base_url="http://front", headers={"Authorization": "Bearer k"},
        )  # fmt: skip

    async def chat(self, text: str = "Hello") -> httpx.Response:
        """Ask."""
        messages = [{"role": "user", "content": text}]
        return await self.client.post(CHAT, json={"messages": messages})


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for it."""
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


def test_a_request_goes_to_its_home_and_elsewhere_where_that_is_lost() -> None:
    async def run() -> None:
        site = Site()
        first = await site.chat()
        home = first.headers["x-penstock-replica"]
        assert (await site.chat()).json() == {"by": home}
        assert {(await site.chat(str(each))).json()["by"] for each in range(20)} == {"0", "1"}
        site.links[home].lost_after = 0
        spilled = await site.chat()
        assert spilled.status_code == 200
        assert spilled.headers["x-penstock-spill"] == home
        said = (await site.client.get("/health")).json()
        assert said["replicas"][home] == "down"
        site.links[home].lost_after = None
        while (await site.client.get("/health")).json()["replicas"][home] == "down":
            await asyncio.sleep(0.05)
        assert (await site.chat()).json() == {"by": home}
        for link in site.links.values():
            link.lost_after = 0
        assert (await site.chat()).status_code == 503
        assert (await site.client.get("/health")).status_code == 503

    asyncio.run(run())


@pytest.mark.parametrize(("after", "kind"), [(1, b"application/json"), (2, b"text/event-stream")])
def test_an_answer_that_is_lost_ends_in_an_error_of_openais_shape(after: int, kind: bytes) -> None:
    async def run() -> None:
        site = Site()
        for link in site.links.values():
            link.lost_after, link.kind = after, kind
        answer = await site.chat()
        assert answer.status_code == (503 if after == 1 else 200)
        error = json.loads(answer.text.removeprefix("data: "))["error"]
        assert error["code"] == "replica_lost"
        # A request that may have ended it goes to no other one.
        assert sum(len(link.asked) for link in site.links.values()) == 1

    asyncio.run(run())


def test_documents_concern_all_replicas() -> None:
    async def run() -> None:
        site = Site()
        first, second = site.links.values()
        stored, partly = {"id": "a", "status": "ready"}, {"id": "b", "status": "unfinished"}
        reading = {"id": "b", "status": "reading", "progress": {"processed": 3}}
        first.answer = {"object": "list", "data": [stored, partly]}
        second.answer = {"object": "list", "data": [reading, stored]}
        listed = await site.client.get("/v1/documents")
        assert listed.json()["data"] == [stored, reading]
        first.answer, second.answer = partly, reading
        assert (await site.client.get("/v1/documents/b")).json() == reading
        second.holds = "asked"
        assert (await site.client.delete("/v1/documents/a")).status_code == 409
        second.holds = "given up"
        assert (await site.client.delete("/v1/documents/b")).json()["deleted"]
        asked = len(first.asked) + len(second.asked)
        assert asked == 4  # the two lists
        second.holds = "free"
        assert (await site.client.delete("/v1/documents/a")).status_code == 200
        assert len(first.asked) + len(second.asked) == asked + 1

    asyncio.run(run())


def test_metrics_have_the_replica_and_the_front_wants_the_key() -> None:
    async def run() -> None:
        site = Site()
        for count, link in enumerate(site.links.values()):
            link.answer = b'# HELP x y\n# TYPE x counter\nx_total{model_name="m"} %d\n' % count
        text = (await site.client.get("/metrics")).text
        assert 'x_total{model_name="m",replica="1"} 1.0' in text
        assert 'penstock:replica_up{replica="0"} 1.0' in text
        assert text.count("# TYPE x_total counter") == 1
        wrong = {"Authorization": "Bearer wrong"}
        assert (await site.client.get("/v1/models", headers=wrong)).status_code == 401
        assert (await site.chat("x" * 2000)).status_code == 413
        await asyncio.to_thread(site.front.roll, 1.0)
        assert [link.lives for link in site.links.values()] == [2, 2]

    asyncio.run(run())


def test_one_more_is_started_where_all_are_full_and_stopped_where_it_is_idle() -> None:
    async def run() -> None:
        site, scaler = Site(running=1), Scaler(1, 2, 2, busy_s=0.0, idle_s=0.0)
        first = site.links["0"]
        first.answers.clear()
        asked = [asyncio.create_task(site.chat(str(each))) for each in range(2)]
        scaling = asyncio.create_task(asyncio.to_thread(site.front.scale, scaler, 5.0))
        try:
            await until(lambda: site.front.count == 2)
            assert {(await site.chat(f"more {each}")).json()["by"] for each in range(20)} == {"1"}
            first.answers.set()
            assert {(await each).json()["by"] for each in asked} == {"0"}
            await until(lambda: site.links["1"].lives == 0)
            assert (await site.client.get("/health")).json()["replicas"] == {"0": "up"}
            assert {(await site.chat(str(each))).json()["by"] for each in range(20)} == {"0"}
        finally:
            site.front.is_closing = True
            await scaling

    asyncio.run(run())


def test_a_load_must_last_to_change_the_number() -> None:
    scaler = Scaler(1, 3, 4)
    assert [scaler.wanted(1, 4, now) for now in (0, 29, 31)] == [1, 1, 2]
    assert [scaler.wanted(2, 7, now) for now in (31, 99)] == [2, 2]
    assert [scaler.wanted(2, 2, now) for now in (100, 699)] == [2, 2]
    assert scaler.wanted(2, 3, 700) == 2
    assert [scaler.wanted(2, 2, now) for now in (701, 1302)] == [2, 1]
    assert [scaler.wanted(1, 0, now) for now in (0, 9999)] == [1, 1]
    assert [scaler.wanted(3, 99, now) for now in (0, 9999)] == [3, 3]
    with pytest.raises(ConfigError):
        Scaler(2, 1, 4)
