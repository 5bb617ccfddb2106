"""Files of a document cut, lengthened, zeroed or forged: the right answer, or a typed error."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from transformers import PreTrainedModel

from penstock import ConfigError, KVSwap, SamplingParams
from penstock.core.errors import DocumentDamagedError, DocumentError
from penstock.documents import contents
from penstock.documents.document import Document
from penstock.documents.document_library import DocumentLibrary
from penstock.documents.settings import DocumentSettings
from penstock.storage.documents import DocumentWriter, StoredDocument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICY = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
GREEDY = SamplingParams(temperature=0, max_tokens=2)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)
KEY = bytes(range(32))
QUESTION = [5, 6, 7]
TEXT = torch.randint(3, VOCABULARY, (90,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


class Stored:
    """A stored document, and copies of it that a test may spoil."""

    def __init__(self, model: Any, root: Path, key: bytes | None) -> None:
        self.model, self.root, self.count = model, root, 0
        self.settings = dataclasses.replace(SETTINGS, key=key)
        self.path = root / "whole"
        Document.create(
            model, TEXT, self.path, policy=POLICY, memory=None, settings=self.settings
        ).close()
        self.answer = self.ask(self.copy())

    def copy(self) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.path, self.root / str(self.count)))

    def ask(self, path: Path) -> list[int]:
        with Document.open(self.model, path, settings=self.settings) as document:
            [output] = document.ask([QUESTION], GREEDY)
            self.was_mended = document.written_bytes > 0
            return output.token_ids

    def commit(self, path: Path, about: dict[str, Any] | None = None, **blobs: bytes) -> None:
        """A generation with other contents and seals that fit them."""
        with StoredDocument.open(path, key=self.settings.key) as stored:
            identity, known = stored.identity, about or stored.about
            kept = [name for name in stored.blob_names if name not in blobs]
        with DocumentWriter.extend(path, key=self.settings.key) as writer:
            writer.commit(identity=identity, about=known, blobs=blobs, keep_blobs=kept)


@pytest.fixture(scope="module", params=[None, KEY], ids=["plain", "encrypted"])
def stored(request: Any, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(model, tmp_path_factory.mktemp("documents"), request.param)


def spoil(path: Path, how: str, share: float) -> None:
    size = path.stat().st_size
    place = int(share * size)
    if how == "cut":
        os.truncate(path, place)
    elif how == "cut near the end":
        os.truncate(path, max(0, size - 1 - int(share * 4096)))
    elif how == "lengthened":
        with path.open("ab") as file:
            file.write(bytes(1 + place % 5000))
    else:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes(min(64, size - place)))


@settings(max_examples=10)
@given(
    which=st.integers(0, 99),
    how=st.sampled_from(["cut", "cut near the end", "lengthened", "zeroed"]),
    share=st.floats(0, 1),
)
def test_spoilt_files(stored: Stored, which: int, how: str, share: float) -> None:
    path = stored.copy()
    files = sorted(each for each in path.iterdir() if not each.name.startswith("lock"))
    spoil(files[which % len(files)], how, share)
    try:
        assert stored.ask(path) == stored.answer
        if stored.was_mended:
            assert stored.ask(path) == stored.answer
    except (DocumentError, DocumentDamagedError):
        pass
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("cut", [1, 511, 4095])
def test_a_cut_within_the_last_padding_can_be_asked(stored: Stored, cut: int) -> None:
    path = stored.copy()
    units = sorted(path.glob("kv-*.units"))[-1]
    os.truncate(units, units.stat().st_size - cut)
    assert stored.ask(path) == stored.answer
    with Document.open(stored.model, path, settings=stored.settings) as document:
        document.ask([QUESTION], GREEDY, keep=True)


Change = Callable[[dict[str, torch.Tensor]], Any]
CHANGES: dict[str, Change] = {
    "a short step": lambda state: state.update(step=state["step"][:1].clone()),
    "no step": lambda state: state.pop("step"),
    "a step of zero": lambda state: state["step"].zero_(),
    "a basis with NaN": lambda state: state["basis"].view(-1)[3:4].fill_(float("nan")),
    "a basis of integers": lambda state: state.update(basis=state["basis"].to(torch.int32)),
    "something more": lambda state: state.update(other=torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_none_has(stored: Stored, change: str) -> None:
    path = stored.copy()
    with StoredDocument.open(path, key=stored.settings.key) as document:
        state = load(document.blob("index-1"))
    CHANGES[change](state)
    blobs: Any = {"index-1": save(state)}
    stored.commit(path, **blobs)
    with pytest.raises(ConfigError, match="stored index"):
        stored.ask(path)


@pytest.mark.parametrize("blob", [b"", b"abc", np.full(12, 10**6, "<i8").tobytes()])
def test_a_table_of_units_that_none_has_is_made_again(stored: Stored, blob: bytes) -> None:
    path = stored.copy()
    stored.commit(path, groups=blob)
    assert stored.ask(path) == stored.answer


@pytest.mark.parametrize("ids", [[1, 2], [-1] * len(TEXT), [10**6] * len(TEXT)])
def test_tokens_that_no_text_has(stored: Stored, ids: list[int]) -> None:
    path = stored.copy()
    stored.commit(path, tokens=contents.tokens_blob(ids))
    with pytest.raises(DocumentDamagedError, match="tokens"):
        stored.ask(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", -1), ("tokens", 1e9), ("group_tokens", 0), ("pending", [-3]),
        ("pending", "abc"), ("policy_fields", []), ("has_index", 2), ("title", None),
        ("created", True), ("memory", [1]), ("name", 7),
    ],
)  # fmt: skip
def test_fields_that_no_document_has(stored: Stored, field: str, value: Any) -> None:
    path = stored.copy()
    with StoredDocument.open(path, key=stored.settings.key) as document:
        about = {**document.about, field: value}
    stored.commit(path, about=json.loads(json.dumps(about)))
    with pytest.raises(DocumentDamagedError, match="makes no sense"):
        stored.ask(path)


def test_a_document_of_before_says_no_name(stored: Stored) -> None:
    path = stored.copy()
    with StoredDocument.open(path, key=stored.settings.key) as document:
        about = {name: value for name, value in document.about.items() if name != "name"}
    stored.commit(path, about=about)
    assert stored.ask(path) == stored.answer


def test_folders_that_were_swapped(model: Any, tmp_path: Path) -> None:
    shelf = DocumentLibrary(tmp_path, dataclasses.replace(SETTINGS, key=KEY))
    for name in ("a", "b"):
        shelf.add(model, TEXT[::-1] if name == "b" else TEXT, name, policy=POLICY).document.close()
    for source, target in (("a", "c"), ("b", "a"), ("c", "b")):
        (tmp_path / source).rename(tmp_path / target)
    for name in ("a", "b"):
        with pytest.raises(DocumentError, match="was stored as"), shelf.open(name, model):
            pass
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    with shelf.open("a", model) as document:
        assert document.ask([QUESTION], GREEDY)
