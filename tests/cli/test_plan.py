"""`penstock plan`: a table with reasons, JSON, and bad input."""

import json
from typing import Any

import pytest

from penstock.cli.plan import plan_command
from penstock.core.errors import BudgetError, ConfigError
from penstock.tuner.step_work import PREDICTABLE

ISSUE: dict[str, Any] = {
    "model": "llama-3.1-8b", "machine": "orin-agx", "disk": "emmc", "context": 32768, "batch": 8,
    "memory": "1/13",
}  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], **settings: Any) -> dict[str, Any]:
    plan_command(**(ISSUE | settings), as_json=True)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan_command(**ISSUE)
    text = capsys.readouterr().out
    assert "…" not in text  # nothing is cut off on a narrow terminal
    for name in PREDICTABLE:
        assert name in text
    assert text.index("kvswap") < text.index("shadowkv") < text.index("flexgen")
    assert "full does not fit: it needs 4 GiB" in text
    for word in ("sets the pace", "Everything in memory", "Recomputing", "A smaller model"):
        assert word in text
    assert "nothing measured" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys)
    assert answer["simulated"]
    rows = {row["policy"]: row for row in answer["predictions"]}
    assert set(rows) == set(PREDICTABLE) - {"full"}
    assert answer["refused"] == {"full": 4 << 30}
    assert rows["kvswap"]["group_tokens"] == 8
    assert rows["kvswap"]["resident_bytes"] <= answer["limit_bytes"] == answer["full_bytes"] // 13
    assert set(answer["hardware"]["source"]) < set(answer["hardware"])
    assert len(answer["advice"]) == 4


def test_settings_count(capsys: pytest.CaptureFixture[str]) -> None:
    [base] = plan(capsys, policy="kvswap")["predictions"]
    [small] = plan(capsys, policy="kvswap", group=2)["predictions"]
    [new] = plan(capsys, policy="kvswap", reuse=0.0)["predictions"]
    [fast] = plan(capsys, policy="kvswap", disk="nvme")["predictions"]
    assert small["group_tokens"] == 2
    assert fast["group_tokens"] == 4
    assert small["tokens_per_s"] < base["tokens_per_s"] < fast["tokens_per_s"]
    assert new["read_bytes_per_token"] > base["read_bytes_per_token"]


def test_everything_fits(capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan(capsys, policy="full", memory="1/1")
    [row] = answer["predictions"]
    assert row["waves"] == 1
    assert row["resident_bytes"] == answer["full_bytes"]
    assert "nothing is offloaded" in answer["advice"][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt-9"}, "no known model"),
        ({"machine": "toaster"}, "toaster is not known"),
        ({"disk": "floppy"}, r"--disk floppy is not known; choose from nvme, ufs, emmc"),
        ({"policy": "quest"}, "quest cannot be predicted"),
        ({"memory": "lots"}, "cannot read 'lots'"),
        ({"context": 0}, "--context 0"),
        ({"batch": -1}, "--batch -1"),
        ({"group": -4}, "--group -4"),
        ({"reuse": 2.0}, "not a share"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_command(**(ISSUE | changes))


def test_a_budget_that_nothing_fits_names_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BudgetError, match="smallest budget that would do") as error:
        plan_command(**(ISSUE | {"memory": "1MiB"}))
    least = error.value.needed_bytes
    assert least is not None
    assert plan(capsys, memory=str(least))["predictions"]
    with pytest.raises(BudgetError):
        plan_command(**(ISSUE | {"memory": str(least - 1)}))


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(BudgetError, match="smaller model"):
        plan_command(**(ISSUE | {"model": "qwen3-14b", "machine": "snapdragon-8-elite"}))
