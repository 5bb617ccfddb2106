"""Fisher's test and Holm's by hand, and the runs whose agreement the log tells."""

from pathlib import Path
from typing import Any

import pytest

import training
from penstock.core.errors import ConfigError
from training.compare import Compared, cells_of, compare, fisher, holm, main, report, some_are_worse

RESULTS = Path(training.__file__).parents[1] / "benchmarks" / "results"
CARD = [RESULTS / f"training-recall-2-two-sittings-{which}.json" for which in ("h200", "4k-cpu")]


def cell(task: str, exact: int, asked: int = 100, tokens: int = 4096) -> dict[str, Any]:
    return {"task": task, "tokens": tokens, "exact": exact, "asked": asked}


def test_fisher_by_hand() -> None:
    """The lady who tastes tea: 70 ways to name four of eight cups, 16 with three right."""
    assert fisher(4, 4, 0, 4) == pytest.approx(2 / 70)
    assert fisher(3, 4, 1, 4) == pytest.approx((1 + 16 + 16 + 1) / 70)
    assert fisher(2, 4, 2, 4) == 1.0
    assert fisher(100, 100, 94, 100) == pytest.approx(0.0289, abs=1e-4)
    assert fisher(100, 100, 95, 100) > 0.05
    assert fisher(12, 80, 30, 100) == pytest.approx(fisher(30, 100, 12, 80))
    assert fisher(0, 0, 3, 9) == 1.0


def test_only_what_both_have_asked_is_compared() -> None:
    run = [cell("copy", 100), cell("riddle", 3), cell("copy", 50, tokens=8192), cell("sum", 0, 0)]
    card = [cell("copy", 94), cell("copy", 0, 0, tokens=8192), cell("sum", 5)]
    (one,) = compare(run, card)
    assert (one.task, one.right, one.card_right, one.better) == ("copy", 100, 94, True)
    assert one.figures() == "1.00 (0.94)"


def test_holm_takes_the_family_into_account() -> None:
    def with_p(p: float) -> Compared:
        return Compared(
            task="copy", tokens=1, right=1, asked=2, card_right=1, card_asked=2, p=p
        )  # fmt: skip

    # 0.01 <= .05 / 4, 0.016 <= .05 / 3, and 0.03 > .05 / 2 ends it.
    family = [with_p(p) for p in (0.03, 0.01, 0.04, 0.016)]
    assert [one.p for one in holm(family)] == [0.01, 0.016]
    assert holm([with_p(0.03), with_p(0.9)]) == []


@pytest.mark.parametrize(
    ("run", "agree", "worse", "differ"),
    [
        ("second-run-h200", 46, 6, 3),
        ("second-run-third-sitting-h200", 47, 4, 2),
        ("second-run-lists-h200", 48, 3, 1),
        ("third-run-h100", 52, 0, 0),
        ("fourth-run-h100", 50, 2, 2),
        ("seventh-run-h100", 50, 1, 0),
        ("eighth-run-h100", 50, 2, 1),
        ("ninth-run-h100", 51, 0, 0),
        ("tenth-run-two-sittings-h100", 49, 2, 0),
        ("tenth-run-h100", 52, 0, 0),
        ("fifth-run-four-sittings-cut-short-h100", 44, 8, 3),
    ],
)
def test_the_runs_that_the_log_tells_of(
    run: str, agree: int, worse: int, differ: int, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RESULTS / f"training-recall-2-{run}.json"
    status = main([str(result), *(word for path in CARD for word in ("--card", str(path)))])
    assert status == (worse > 0)
    said = capsys.readouterr().out
    assert f"{agree} of 52 cells agree" in said
    assert f"of the others {worse} are worse and {52 - agree - worse} better" in said
    assert f"all cells together (Holm): {differ} differ" in said


def test_each_cell_counts_by_itself() -> None:
    worse = [cell("copy", 94), *(cell("copy", 100, tokens=n) for n in range(1, 20))]
    card = [cell("copy", 100, tokens=n) for n in (4096, *range(1, 20))]
    assert some_are_worse(compare(worse, card))
    assert not some_are_worse(compare(card, worse))
    assert not some_are_worse(compare([cell("copy", 95)], card))


def test_a_card_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CARD[0]), "--card", str(CARD[0])]) == 0
    said = capsys.readouterr().out
    assert "48 of 48 cells agree" in said
    assert "all cells together (Holm): 0 differ" in said


def test_a_better_cell_is_no_failure() -> None:
    better = compare([cell("copy", 100)], [cell("copy", 80)])
    assert "0 are worse and 1 better" in report(better)
    assert "1.00 (0.80) *" in report(better)


def test_what_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    prose = RESULTS / "training-prose-1-seed-2-h200.json"
    assert main([str(prose), "--card", str(CARD[0])]) == 2
    assert "not of training-evaluation-prose" in capsys.readouterr().err
    assert main([str(CARD[0]), "--card", str(CARD[1])]) == 2
    assert "no task and length that both have" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="as another one has"):
        cells_of([CARD[0], CARD[0]])
    with pytest.raises(ConfigError, match="not of evaluation"):
        cells_of([RESULTS / "accuracy-recall-2-8k-cpu.json"])
