"""`penstock calibrate` without arguments: texts that ship, an adapter that is found by itself."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock import KVSwap, SamplingParams, TieredCache
from penstock.cli.main import app
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.bench_model import ADAPTER_FILE as BESIDE
from penstock.evaluate.bench_model import open_model
from penstock.models.bundled_adapter import adapters_at_hand, calibrated_adapter, find_adapter
from penstock.models.calibrate import KEPT_TOKENS, _kept_windows, calibrate
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.testing.tiny_chat import tiny_chat_model
from penstock.tuner.shipped_texts import TEXTS, _dialogue, shipped_texts

TEXT = "The grass is green. The sky is blue. " * 20
POLICY = KVSwap(selected_tokens=64, window_tokens=16)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        yield home


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    """A model with an adapter beside it."""
    loaded = tiny_chat_model(folder=home / "model")
    calibrate(loaded.model, [torch.arange(3, 90)], rank=32, path=home / "model" / BESIDE)
    return home / "model"


@pytest.fixture(scope="module")
def document(home: Path, folder: Path) -> Path:
    """Stored before the model was calibrated."""
    path, settings = home / "document", DocumentSettings(store="memory")
    Document.create(str(folder), TEXT, path=path, policy=POLICY, settings=settings).close()
    return path


@pytest.fixture(scope="module")
def made(home: Path, folder: Path, document: Path) -> Path:
    """Where the adapter lies after a run without a text and without an output."""
    assert document.exists()
    done = run("calibrate", folder, "--window", 256)
    assert done.exit_code == 0, done.output
    assert "256 tokens of prose, 256 tokens of code, 256 tokens of dialogue" in done.stderr
    mark = fingerprint(load(folder).model)
    path = home / ".local" / "share" / "penstock" / "adapters" / f"{mark}.safetensors"
    assert str(path) in done.stderr
    return path


def test_it_is_found_by_itself(made: Path, folder: Path) -> None:
    mark = fingerprint(load(folder).model)
    assert calibrated_adapter(mark) == made
    found = find_adapter(mark, folder)
    assert found is not None
    assert (found.origin, found.tokens) == (str(made), 3 * 256)
    names = [Path(each.origin).name for each in adapters_at_hand(mark, folder)]
    assert names == [made.name, BESIDE]
    assert open_model(str(folder), max_positions=512).adapter.origin == str(made)


def test_the_report_says_which(made: Path, folder: Path) -> None:
    options = ("--prompt", TEXT, "--max-new-tokens", 2, "--memory", "320KiB", "--raw", "--json")
    for given, told in (((), True), (("--adapter", "none"), False)):
        done = run("generate", folder, *options, *given)
        assert done.exit_code == 0, done.output
        notices = json.loads(done.stdout)["notices"]
        assert any(str(made) in each and "768 calibration" in each for each in notices) == told


@pytest.mark.parametrize("none", ["none", Path("none")])
def test_none_is_made_from_the_prompt(made: Path, folder: Path, none: str | Path) -> None:
    model = load(folder).model
    assert made.exists()
    for adapter, is_ready in ((None, True), (none, False)):
        options: Any = {"max_tokens": 600, "adapter": adapter, "must_tier": True}
        with TieredCache(model, POLICY, store="memory", **options) as cache:
            assert (cache._settings.adapter is not None) == is_ready


def test_a_document_keeps_the_adapter_that_it_was_stored_with(
    document: Path, made: Path, folder: Path
) -> None:
    assert made.exists()
    settings = DocumentSettings(store="memory")
    with Document.open(str(folder), document, settings=settings) as opened:
        opened.ask([TEXT], SamplingParams(temperature=0, max_tokens=2))
        used = opened._opened.settings.adapter
    assert isinstance(used, LowRankAdapter)
    assert Path(used.origin).name == BESIDE


def test_it_replaces_what_it_wrote_and_nothing_else(made: Path, folder: Path) -> None:
    former = made.read_bytes()
    assert run("calibrate", folder, "--window", 128).exit_code == 0
    assert made.read_bytes() != former
    made.write_bytes(b"mine")
    assert run("calibrate", folder, "--window", 128).exit_code != 0
    assert made.read_bytes() == b"mine"
    made.write_bytes(former)


def test_the_texts_are_long_enough_and_named() -> None:
    kinds = shipped_texts(tiny_chat_model(ascii_alone=False), 8192)
    assert {kind: len(ids) for kind, ids in kinds.items()} == dict.fromkeys(
        ("prose", "code", "dialogue"), 8192
    )
    readme = (TEXTS / "README.md").read_text()
    for file in os.listdir(TEXTS):
        assert file == "README.md" or f"`{file}`" in readme
    assert "public domain" in readme


def test_a_dialogue_goes_through_the_chat_template() -> None:
    loaded = tiny_chat_model()
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    text = tokenizer.decode(shipped_texts(loaded, 600)["dialogue"])
    assert text.index("user") < text.index("assistant")
    tokenizer.chat_template = "{{ raise_exception('no talk') }}"
    plain = _dialogue(loaded)
    tokenizer.chat_template = None
    assert plain == _dialogue(loaded)
    with pytest.raises(Exception, match="without a tokenizer"):
        shipped_texts(LoadedModel(model=loaded.model, tokenizer=None, name="it"), 8)


def test_a_model_of_few_words_is_given_its_own_text() -> None:
    refused = run("calibrate", "recall")
    assert refused.exit_code != 0
    assert "unknown words to recall; give --text FILE" in refused.stderr


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([10], {0}), ([KEPT_TOKENS * 2], {0}), ([4096] * 3, {0, 1, 2}),
        ([100, 4096, 4096], {0, 1, 2}),
        ([8192] * 5, {0, 4}),
    ],
)  # fmt: skip
def test_windows_that_are_kept(tokens: list[int], kept: set[int]) -> None:
    found = _kept_windows(tokens)
    assert found == kept
    assert len(found) == 1 or sum(tokens[i] for i in found) <= KEPT_TOKENS
