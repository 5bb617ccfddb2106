"""What a server keeps: keys, limits, documents apart, memory given back; nothing breaks it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.core.errors import BudgetError, QueueFullError, StorageError
from penstock.documents.sessions import Sessions
from penstock.generation.engine import LLM
from penstock.generation.serving.engine import Engine
from penstock.server.answer_format import AnswerFormat, Piece
from penstock.server.app import make_app
from penstock.server.errors import as_api_error
from penstock.server.serving import hosts_of
from penstock.server.settings import ServerSettings
from penstock.testing.tiny_chat import tiny_chat_model
from tests.server.fuzz import fuzz

HELLO = [{"role": "user", "content": "Hello"}]
FUZZ_EXAMPLES = 20
"""`make fuzz-server` asks many more."""


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as made:
        yield made


def frames(text: str) -> list[Any]:
    lines = [each.removeprefix("data: ") for each in text.split("\n\n") if "data: " in each]
    return [json.loads(each) for each in lines if each != "[DONE]"]


def test_a_key_hosts_and_limits_are_kept() -> None:
    limited = ServerSettings(
        model_name="m", api_key="secret", max_body_bytes=500, max_images=1, max_prompts=2,
        allowed_hosts=hosts_of("127.0.0.1", ("proxy.test",)), cors_origins=("https://page.test",),
    )  # fmt: skip
    llm = LLM(tiny_chat_model(), store="memory", memory=None)
    with Engine(llm, memory="64MiB", max_running=1, max_waiting=0) as engine:
        app = make_app(engine, limited)
        with TestClient(app, base_url="http://proxy.test", raise_server_exceptions=False) as ask:
            assert ask.get("/health").status_code == 200
            assert ask.get("/v1/models").status_code == 401
            refused = ask.post("/v1/messages", json={})
            assert refused.json()["error"]["type"] == "authentication_error"
            ask.headers["Authorization"] = "Bearer secret"
            assert ask.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
            del ask.headers["Authorization"]
            ask.headers["x-api-key"] = "secret"
            assert ask.get("/v1/models", headers={"Host": "evil.test"}).status_code == 400
            allowed = ask.get("/health", headers={"Origin": "https://page.test"})
            assert allowed.headers["access-control-allow-origin"] == "https://page.test"
            other = ask.get("/health", headers={"Origin": "https://other.test"})
            assert "access-control-allow-origin" not in other.headers
            assert ask.post("/v1/completions", json={"prompt": "x" * 600}).status_code == 413
            too_many = ask.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
            assert "3 answers are more than 2" in too_many.json()["error"]["message"]
            app.state.backend.is_closing = True
            assert ask.get("/health").status_code == 503
            busy = ask.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3})
            assert busy.status_code == 429
            assert int(busy.headers["Retry-After"]) >= 1
        deadline = time.monotonic() + 60
        while engine.stats().used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().used_bytes == 0


def test_errors_say_what_to_do_and_no_path() -> None:
    names = {"/home/someone/models/tiny": "tiny"}
    said = as_api_error(BudgetError("no room at /home/someone/models/tiny for /srv/kv/x"), names)
    assert (said.status, said.message) == (400, "no room at tiny for [path]")
    full = as_api_error(QueueFullError("full", retry_after_s=2.5))
    assert (full.status, full.headers) == (429, {"Retry-After": "3"})
    lost = as_api_error(StorageError("cannot read /srv/kv/x: gone"))
    assert (lost.status, "/srv" in lost.message) == (500, False)
    assert "secret" not in as_api_error(KeyError("secret")).message


def test_a_stream_tells_progress_usage_and_stats(client: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "long " * 300}], "max_tokens": 4, "stream": True,
        "return_progress": True, "return_stats": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    told = frames(client.post("/v1/chat/completions", json=body).text)
    progress = [each["prompt_progress"] for each in told if "prompt_progress" in each]
    assert progress[0]["processed"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] == told[-1]["usage"]["prompt_tokens"]
    assert told[-2]["timings"]["predicted_n"] == 4
    stats = told[-2]["penstock"]
    assert 0 < stats["cache_peak_bytes"] <= stats["cache_limit_bytes"]
    page = client.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_count",
                 "penstock:kv_read_bytes_total"):  # fmt: skip
        assert f'{name}{{model_name="tiny"}}' in page
    text = "Grüße"
    ids = client.post("/tokenize", json={"content": "abc"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "abc"
    assert client.post("/tokenize", json={"content": text}).status_code == 200


def test_a_client_that_goes_frees_its_memory(app: FastAPI) -> None:
    """As a server sees it: the connection is closed while the answer streams."""
    body = {"messages": HELLO, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": "",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    sent: list[Any] = []
    engine = app.state.backend.engine

    def aborted() -> int:
        return int(engine.stats().finished.get("abort", 0))

    async def ask() -> None:
        begun = anyio.Event()
        given = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive() -> Any:
            for each in given:
                return each
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 5:
                begun.set()

        await app(scope, receive, send)

    before = aborted()
    anyio.run(ask)
    deadline = time.monotonic() + 60
    while aborted() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert aborted() == before + 1
    assert engine.stats().used_bytes == 0
    assert len(sent) < 1000  # of 3,000 tokens


def test_documents_are_read_once_and_kept_apart(client: TestClient) -> None:
    text = "The gate is open. " * 60
    new = {"name": "gate", "text": text, "stream": True, "cache_salt": "ann"}
    told = frames(client.post("/v1/documents", json=new).text)
    assert told[-1]["status"] == "ready"
    tokens = told[-1]["tokens"]
    assert tokens > len(text) // 2
    body = {"prompt": "Is it open?", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    mine = client.post(
        "/v1/completions", json={**body, "document": "gate", "cache_salt": "ann"}
    ).json()
    assert mine["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens
    by_key = {**body, "prompt_cache_key": "gate", "cache_salt": "ann"}
    assert client.post("/v1/completions", json=by_key).json()["choices"] == mine["choices"]
    whole = client.post("/v1/completions", json={**body, "prompt": text + "Is it open?"}).json()
    assert whole["choices"][0]["text"] == mine["choices"][0]["text"]
    for salt in ("", "bob"):
        assert client.get(f"/v1/documents?cache_salt={salt}").json()["data"] == []
        other = {**body, "document": "gate", "cache_salt": salt}
        assert client.post("/v1/completions", json=other).status_code == 404
        assert client.delete(f"/v1/documents/gate?cache_salt={salt}").status_code == 404
    counted = client.get("/metrics").text
    for name, count in (("queries", 2), ("hits", 1)):  # the second one found it open
        assert f'penstock:document_{name}_total{{model_name="tiny"}} {count}.0' in counted
    again = client.post("/v1/documents", json={**new, "stream": False})
    assert again.status_code == 409
    assert client.delete("/v1/documents/gate?cache_salt=ann").json()["deleted"]
    assert client.get("/v1/documents?cache_salt=ann").json()["data"] == []


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        ("x", "a <think>b", [("text", "a <think>b")]),
        ("</think>", "<think>\nwhy\n</think>\n\nyes", [("reasoning", "\nwhy\n"), ("text", "yes")]),
        ("x", 'so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
         [("text", "so"), ("call", 'f {"a": 1}')]),
        ("x", "<tool_call>{oops}</tool_call>.", [("text", "<tool_call>{oops}</tool_call>.")]),
        ("x", '<tool_call>{"name": "f"}', [("call", "f {}")]),
    ],
)  # fmt: skip
def test_answers_are_read_in_any_pieces(
    template: str, said: str, expected: list[tuple[str, str]]
) -> None:
    made = AnswerFormat(style="json", is_own=False, thinks="</think>" in template, tokenizer=None)
    for size in (1, 3, len(said)):
        reader = made.reader("", has_tools=True)
        pieces: list[Piece] = []
        for at in range(0, len(said), size):
            pieces += reader.push(said[at : at + size])
        pieces += reader.finish()
        found: list[tuple[str, str]] = []
        for piece in pieces:
            if piece.call is not None:
                found.append(("call", f"{piece.call.name} {piece.call.arguments}"))
            elif found and found[-1][0] == piece.kind:
                found[-1] = (piece.kind, found[-1][1] + piece.text)
            else:
                found.append((piece.kind, piece.text))
        assert found == expected, size


def test_no_request_breaks_it(app: FastAPI, client: TestClient) -> None:
    fuzz(app, client.request, FUZZ_EXAMPLES)
    assert client.get("/health").json() == {"status": "ok"}


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    llm = LLM(tiny_chat_model(), store="memory", memory=None, adapter="none", policy="full")
    turns: list[Any] = [{"role": "user", "content": "The boats stay in. " * 40}]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "cache_salt": "ann"}
    answers = []
    for salt in ("ann", "ann", "bob"):
        with (
            Sessions(llm.loaded, tmp_path / "kept", max_bytes=1 << 30, policy="full") as sessions,
            Engine(llm, memory="64MiB", sessions=sessions) as engine,
            TestClient(make_app(engine, ServerSettings(model_name="tiny"))) as ask,
        ):
            asked = {**body, "messages": turns, "cache_salt": salt}
            answers.append(ask.post("/v1/chat/completions", json=asked).json())
        if len(answers) == 1:
            said = answers[0]["choices"][0]["message"]
            turns += [{"role": "assistant", "content": said["content"]},
                      {"role": "user", "content": "Why?"}]  # fmt: skip
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 700  # of the first turn's prompt, a token a letter
    assert answers[1]["choices"] == answers[2]["choices"]
