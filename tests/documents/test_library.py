"""A shelf: what texts share is found, limits hold, and what is asked and written is noted."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock import ConfigError, KVSwap, PromptError, SamplingParams
from penstock.core.errors import (
    BudgetError,
    DocumentKeyError,
    DocumentMismatchError,
    StoreFullError,
)
from penstock.documents import document_library as module
from penstock.documents.document_library import Added, DocumentLibrary
from penstock.documents.settings import DocumentSettings
from penstock.methods.baselines.h2o import H2O
from penstock.storage.documents.document_library import Entry
from penstock.storage.documents.quota import LibrarySettings
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICY = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
GREEDY = SamplingParams(temperature=0, max_tokens=3)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


TEXT = ids(163)
QUESTION = ids(9, seed=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def shelf(tmp_path: Path) -> DocumentLibrary:
    return DocumentLibrary(tmp_path / "library", SETTINGS)


def add(
    shelf: DocumentLibrary, model: Any, name: str, text: list[int] = TEXT, **options: Any
) -> Added:
    """Add a document and close it."""
    added = shelf.add(model, text, name, policy=POLICY, memory=None, **options)
    added.document.close()
    return added


def add_alone(shelf: DocumentLibrary, model: Any, *names: str) -> None:
    for seed, name in enumerate(names):
        add(shelf, model, name, ids(len(TEXT), seed=50 + seed), shares=False)


def ask(shelf: DocumentLibrary, model: Any, name: str, **options: Any) -> list[int]:
    with shelf.open(name, model) as document:
        [answer] = document.ask([QUESTION], GREEDY, **options)
    return answer.token_ids


def entries(shelf: DocumentLibrary) -> dict[str, Entry]:
    return {entry.name: entry for entry in shelf.documents.entries()}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# What texts share ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_three(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stays as it is."""
    shelf = DocumentLibrary(tmp_path_factory.mktemp("three"), SETTINGS)
    for name, shared in (("forty", 40), ("most", 120), ("some", 80)):
        add(shelf, model, name, [*TEXT[:shared], *ids(30, seed=shared)], shares=False)
    return shelf.documents.root


@pytest.fixture
def three(stored_three: Path, tmp_path: Path) -> DocumentLibrary:
    """Texts that begin with 40, 120 and 80 tokens of `TEXT`."""
    return DocumentLibrary(shutil.copytree(stored_three, tmp_path / "library"), SETTINGS)


def test_the_longest_beginning_is_taken(three: DocumentLibrary, model: PreTrainedModel) -> None:
    seen: list[int] = []
    added = add(three, model, "new", on_tokens=lambda done, _: seen.append(done))
    assert (added.shared_with, added.shared_tokens, seen[0]) == ("most", 120, 120)
    alone = add(three, model, "alone", shares=False, on_tokens=lambda done, _: seen.append(done))
    assert (alone.shared_with, alone.shared_tokens) == (None, 0)
    assert seen[-4:] == [0, 64, 128, 163]
    assert ask(three, model, "new") == ask(three, model, "alone")
    for name in entries(three):
        three.documents.remove(name)  # nobody has kept one open


@pytest.mark.parametrize("damaged", ["manifest.json", "blob-*-tokens", "seals-*", "lock"])
def test_a_damaged_neighbour_is_passed_over(
    damaged: str, three: DocumentLibrary, model: PreTrainedModel
) -> None:
    [path] = (three.documents.root / "most").glob(damaged)
    if damaged == "lock":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)
    added = add(three, model, "new")
    if damaged != "lock":
        assert (added.shared_with, added.shared_tokens) == ("some", 80)
    three.documents.remove("most")


def test_a_neighbour_with_damaged_units_is_no_help(
    three: DocumentLibrary, model: PreTrainedModel
) -> None:
    flip(three.documents.root / "most" / "kv-1.units", 2 * 4096 + 5)
    added = add(three, model, "new")
    assert (added.shared_with, added.shared_tokens) == (None, 0)
    add(three, model, "alone", shares=False)
    assert ask(three, model, "new") == ask(three, model, "alone")


def test_too_little_is_not_shared(shelf: DocumentLibrary, model: PreTrainedModel) -> None:
    add(shelf, model, "seven", [*TEXT[:7], *ids(30, seed=7)])
    assert add(shelf, model, "new").shared_with is None


