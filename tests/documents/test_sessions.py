"""Sessions: a conversation goes on from what is stored of it, and from nobody else's."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.console import PlainConsole
from penstock.cli.served import kept_sessions
from penstock.documents.document import Document
from penstock.documents.document_library import DocumentLibrary
from penstock.documents.sessions import Sessions
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.generation.serving.engine import Engine
from penstock.generation.serving.events import Finished
from penstock.generation.serving.request import Request
from penstock.storage.documents import remove, size_bytes
from penstock.testing.tiny_chat import tiny_chat_model

KEY = bytes(range(32))
FIRST = [3 + place * place % 89 for place in range(800)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_chat_model(), policy="kvswap", store="memory", adapter="none")


def sessions(llm: LLM, folder: Path, max_bytes: int = 1 << 30) -> Sessions:
    settings = DocumentSettings(key=KEY, store="memory", adapter="none")
    return Sessions(llm.loaded, folder, max_bytes=max_bytes, settings=settings)


def ask(engine: Engine, prompt: list[int], salt: str = "") -> Finished:
    return engine.submit(Request(prompt=prompt, sampling=GREEDY, cache_salt=salt)).result()


@pytest.mark.parametrize("memory", ["64MiB", "4MiB"], ids=["resident", "tiered"])
def test_a_conversation_goes_on_where_it_was(llm: LLM, tmp_path: Path, memory: str) -> None:
    with Engine(llm, memory=memory) as engine:
        alone = ask(engine, FIRST)
        second = [*FIRST, *alone.outputs[0].token_ids, *range(20, 60)]
        fresh = ask(engine, second)
        edited = [*FIRST[:600], *range(40, 90)]
        fresh_edited = ask(engine, edited)
    with sessions(llm, tmp_path) as kept, Engine(llm, memory=memory, sessions=kept) as engine:
        assert ask(engine, FIRST).usage.cached_tokens == 0
        further = ask(engine, second)
        assert further.usage.cached_tokens == len(FIRST) + 5
        if memory == "64MiB":  # all is attended to; else what is chosen depends on the index's fit
            assert further.outputs[0].token_ids == fresh.outputs[0].token_ids
        other = ask(engine, second, salt="another user's")
        assert other.usage.cached_tokens == 0
        again = ask(engine, edited)
        assert again.usage.cached_tokens == 600
        if memory == "64MiB":
            assert again.outputs[0].token_ids == fresh_edited.outputs[0].token_ids
        else:
            assert again.run is not None
            assert again.run.stats.decode.units_wanted > 0
        before = ask(engine, third := [*second, *further.outputs[0].token_ids, 7, 8, 9])
    with sessions(llm, tmp_path) as kept:  # after a restart
        assert len(kept) == 3, "the second turn has the first one's place"
        with Engine(llm, memory=memory, sessions=kept) as engine:
            later = ask(engine, [*third, *before.outputs[0].token_ids, 7, 8, 9])
            assert later.usage.cached_tokens == len(third) + 5
        assert engine.stats().used_bytes == 0


def test_two_servers_share_a_folder(llm: LLM, tmp_path: Path) -> None:
    with (
        sessions(llm, tmp_path) as one, sessions(llm, tmp_path) as other,
        Engine(llm, memory="64MiB", sessions=one) as first,
        Engine(llm, memory="64MiB", sessions=other) as second,
    ):  # fmt: skip
        ask(first, FIRST)
        again = ask(first, FIRST).usage  # waits for what is stored
        assert again.cached_tokens == len(FIRST) - 2
        turn, fork = [*FIRST, *range(20, 60)], [*FIRST, *range(30, 80)]
        assert ask(second, turn).usage.cached_tokens == len(FIRST)
        ask(second, turn)
        # The first knows the conversation as it was before the other's turn, and leaves that be.
        assert ask(first, fork).usage.cached_tokens == len(FIRST)
        for engine, asked in ((first, turn), (second, fork)):
            assert ask(engine, [*asked, 7, 8]).usage.cached_tokens == len(asked)


def test_the_oldest_go_and_the_damaged_are_read_anew(llm: LLM, tmp_path: Path) -> None:
    with sessions(llm, tmp_path) as kept, Engine(llm, memory="64MiB", sessions=kept) as engine:
        ask(engine, FIRST)
    one = kept.num_bytes
    with (
        sessions(llm, tmp_path, max_bytes=one * 5 // 2) as kept,
        Engine(llm, memory="64MiB", sessions=kept) as engine,
    ):
        for salt in ("a", "b"):
            ask(engine, FIRST, salt)
        ask(engine, FIRST, "a")  # waits for what is stored; now "b" is the oldest
    assert kept.num_bytes <= one * 5 // 2
    with (
        sessions(llm, tmp_path, max_bytes=one * 5 // 2) as kept,
        Engine(llm, memory="64MiB", sessions=kept) as engine,
    ):
        ask(engine, FIRST, "c")
    with sessions(llm, tmp_path) as kept, Engine(llm, memory="64MiB", sessions=kept) as engine:
        assert ask(engine, FIRST, "b").usage.cached_tokens == 0
        assert ask(engine, [*FIRST, 5, 6], "a").usage.cached_tokens == len(FIRST)
        for path in tmp_path.rglob("*"):
            if path.is_file():
                path.write_bytes(bytes(path.stat().st_size))
        assert ask(engine, [*FIRST, 6, 7], "a").usage.cached_tokens == 0


def test_others_do_not_wait_for_a_write(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, store = threading.Event(), Sessions._store

    def late(self: Sessions, *given: Any) -> None:
        assert go_on.wait(60)
        store(self, *given)

    monkeypatch.setattr(Sessions, "_store", late)
    with sessions(llm, tmp_path) as kept, Engine(llm, memory="64MiB", sessions=kept) as engine:
        ask(engine, FIRST)
        turn = engine.submit(Request(prompt=[*FIRST, 5, 6], sampling=GREEDY))
        assert ask(engine, FIRST[:40], salt="another user's").usage.new_tokens > 0
        assert engine.stats().waiting == 1
        go_on.set()
        assert turn.result().usage.cached_tokens == len(FIRST)


@pytest.mark.parametrize("memory", ["64MiB", "4MiB"], ids=["resident", "tiered"])
def test_a_conversation_behind_a_document_stores_what_follows_it(
    llm: LLM, tmp_path: Path, memory: str
) -> None:
    text, turn = FIRST[:798], [3 + place * 7 % 89 for place in range(300)]
    plain = DocumentSettings(store="memory", adapter="none")
    kept_in, place = tmp_path / "kept", tmp_path / "document"
    own = LLM(llm.loaded, store="memory", adapter="none")  # the document's policy and index

    def asked(prompt: list[int], salt: str = "", *, is_kept: bool = True) -> Finished:
        """Of a server that has just started."""
        with (
            Document.open(llm.loaded, place, settings=plain) as document,
            sessions(llm, kept_in) as kept,
            Engine(own, memory=memory, sessions=kept if is_kept else None) as engine,
        ):
            request = Request(prompt=prompt, sampling=GREEDY, document=document, cache_salt=salt)
            return engine.submit(request).result()

    is_resident = memory == "64MiB"
    for _ in range(2 if is_resident else 1):
        Document.create(llm.loaded, text, place, memory="4MiB", settings=plain).close()
        first = asked(turn)
        assert first.usage.cached_tokens == len(text), "not of the document that was there before"
        second = [*turn, *first.outputs[0].token_ids, *range(20, 60)]
        further = asked(second)
        assert further.usage.cached_tokens == len(text) + len(turn) + 5
        edited = [*second[:250], *range(30, 50)]
        again = asked(edited)
        assert again.usage.cached_tokens == len(text) + 250
        for prompt, made in ((second, further), (edited, again)) if is_resident else ():
            fresh = asked(prompt, is_kept=False)
            assert made.outputs[0].token_ids == fresh.outputs[0].token_ids
        third = [*second, *further.outputs[0].token_ids, 7, 8]
        assert asked(third).usage.cached_tokens == len(text) + len(second) + 5
        assert asked(third, "another user's").usage.cached_tokens == len(text)
        stored = size_bytes(place)
        with sessions(llm, kept_in) as kept:
            assert len(kept) > 2
            assert kept.num_bytes < stored * len(kept) / 2, "none with the document"
        remove(place)


def test_a_server_seals_them_with_a_key_of_its_own(llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    tokens = np.asarray(FIRST[:64], dtype="<i4").tobytes()
    with (
        Sessions(llm.loaded, folder, max_bytes=1 << 30) as plain,
        Engine(llm, memory="64MiB", sessions=plain) as engine,
    ):
        ask(engine, FIRST)
    [unsealed] = folder.iterdir()
    assert any(tokens in each.read_bytes() for each in unsealed.iterdir())
    (folder / "notes").mkdir()
    shelf = DocumentLibrary(tmp_path / "library", DocumentSettings(adapter="none"))
    for more, cached, notices in ([], 0, 1), ([5, 6], len(FIRST), 0):
        with (
            kept_sessions(PlainConsole(), llm.loaded, shelf, folder, "1GiB", None) as kept,
            Engine(llm, memory="64MiB", sessions=kept) as engine,
        ):
            assert kept is not None
            assert len(kept.notices) == notices
            assert ask(engine, [*FIRST, *more]).usage.cached_tokens == cached
    assert not unsealed.exists()
    assert (folder / "notes").is_dir()
    assert not any(tokens in each.read_bytes() for each in folder.rglob("*") if each.is_file())
    key = tmp_path / "kept.key"
    assert os.name == "nt" or key.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"kept", "kept.key", "library"}
    key.unlink()
    with kept_sessions(PlainConsole(), llm.loaded, shelf, folder, "1GiB", None) as kept:
        assert kept is not None
        assert len(kept) == 0
        assert "another key" in kept.notices[0]


def test_damage_that_an_answer_finds_costs_a_prefill(llm: LLM, tmp_path: Path) -> None:
    second = [*FIRST, *range(20, 60)]
    with sessions(llm, tmp_path) as kept, Engine(llm, memory="4MiB", sessions=kept) as engine:
        ask(engine, FIRST)
        ask(engine, FIRST[:40])  # waits for what is stored
        for path in tmp_path.rglob("kv-*"):
            data = bytearray(path.read_bytes())
            middle = slice(len(data) // 4, len(data) // 2)  # opening reads the ends alone
            data[middle] = bytes(len(data) // 4)
            path.write_bytes(data)
        for cached in (0, len(second) - 2):
            assert ask(engine, second).usage.cached_tokens == cached
        assert not path.exists(), "it is removed"
    assert engine.stats().used_bytes == 0
