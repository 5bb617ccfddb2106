"""Replicas on Ray, end to end. `make test-cluster` runs it; `make test` does not collect it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.evaluate.process_memory import command_line
from penstock.storage.documents.folder import is_unfinished

_START_S = 900.0


class Server:
    """`penstock serve --replicas 2`, as a process."""

    def __init__(self, folder: Path) -> None:
        """Start it, and wait for its address."""
        for each in ("library", "sessions"):
            (folder / each).mkdir()
        command = [
            sys.executable, "-m", "penstock", "serve", "recall", "--replicas", "2", "--port", "0",
            "--memory", "256MiB", "--dtype", "float32", "--disk", str(folder), "--grace", "60",
            "--library", str(folder / "library"), "--sessions", str(folder / "sessions"),
        ]  # fmt: skip
        self.said, self.sessions = (folder / "said").open("w+"), folder / "sessions"
        self.process = subprocess.Popen(command, stdout=self.said, stderr=self.said)
        try:
            self.url = self._await_url()
        except BaseException:
            self.process.terminate()
            self.process.wait(120)
            raise

    def _await_url(self) -> str:
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            self.said.seek(0)
            for line in self.said:
                if " at http://" in line:
                    return line.partition(" at ")[2].split()[0]
            time.sleep(0.5)
        self.said.seek(0)
        raise AssertionError(self.said.read())

    def open(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """An answer; one of 400 or more too."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            return error

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[Any, str | None]:
        """What was answered, and by which replica."""
        with self.open(path, body, method) as answer:
            return json.load(answer), answer.headers["x-penstock-replica"]

    def pids(self) -> dict[str, int]:
        """Processes of replicas, by rank."""
        found = {}
        for each in psutil.Process(self.process.pid).children(recursive=True):
            title = command_line(each)
            if title.startswith("ray::") and "ServeReplica:penstock-" in title:
                found[title.partition("penstock-")[2][:1]] = each.pid
        return found

    def await_all(self) -> None:
        """Wait until all replicas are up."""
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            if set(self.ask("/health")[0].get("replicas", {}).values()) == {"up"}:
                return
            time.sleep(0.5)
        raise AssertionError(self.ask("/health")[0])

    def await_stored(self) -> None:
        """Wait until conversations are whole on the disk, as they are a moment after an answer."""
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            stored = [*self.sessions.iterdir()]
            if stored and not any(is_unfinished(each) for each in stored):
                return
            time.sleep(0.05)
        raise AssertionError(stored)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("served"))
    children = psutil.Process(made.process.pid).children(recursive=True)
    try:
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(120) == 0
        _, left = psutil.wait_procs(children, timeout=30)
        assert left == []
    finally:
        made.process.kill()
        made.said.close()


def turn(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[each % 2], "content": text} for each, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": 8, "temperature": 0}


def cached(said: Any) -> int:
    return int(said["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_documents_and_conversations_keep_to_their_replica(server: Server) -> None:
    names = [f"document-{each}" for each in range(6)]
    homes = {}
    for name in names:
        said, homes[name] = server.ask(
            "/v1/documents", {"name": name, "text": f"It is {name}. " * 20}
        )
        assert said["status"] == "ready", said
    assert set(homes.values()) == {"0", "1"}
    listed, _ = server.ask("/v1/documents")
    assert {each["id"] for each in listed["data"]} == set(names)
    for name in names:
        said, by = server.ask(
            "/v1/completions", {"prompt": "It", "document": name, "max_tokens": 2}
        )
        assert by == homes[name]
        assert cached(said) > 20
    # The other replica has it open by no chance; its own has, and lets it go.
    for name in names:
        assert server.ask(f"/v1/documents/{name}", method="DELETE")[0]["deleted"]
    assert server.ask("/v1/documents")[0]["data"] == []


def test_a_killed_replica_ends_its_answers_and_no_others(server: Server) -> None:
    first = turn("Tell me of the sky " * 20)
    said, by = server.ask("/v1/chat/completions", first)
    assert by is not None
    answer = said["choices"][0]["message"]["content"]
    server.await_stored()
    long = {**first, "max_tokens": 4000, "stream": True}
    with server.open("/v1/chat/completions", long) as running:
        assert running.headers["x-penstock-replica"] == by
        assert running.readline().startswith(b"data: ")
        os.kill(server.pids()[by], signal.SIGKILL)
        last = [line for line in running if line.startswith(b"data: ")][-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_lost"
    assert set(error) == {"message", "type", "param", "code"}
    # The other one goes on with the conversation, and says whose it is.
    second = turn(first["messages"][0]["content"], answer, "And of the sea?")
    with server.open("/v1/chat/completions", second) as spilled:
        said = json.load(spilled)
        assert spilled.headers["x-penstock-replica"] != by
        assert spilled.headers["x-penstock-spill"] == by
    assert cached(said) > 20
    server.await_all()
    assert server.ask("/v1/chat/completions", first)[1] == by


def test_a_rolling_restart_loses_no_answer_and_no_conversation(server: Server) -> None:
    before = server.pids()
    first = turn("Tell me of the sea " * 20)
    answer = server.ask("/v1/chat/completions", first)[0]["choices"][0]["message"]["content"]
    server.process.send_signal(signal.SIGUSR1)
    end_s = time.monotonic() + _START_S
    answered = 0
    while time.monotonic() < end_s:
        said, _ = server.ask("/v1/chat/completions", turn(f"Number {answered}"))
        assert "error" not in said, said
        answered += 1
        time.sleep(0.2)
        now = server.pids()
        if len(now) == 2 and not set(now.values()) & set(before.values()):
            break
    server.await_all()
    assert not set(server.pids().values()) & set(before.values())
    second = turn(first["messages"][0]["content"], answer, "And of the sky?")
    assert cached(server.ask("/v1/chat/completions", second)[0]) > 20