def test_another_models_documents_are_passed_over(
    shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    other = tiny_model("llama")
    changed: Any = other
    changed.model.layers[1].mlp.down_proj.weight.data.add_(0.25)
    add(shelf, other, "other")
    assert add(shelf, model, "new").shared_with is None
    with pytest.raises(DocumentMismatchError, match="weights"), shelf.open("other", model):
        pass


def test_encrypted_ones_are_for_who_has_the_key(
    shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    pytest.importorskip("cryptography")
    secret = DocumentLibrary(shelf.documents.root, replace(SETTINGS, key=bytes(range(32))))
    add(secret, model, "secret")
    assert add(shelf, model, "plain").shared_with is None
    assert add(secret, model, "again").shared_with == "secret"
    with pytest.raises(DocumentKeyError, match="encrypted; give its key"):
        shelf.model_of("secret")
    assert secret.model_of("secret") == shelf.model_of("plain")


# Limits -------------------------------------------------------------------------------------------


def limit_disk(shelf: DocumentLibrary, spare_bytes: int) -> None:
    used = sum(entry.size_bytes for entry in entries(shelf).values())
    shelf.documents.set_limits(LibrarySettings(max_disk_bytes=used + spare_bytes))


@pytest.fixture(scope="module")
def stored_asked(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stays as it is."""
    shelf = DocumentLibrary(tmp_path_factory.mktemp("asked"), SETTINGS)
    add_alone(shelf, model, "a", "b", "c")
    for name in "bca":
        ask(shelf, model, name)
    limit_disk(shelf, entries(shelf)["a"].size_bytes // 2)
    return shelf.documents.root


@pytest.fixture
def asked(stored_asked: Path, tmp_path: Path) -> DocumentLibrary:
    """Three documents, asked in another order than they were added, and room for half of one."""
    return DocumentLibrary(shutil.copytree(stored_asked, tmp_path / "library"), SETTINGS)


def test_what_was_asked_least_recently_goes(asked: DocumentLibrary, model: PreTrainedModel) -> None:
    assert add(asked, model, "d", shares=False).evicted == ["b"]
    assert add(asked, model, "e", shares=False).evicted == ["c"]
    assert add(asked, model, "f", shares=False).evicted == ["a"]
    assert add(asked, model, "g", shares=False).evicted == ["d"], "never asked, the oldest"
    assert sorted(entries(asked)) == ["e", "f", "g"]
    used = sum(entry.size_bytes for entry in entries(asked).values())
    assert used <= (asked.documents.settings.max_disk_bytes or 0)


def test_one_that_is_open_stays(asked: DocumentLibrary, model: PreTrainedModel) -> None:
    with asked.open("b", model) as document:
        assert add(asked, model, "d", shares=False).evicted == ["c"]
        assert document.ask([QUESTION], GREEDY)
    seen: list[int] = []
    with (
        asked.open("a", model),
        asked.open("b", model),
        asked.open("d", model),
        pytest.raises(StoreFullError, match="in use"),
    ):
        add(asked, model, "e", shares=False, on_tokens=lambda done, _: seen.append(done))
    assert not seen, "refused before prefill"
    assert sorted(entries(asked)) == ["a", "b", "d"]


def test_what_it_shares_with_stays_where_there_is_room_for_both(
    asked: DocumentLibrary, model: PreTrainedModel
) -> None:
    added = add(asked, model, "d", ids(len(TEXT), seed=51))  # b's text, the first to go
    assert (added.shared_with, added.evicted) == ("b", ["c"])


def test_what_it_shares_with_goes_where_there_is_no_room_for_both(
    shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    add(shelf, model, "old")
    limit_disk(shelf, entries(shelf)["old"].size_bytes // 2)
    added = add(shelf, model, "new", [*TEXT, *QUESTION])
    assert (added.shared_with, added.shared_tokens, added.evicted) == (None, 0, ["old"])


def test_what_turns_out_too_large_is_not_kept(
    shelf: DocumentLibrary, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_need_bytes", lambda *_: 1)
    shelf.documents.set_limits(LibrarySettings(max_disk_bytes=10_000))
    with pytest.raises(StoreFullError, match="no room"):
        add(shelf, model, "new")
    assert not entries(shelf)
    assert shelf.documents.write_budget.today_bytes > 10_000, "it was written all the same"


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def test_nothing_goes_before_everything_is_prefilled(
    asked: DocumentLibrary, model: PreTrainedModel
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert sorted(entries(asked)) == ["a", "b", "c", "d"]
        if done == total:
            raise Interrupted

    removed: list[str] = []
    failures: list[tuple[type[Exception], Any]] = [
        (Interrupted, {"on_tokens": interrupt}),
        (ConfigError, {"policy": H2O()}),
        (BudgetError, {"memory": "4KiB"}),
    ]
    for error, options in failures:
        wanted = {"policy": POLICY, "memory": None, "shares": False, **options}
        with pytest.raises(error):
            asked.add(model, TEXT, "d", on_removed=removed.append, **wanted)
        assert sorted(entries(asked)) == ["a", "b", "c"], error
    assert removed == []


def test_what_went_is_told_where_storing_fails(
    asked: DocumentLibrary, model: PreTrainedModel
) -> None:
    removed: list[str] = []

    def fail(done: int, total: int) -> None:
        assert removed == ["b"]
        raise Interrupted

    with pytest.raises(Interrupted):
        add(asked, model, "d", shares=False, on_bytes=fail, on_removed=removed.append)
    assert (removed, sorted(entries(asked))) == (["b"], ["a", "c"])


def test_the_days_writes_are_refused_before_prefill(
    shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    add(shelf, model, "first")
    written = shelf.documents.write_budget.today_bytes
    shelf.documents.set_limits(LibrarySettings(writes_per_day_bytes=int(1.5 * written)))
    seen: list[int] = []
    with pytest.raises(ConfigError, match="the day's budget"):
        add(shelf, model, "second", on_tokens=lambda done, _: seen.append(done))
    assert not seen
    assert sorted(entries(shelf)) == ["first"]
    assert shelf.documents.write_budget.today_bytes == written


# Names, and what is noted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "a document 'taken' already"),
        (lambda path: path.mkdir(), "a document 'taken' already"),
        (lambda path: path.write_text(""), "not a folder"),
        (lambda path: path.symlink_to("/"), "a symbolic link"),
    ],
    ids=["document", "folder", "file", "link"],
)
def test_names_that_are_taken(
    make: Callable[[Path], None], words: str, shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    make(shelf.documents.root / "taken")
    if not (shelf.documents.root / "taken").exists():
        add(shelf, model, "taken")
    with pytest.raises(ConfigError, match=words):
        add(shelf, model, "taken")
    with pytest.raises(ConfigError, match="cannot be a document's name"):
        add(shelf, model, "../taken")


def test_what_is_asked_and_written_is_noted(shelf: DocumentLibrary, model: PreTrainedModel) -> None:
    added = add(shelf, model, "new")
    first = entries(shelf)["new"]
    assert (first.asks, first.last_asked) == (0, None)
    assert first.written_bytes == added.document.written_bytes >= 3 * 21 * 4096
    ask(shelf, model, "new")
    plain = entries(shelf)["new"]
    assert plain.asks == 1
    assert plain.last_asked is not None
    assert plain.written_bytes == first.written_bytes, "a question alone writes nothing"
    ask(shelf, model, "new", keep=True)
    kept = entries(shelf)["new"]
    assert (kept.asks, kept.generation) == (2, 2)
    assert kept.last_asked is not None
    assert kept.last_asked > plain.last_asked
    assert kept.written_bytes > plain.written_bytes
    assert shelf.documents.write_budget.total_bytes == kept.written_bytes
    with pytest.raises(ConfigError, match="there is no document 'old'"), shelf.open("old", model):
        pass


def test_what_a_failed_call_wrote_is_noted(shelf: DocumentLibrary, model: PreTrainedModel) -> None:
    add(shelf, model, "new")
    written = entries(shelf)["new"].written_bytes
    with shelf.open("new", model) as document:
        document.ask([QUESTION], GREEDY, keep=True)
        with pytest.raises(PromptError, match="empty"):
            document.ask([[]], GREEDY)
    assert entries(shelf)["new"].written_bytes > written


def test_keeping_holds_to_the_limits_too(shelf: DocumentLibrary, model: PreTrainedModel) -> None:
    add_alone(shelf, model, "old", "chat")
    held = sum(entry.size_bytes for entry in shelf.documents.entries())
    assert shelf.require_room("chat", 100) == []
    shelf.documents.set_limits(LibrarySettings(max_disk_bytes=held))
    assert shelf.require_room("chat", 100) == ["old"]
    assert set(entries(shelf)) == {"chat"}
    shelf.documents.set_limits(LibrarySettings(writes_per_day_bytes=1))
    with pytest.raises(ConfigError, match="day's budget"):
        shelf.require_room("chat", 100)
    with pytest.raises(ConfigError, match="no document"):
        shelf.require_room("old", 100)


def test_a_missing_file_of_units_is_mended(shelf: DocumentLibrary, model: PreTrainedModel) -> None:
    add(shelf, model, "one")
    expected = ask(shelf, model, "one")
    (shelf.documents.folder("one") / "kv-1.units").unlink()
    with shelf.open("one", model) as document:
        [answer] = document.ask([QUESTION], GREEDY)
    assert answer.token_ids == expected
    assert answer.run.recomputed_tokens == len(TEXT)


def test_opening_for_something_else_is_no_asking(
    shelf: DocumentLibrary, model: PreTrainedModel
) -> None:
    add(shelf, model, "one")
    with shelf.open("one", model, asks=False) as document:
        assert not document.verify()
    assert entries(shelf)["one"].asks == 0
