"""A server says why it ends."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable

import pytest
from fastapi import FastAPI

from penstock.core.errors import CacheStateError
from penstock.generation.engine import LLM
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.worker import Worker
from penstock.server.app import make_app
from penstock.server.serving import bind, serve, url_of
from penstock.server.settings import ServerSettings
from penstock.testing.tiny_chat import tiny_chat_model


def served(app: FastAPI, then: Callable[[str], object]) -> str:
    """Serve in this thread; another does something once a request is answered."""
    with bind("127.0.0.1", 0) as listening:
        url = url_of(listening)

        def ask() -> None:
            urllib.request.urlopen(f"{url}/health", timeout=60).close()
            then(url)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            return serve(app, listening, grace_s=1)
        finally:
            asking.join(60)


def test_a_signal_and_a_failed_engine_end_it_with_a_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_chat_model(), store="memory", memory=None, adapter="none")
    with Engine(llm, memory="64MiB") as engine:
        app = make_app(engine, ServerSettings(model_name="tiny"))
        assert served(app, lambda _: os.kill(os.getpid(), signal.SIGTERM)) == "SIGTERM"
        assert "SIGTERM: answers under way have 1 s to end\n" in capfd.readouterr().err

        def fail(worker: Worker) -> None:
            raise ZeroDivisionError("a step")

        def ask(url: str) -> None:
            body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with pytest.raises(OSError):  # noqa: PT011 - an error's status, or no answer
                urllib.request.urlopen(request, timeout=60)

        monkeypatch.setattr(Worker, "_decode", fail)
        app = make_app(engine, ServerSettings(model_name="tiny"))
        with pytest.raises(CacheStateError, match="so the server ends: ZeroDivisionError: a step"):
            served(app, ask)
        assert isinstance(engine.error, ZeroDivisionError)
