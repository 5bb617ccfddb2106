"""`penstock bench tune auto`: its command line, and what it makes of runs."""

import pytest

from penstock.core.errors import ConfigError
from research.tuning.auto import parse_arguments, summary
from research.tuning.setting_runs import auto_table


def row(policy: str, speed: float, kl: float, *, pick: bool = False) -> dict[str, object]:
    return {
        "policy": policy, "tokens_per_s": speed, "kl": kl, "is_pick": pick, "agreement": 1.0,
        "resident_bytes": 1 << 20, "fields": {},
    }  # fmt: skip


def test_the_pick_is_held_to_the_fastest_single_policy() -> None:
    rows = [row("kvswap", 90.0, 0.01, pick=True), row("quest", 100.0, 0.02), row("loki", 9.0, 0.0)]
    found = summary(rows)
    assert found["pick"] == "kvswap"
    assert found["best"] == "quest"
    assert found["pick_over_best"] == pytest.approx(0.9)
    assert (found["pick_kl"], found["best_kl"]) == (0.01, 0.02)
    table = auto_table({"cases": [{"budget": "1/6", "device": "nvme", "rows": rows, **found}]})
    assert "the pick, kvswap, has 90 % of the fastest, quest" in table
    assert table.index("quest ") < table.index("loki ")


@pytest.mark.parametrize(
    "arguments",
    [["--quick"], ["--model", "tiny"], ["--policies", "kvswop"], ["--devices", "floppy"],
     ["--context", "0"]],
)  # fmt: skip
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_arguments(arguments)


def test_all_policies_and_two_budgets_by_default() -> None:
    args = parse_arguments([])
    assert args.budgets == ["1/6", "1/3"]
    assert "kvswap" in args.policies
    assert len(args.policies) > 15
