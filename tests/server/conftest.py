"""A server of a tiny model behind a real socket, for all tests of the folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from penstock.documents.document_library import DocumentLibrary
from penstock.generation.engine import LLM
from penstock.generation.serving.engine import Engine
from penstock.server.app import make_app
from penstock.server.serving import bind, in_background
from penstock.server.settings import ServerSettings
from penstock.testing.tiny_chat import tiny_chat_model


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    llm = LLM(tiny_chat_model(positions=8192), store="memory", memory=None, adapter="none")
    library = DocumentLibrary(Path(tmp_path_factory.mktemp("library")))
    settings = ServerSettings(model_name="tiny", max_answer_tokens=64)
    with Engine(llm, memory="256MiB") as engine:
        made = make_app(engine, settings, library)
        yield made
        made.state.backend.shelf.close()


@pytest.fixture(scope="session")
def url(app: FastAPI) -> Iterator[str]:
    with bind("127.0.0.1", 0) as listening, in_background(app, listening) as where:
        yield where
