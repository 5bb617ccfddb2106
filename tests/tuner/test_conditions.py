"""What a tuning's journal holds for: no other adapter, dtype, table or machine."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.models.bundled_adapter import find_adapter
from penstock.models.loader import LoadedModel, load
from penstock.storage import open_files
from penstock.tuner import conditions as module
from penstock.tuner.conditions import circumstances
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
    monkeypatch.setattr(module, "cpu_name", lambda: "another")
    assert about(recall)["machine"] != mine["machine"]


def test_compiled_kernels_count(recall: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []
    for there in ((), ("select_groups",), ("select_groups", "low_rank")):
        monkeypatch.setattr(module, "kernel", lambda name, there=there: name in there or None)
        heads.append(about(recall)["machine"])
    assert [head["compiled"] for head in heads] == [
        [],
        ["select_groups"],
        ["select_groups", "low_rank"],
    ]


def test_an_adapter_beside_the_model_counts(
    recall: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = find_adapter(about(recall)["fingerprint"])
    assert shipped is not None
    first, last = shipped.layers[0], shipped.layers[1:]
    other = replace(shipped, layers=[replace(first, peak=2 * first.peak), *last])
    heads = []
    for found in (shipped, other, None):
        monkeypatch.setattr(module, "find_adapter", lambda *_, found=found: found)
        assert about(recall) == about(recall)
        heads.append(about(recall))
    assert heads[0] != heads[1] != heads[2] != heads[0]


def test_the_folder_that_a_disk_leads_to_counts(
    recall: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "other"):
        (place / "kv").mkdir(parents=True)
    here, whole = about(recall, disk="kv"), about(recall, disk=str(tmp_path / "kv"))
    assert here["folder"] == whole["folder"]
    monkeypatch.chdir(tmp_path / "other")
    assert about(recall, disk="kv") != here
    for simulated in ("nvme", "memory"):
        assert about(recall, disk=simulated)["folder"] is None
    heads = []
    for folder in ("kv", "other"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
        monkeypatch.setattr(open_files, "_is_on_disk", lambda _: True)
        heads.append(about(recall))
    assert heads[0] != heads[1], "auto led elsewhere"
