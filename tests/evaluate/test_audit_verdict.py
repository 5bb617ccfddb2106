"""The verdict of an audit over several budgets: hand-made figures, and a run on one screen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli.main import EXIT_BAD_INPUT, app
from penstock.evaluate.audit.figure import draw_audit, write_audit_figure
from penstock.evaluate.audit.run import Fidelity
from penstock.evaluate.audit.verdict import best_of, budget_table, verdict


def audited(budget: str, kl: float, same: int, *, mass: float = 0.9, steps: int = 40) -> Fidelity:
    share = 1 / int(budget.partition("/")[2])
    return Fidelity(
        setting=f"kvswap@{budget}", mass=[mass, mass - 0.1], recall=[1.0, 1.0], tokens=[9.0, 9.0],
        kl=[kl / 2, 3 * kl / 2], same=[1.0, 1.0], mean_mass=mass - 0.05, mean_recall=1.0,
        mean_kl=kl, same_token=same / steps, counted=steps, hit_rate=0.5,
        ledger_bytes=round(share * 10_000), full_cache_bytes=10_000,
    )  # fmt: skip


REFUSED = Fidelity(setting="kvswap@1/99", refused="too little; the smallest is 7 MiB")
FALLING = [
    audited("1/4", 0.001, 40, mass=0.999), audited("1/8", 0.01, 40), audited("1/13", 0.02, 39),
    audited("1/34", 0.2, 30), REFUSED,
]  # fmt: skip


def test_the_smallest_budget_within_the_tolerance() -> None:
    said = verdict(FALLING, 0.03)
    assert best_of(FALLING, 0.03) is FALLING[2]
    assert said == (
        "At 1/13 this model keeps 85% of the attention on your text, and 1 of 40 tokens differs. "
        "The KL of 0.02 is within 0.03. 1/34 is too little: 0.2. Use 1/8 for no other token."
    )
    assert "2 of" not in said
    assert verdict(list(reversed(FALLING)), 0.03) == said, "whatever their order"


def test_a_smaller_budget_that_is_good_by_chance_is_not_taken() -> None:
    lucky = [*FALLING[:2], audited("1/13", 0.05, 38), audited("1/34", 0.01, 40)]
    assert best_of(lucky, 0.03) is lucky[1]
    unlucky = [audited("1/4", 0.05, 40), audited("1/8", 0.01, 40)]
    assert best_of(unlucky, 0.03) is None
    assert "1/8 is within 0.03 and the larger 1/4 is not" in verdict(unlucky, 0.03)


def test_nothing_will_do() -> None:
    assert "No budget that was tried keeps the KL within 0.0001. At 1/4 " in verdict(FALLING, 1e-4)
    assert "Every budget is too little" in verdict([REFUSED], 0.03)


def test_all_is_the_same() -> None:
    said = verdict([audited("1/4", 0.0, 40, mass=1.05)], 0.03)
    assert "keeps 100% of the attention on your text, and 0 of 40 tokens differ." in said
    assert "other token" not in said
    assert "No budget that was tried has all" in verdict([audited("1/4", 0.01, 39)], 0.03)


def test_the_table_marks_what_is_within() -> None:
    lines = budget_table(FALLING, [0, 3], 0.03).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1/4", "1/8", "1/13", "1/34", "1/99"]
    assert [" * " in line for line in lines[2:]] == [True, True, True, False, False]
    assert "80% (3)" in lines[4]
    assert lines[-1].endswith("too little: the smallest is 7 MiB")
    assert max(map(len, lines)) <= 96


def test_the_figure_has_every_budget_and_the_verdict(tmp_path: Path) -> None:
    figure = draw_audit(FALLING, [0, 3], tolerance=0.03, title="it")
    left, right = figure.axes
    texts = [text.get_text() for text in left.texts]
    assert {"1/4", "1/8", "1/13", "1/34", "tolerance 0.03"} == set(texts)
    bold = [text.get_text() for text in left.texts if text.get_fontweight() == "bold"]
    assert bold == ["1/13"]
    assert [np.asarray(line.get_ydata()).tolist() for line in right.lines] == [
        each.mass for each in FALLING[:4]
    ]
    assert "1/13 this model keeps" in figure.get_suptitle().replace("\n", " ")
    path = tmp_path / "audit.png"
    write_audit_figure(FALLING, [0, 3], path, tolerance=0.03, title="it")
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_audit([REFUSED], [0], tolerance=0.03, title="it")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.txt"
    path.write_text("The grass is green . The sky is blue . The door is open . " * 40)
    return path


def test_one_screen(text: Path, tmp_path: Path) -> None:
    figure = tmp_path / "audit.png"
    done = run(
        "recall", "--prompt-file", text, "--follow-text", "--max-new-tokens", 6, "--disk", "memory",
        "--budgets", "1/2, 1/3,1/500", "--figure", figure, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    *shown, last = done.stdout.splitlines()
    result = json.loads(last)
    policies = result["figures"]["policies"]
    assert [each["setting"] for each in policies] == ["kvswap@1/2", "kvswap@1/3", "kvswap@1/500"]
    assert policies[2]["refused"]
    assert all(0 < each["mean_mass"] <= 1 for each in policies[:2])
    assert all(0 <= each["hit_rate"] <= 1 for each in policies[:2])
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 100
    assert " ".join("\n".join(shown).split()).endswith(result["figures"]["verdict"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tolerance", "0"), "--tolerance must be above 0"),
        (("--figure", "x.txt"), "has to end in .png, .svg, .pdf"),
        (("--figure", "x.png", "--policies", "quest@1/4"), "leave out --policies"),
    ],
)
def test_what_makes_no_sense(arguments: tuple[str, ...], message: str, text: Path) -> None:
    done = run("recall", "--prompt-file", text, *arguments)
    assert done.exit_code == EXIT_BAD_INPUT
    assert message in done.stderr


def test_a_picture_of_somebody_else_stays(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "photo.png"
    other.write_bytes(b"\x89PNG\r\nmine")
    done = run("recall", "--prompt-file", text, "--figure", other)
    assert done.exit_code == EXIT_BAD_INPUT
    assert other.read_bytes() == b"\x89PNG\r\nmine"
