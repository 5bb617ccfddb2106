"""Lookup tables: measured, kept, read back, and read between the lines."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import ConfigError, PromptError, StorageError
from penstock.engine.adapter import LowRankAdapter
from penstock.methods import KVSwap
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.tuner import build_tables as building
from penstock.tuner.build_tables import build_tables
from penstock.tuner.calibration_texts import calibration_tokens
from penstock.tuner.fidelity import Reference
from penstock.tuner.lookup_tables import (
    CAPACITIES,
    LookupTables,
    TableEntry,
    interpolated,
    shipped_tables,
)

FORCED = 8


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("recall")


def entry(group: int, selected: int, rank: int, bits: int, kl: float, reuse: float) -> TableEntry:
    return TableEntry(
        group_tokens=group, selected_tokens=selected, rank=rank, index_bits=bits, kl=kl,
        kl_p90=2 * kl, agreement=0.9, reuse=tuple(min(1.0, reuse * c) for c in CAPACITIES),
    )  # fmt: skip


@pytest.fixture
def tables() -> LookupTables:
    entries = (
        entry(4, 400, 48, 8, 0.01, 0.3),
        entry(16, 400, 48, 8, 0.05, 0.2),
        entry(4, 100, 48, 8, 0.03, 0.4),
        entry(16, 100, 48, 8, 0.07, 0.1),
        entry(4, 400, 16, 8, 0.21, 0.9),
        entry(4, 400, 48, 4, 0.02, 0.9),
        entry(4, 400, 16, 4, 0.41, 0.9),
    )
    return LookupTables(
        model="m", fingerprint="f", tokens=1000, texts="two of 1,000 tokens", entries=entries
    )


def test_measured_values_are_given_back(tables: LookupTables) -> None:
    assert tables.reuse_rate(4, 400, 400) == pytest.approx(0.3)
    assert tables.reuse_rate(16, 100, 200) == pytest.approx(0.2)
    assert tables.kl(4, 400, 48, 8) == pytest.approx(0.01)
    assert tables.kl(16, 100, 48, 8) == pytest.approx(0.07)
    assert tables.kl(4, 400, 16, 4) == pytest.approx(0.41)


def test_in_between_and_outside(tables: LookupTables) -> None:
    assert tables.reuse_rate(4, 400, 500) == pytest.approx(0.3 * 1.25), "in capacity"
    assert tables.reuse_rate(8, 400, 400) == pytest.approx(0.25), "in the group's logarithm"
    assert tables.reuse_rate(4, 200, 200) == pytest.approx(0.35), "in that of the selection"
    assert tables.reuse_rate(1, 4000, 4000) == pytest.approx(0.3), "the nearest outside"
    assert tables.reuse_rate(4, 400, 10**6) == pytest.approx(1.0)
    assert tables.reuse_rate(4, 400, 399) == 0.0, "less than one selection is no reuse"
    assert tables.kl(4, 400, 48, 16) == tables.kl(4, 400, 48, 8)
    assert tables.kl(4, 400, 200, 8) == pytest.approx(0.01)
    middle = interpolated({(16, 8): 0.21, (48, 8): 0.01}, round(16 * sqrt(3)), 8)
    assert middle == pytest.approx(0.11, abs=0.005)


def test_changes_add_up(tables: LookupTables) -> None:
    assert tables.kl(16, 400, 16, 8) == pytest.approx(0.05 + 0.21 - 0.01)
    better = replace(tables, entries=(replace(tables.entries[0], kl=0.5), *tables.entries[1:]))
    assert better.kl(16, 100, 48, 4) == 0.0, "never below zero"


def test_files(tables: LookupTables, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    tables.save(path)
    assert LookupTables.load(path) == tables
    with pytest.raises(StorageError, match="cannot write"):
        tables.save(tmp_path)


def spoilt(content: dict[str, Any]) -> list[object]:
    first, *others = content["entries"]
    return [
        [],
        {**content, "format": "penstock-tables-0"},
        {k: v for k, v in content.items() if k != "tokens"},
        {**content, "entries": []},
        {**content, "entries": [{**first, "kl": "low"}, *others]},
        {**content, "entries": [{**first, "reuse": [0.5]}, *others]},
        {**content, "entries": [{k: v for k, v in first.items() if k != "rank"}, *others]},
        {**content, "entries": [first, *others[:2], *others[3:]]},
        {**content, "entries": [first, *others[:-1]]},
        {**content, "entries": [{**each, "group_tokens": 0} for each in (first, *others)]},
        {**content, "entries": [{**first, "rank": -48}, *others]},
    ]


@pytest.mark.parametrize("which", range(11))
def test_other_files_are_refused(tables: LookupTables, tmp_path: Path, which: int) -> None:
    path = tmp_path / "tables.json"
    tables.save(path)
    path.write_text(json.dumps(spoilt(json.loads(path.read_text()))[which]))
    with pytest.raises(ConfigError, match="make them again") as error:
        LookupTables.load(path)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    for name in ("none.json", "text.json"):
        with pytest.raises(ConfigError, match="cannot read the lookup tables"):
            LookupTables.load(tmp_path / name)


@pytest.mark.slow
def test_measuring(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in (
        ("GROUPS", (4, 16)), ("SELECTIONS", (200, 100, 800)), ("RANKS", (24, 2, 999)),
        ("BITS", (8,)),
    ):  # fmt: skip
        monkeypatch.setattr(building, name, values)
    [text] = calibration_tokens(loaded, [], tokens=1024, forced=FORCED)[1:2]
    token_ids = [text[-640:]]
    seen: list[tuple[int, int, str]] = []
    tables = build_tables(
        loaded, token_ids, forced=FORCED, texts="a document",
        progress=lambda *args: seen.append(args),
    )  # fmt: skip
    keys = [(e.group_tokens, e.selected_tokens, e.rank, e.index_bits) for e in tables.entries]
    # 800 tokens are too many for these texts, and 999 components for the adapter.
    assert keys == [(4, 200, 24, 8), (4, 100, 24, 8), (16, 200, 24, 8), (16, 100, 24, 8),
                    (4, 200, 2, 8)]  # fmt: skip
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4, 5, 6]
    assert {total for _, total, _ in seen} == {6}
    assert tables.fingerprint == fingerprint(loaded.model)
    assert tables.tokens == max(len(ids) for ids in token_ids)
    first = tables.entries[0]
    policy = KVSwap(group_tokens=4, selected_tokens=200, reuse_tokens=200, rank=24, index_bits=8)
    found = Reference(loaded.model, token_ids, forced=FORCED).measure(policy, memory=None)
    assert first.kl == pytest.approx(found.kl, abs=1e-6)
    assert first.reuse[0] == pytest.approx(found.hit_rate, abs=1e-6)
    assert list(first.reuse) == sorted(first.reuse)
    assert tables.entries[-1].kl > first.kl


def test_texts_must_be_long_enough(loaded: LoadedModel) -> None:
    with pytest.raises(PromptError, match=r"has 142 tokens.*needs at least 200"):
        build_tables(loaded, [torch.ones(150, dtype=torch.int64)], forced=FORCED, texts="")
    with pytest.raises(PromptError, match="has 0 tokens"):
        build_tables(loaded, [], forced=FORCED, texts="")


def test_the_bundled_models_tables(loaded: LoadedModel) -> None:
    own = fingerprint(loaded.model)
    tables = shipped_tables(own)
    assert tables is not None
    assert shipped_tables("another") is None
    adapter = find_adapter(own)
    assert isinstance(adapter, LowRankAdapter)
    assert max(e.rank for e in tables.entries) <= adapter.rank
    # More slots hold more, larger groups and fewer components are no better.
    assert 0 < tables.reuse_rate(4, 400, 400) < tables.reuse_rate(4, 400, 1600) <= 1
    assert tables.kl(4, 400, 16, 8) > tables.kl(4, 400, 48, 8) >= 0
