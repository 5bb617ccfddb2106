"""Requests near those that a server describes; `python -m tests.server.fuzz N` asks N."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.documents.document_library import DocumentLibrary
from penstock.generation.engine import LLM
from penstock.generation.serving.engine import Engine
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings
from penstock.testing.tiny_chat import tiny_chat_model

HELLO = [{"role": "user", "content": "Hello"}]
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=8), one, max_size=3),
    max_leaves=6,
)  # fmt: skip


def bodies(app: FastAPI) -> Any:
    """Requests near those that the description allows: fields of its schemas, other values."""
    described = app.openapi()
    schemas = described["components"]["schemas"]
    made = []
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            content = about.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            fields = schemas.get(name.rpartition("/")[2], {}).get("properties", {})
            valid: dict[str, Any] = {
                "messages": st.just(HELLO), "prompt": st.just("a"), "input": st.just("a"),
                "max_tokens": st.just(2), "max_output_tokens": st.just(2), "n": st.just(1),
                "max_completion_tokens": st.just(2), "text": JSON, "name": st.text(max_size=5),
            }  # fmt: skip
            values = {each: valid.get(each, JSON) | JSON for each in fields}
            body = st.fixed_dictionaries(
                {each: valid[each] for each in fields if each in valid and each != "text"},
                optional={each: values[each] for each in fields if each not in valid},
            )
            wild = st.fixed_dictionaries({}, optional=values) | JSON
            made.append(st.tuples(st.just(method), st.just(path), body | wild))
    return st.one_of(made)


def fuzz(app: FastAPI, ask: Callable[..., Any], examples: int) -> None:
    """Every answer is one that the API has, whatever was asked."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(bodies(app))
    def asked(request: tuple[str, str, Any]) -> None:
        method, path, body = request
        path = path.replace("{name}", "none").replace("{name:path}", "none")
        data = json.dumps(body).encode()
        sent = {} if method == "get" else {"content": data}
        answer = ask(method, path, headers={"Content-Type": "application/json"}, **sent)
        assert answer.status_code in (200, 201, 400, 404, 409, 429, 501), (request, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], request

    asked()


def main() -> None:
    """Ask as many as the command line says."""
    llm = LLM(tiny_chat_model(), store="memory", memory=None, adapter="none")
    limits = ServerSettings(model_name="tiny", max_answer_tokens=4)
    with tempfile.TemporaryDirectory() as folder, Engine(llm, memory="256MiB") as engine:
        app = make_app(engine, limits, DocumentLibrary(Path(folder) / "library"))
        with TestClient(app, raise_server_exceptions=False) as client:
            fuzz(app, client.request, int(sys.argv[1]))
        app.state.backend.shelf.close()


if __name__ == "__main__":
    main()
