"""The snapshot: a comparison finds what changed, and a case does the same twice."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from penstock import BudgetError
from penstock.methods import POLICIES
from penstock.testing.tiny_models import tiny_model
from tests import snapshot
from tests.snapshot import FAMILIES, FORMAT, Case, cases, differences, main, run

BEFORE: dict[str, Any] = {
    "format": FORMAT,
    "made": {"device": "cpu"},
    "cases": {
        "a": {
            "tokens": [[5, 9, 11], [5, 7, 2]],
            "selections": {"step 1, layer 0": {"selected": "4d1f (2: 3 8)", "missing": "99 (0: )"}},
            "counters": {"decode": {"reads": 4, "read_bytes": 4096}},
            "ledger": {"used_bytes": 300, "items": {"slots": 200, "index": 100}},
        },
        "b": {"tokens": [[1]], "ledger": {"items": {}}},
    },
}


def test_the_same_differs_in_nothing() -> None:
    assert differences(BEFORE, copy.deepcopy(BEFORE)) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("tokens", 1, 2), 3, ["a: tokens: 1 differ", "    [1] [2]: was 2, is 3"]),
        (
            ("selections", "step 1, layer 0", "selected"),
            "77aa (2: 3 9)",
            [
                "a: selections: 1 differ",
                "    step 1, layer 0 selected: was 4d1f (2: 3 8), is 77aa (2: 3 9)",
            ],
        ),
        (
            ("counters", "decode", "reads"),
            5,
            ["a: counters: 1 differ", "    decode reads: was 4, is 5"],
        ),
        (
            ("ledger", "items", "index"),
            101,
            ["a: ledger: 1 differ", "    items index: was 100, is 101"],
        ),
        (
            ("ledger", "items", "window"),
            8,
            ["a: ledger: 1 differ", "    items window: was None, is 8"],
        ),
        (
            ("selections", "step 2, layer 0"),
            {"selected": "x"},
            ["a: selections: 1 differ", "    step 2, layer 0: was None, is {'selected': 'x'}"],
        ),
    ],
)
def test_a_change_is_found(path: tuple[Any, ...], value: Any, said: list[str]) -> None:
    after = copy.deepcopy(BEFORE)
    place = after["cases"]["a"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert differences(BEFORE, after) == said
    assert differences(after, BEFORE) != []


def test_a_case_that_is_gone_or_new_is_found() -> None:
    after = copy.deepcopy(BEFORE)
    after["cases"]["c"] = after["cases"].pop("b")
    assert differences(BEFORE, after) == ["b: the case is gone", "c: the case is new"]


def test_every_policy_is_in_every_family() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found)
    assert {(case.family, case.policy) for case in found} == {
        (family, name) for family in FAMILIES for name in (*POLICIES, "beams")
    }


def test_a_case_does_the_same_twice() -> None:
    case = Case(family="gemma3", policy="kvswap", store="disk", rows=1)
    model = tiny_model(case.family)
    first, again = run(case, model), run(case, model)
    assert first == again
    assert {"selected", "missing", "attended"} <= {*first["selections"]["step 1, layer 0"]}
    assert first["counters"]["decode"]["read_bytes"] > 0


def test_the_program_ends_with_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, only = tmp_path / "taken.json", ("--only", "llama/full/memory/*")
    assert main(["write", str(file), *only]) == 0
    assert main(["compare", str(file), *only]) == 0
    taken = json.loads(file.read_text())
    [case] = taken["cases"].values()
    case["tokens"][1][0] += 1
    file.write_text(json.dumps(taken))
    assert main(["compare", str(file), *only]) == 1
    assert "full/memory/rows=2,tight: tokens: 1 differ\n    [1] [0]: was" in capsys.readouterr().out

    def refuse(case: Case, model: Any) -> None:
        raise BudgetError("too little", needed_bytes=5)

    monkeypatch.setattr(snapshot, "run", refuse)
    assert main(["write", str(file), *only]) == 1
    assert capsys.readouterr().out == "llama/full/memory/rows=2,tight: BudgetError: too little\n"
