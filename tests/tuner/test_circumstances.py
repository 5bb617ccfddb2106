"""What a tuning's journal holds for: no other adapter, dtype, table or machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.models.loader import LoadedModel, load
from penstock.tuner import circumstances as module
from penstock.tuner.circumstances import circumstances
from penstock.tuner.lookup_tables import shipped_tables

PIECES = [torch.arange(5), torch.arange(3)]


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return load("recall")


def about(loaded: LoadedModel, pieces: Any = PIECES, **given: Any) -> dict[str, Any]:
    given = {"adapter": None, "tables": None, "disk": "auto", **given}
    return circumstances(loaded, pieces, **given)


def test_the_same_again(recall: LoadedModel) -> None:
    assert about(recall) == about(recall)
    assert about(recall, [PIECES[0]]) != about(recall)
    assert about(recall, disk="nvme") != about(recall)


def test_files_are_told_apart_by_what_they_hold(recall: LoadedModel, tmp_path: Path) -> None:
    given = tmp_path / "adapter.safetensors"
    given.write_bytes(b"one")
    for name in ("adapter", "tables"):
        first = about(recall, **{name: given})
        assert first != about(recall)
        assert first == about(recall, **{name: str(given)})
        given.write_bytes(given.read_bytes() + b"more")
        assert first != about(recall, **{name: given})
        assert about(recall, **{name: tmp_path / "none"})[name] == "unreadable"


def test_tables_are_told_apart(recall: LoadedModel) -> None:
    found = shipped_tables(about(recall)["fingerprint"])
    assert found is not None
    other = replace(found, tokens=found.tokens + 1)
    assert about(recall, tables=found) == about(recall, tables=found)
    assert about(recall, tables=found) != about(recall, tables=other)


def test_dtype_and_machine_count(recall: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = about(recall)
    assert about(load("recall", dtype="float32")) != mine
    monkeypatch.setattr(module, "processor_name", lambda: "another")
    assert about(recall)["machine"] != mine["machine"]
