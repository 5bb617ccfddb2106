"""Does a run agree with a card? `python -m training.compare RUN.json --card CARD.json`.

Both are results of `training.evaluate`; `--card` may be given several times. Of every cell that
both have, the shares of right answers are compared by Fisher's exact test. One cell in twenty may
differ by chance; `holm` says how many do when all of them are looked at together. Exit status 0:
no cell is worse than the card's; 1: some are; 2: they cannot be compared.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.text_table import format_table
from training import evaluate, evaluate_prose

LEVEL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One task at one length, of two models."""

    task: str
    tokens: int
    right: int
    asked: int
    card_right: int
    card_asked: int
    p: float
    """Of Fisher's test, both sides."""

    @property
    def better(self) -> bool:
        """Whether the run has the larger share."""
        return self.right * self.card_asked > self.card_right * self.asked

    def figures(self) -> str:
        """The run's share, and the card's."""
        return f"{self.right / self.asked:.2f} ({self.card_right / self.card_asked:.2f})"


def fisher(right: int, asked: int, other_right: int, other_asked: int) -> float:
    """How likely two shares are as far apart as these, or farther, if the models are equally good.

    Source: Fisher, "The logic of inductive inference", JRSS 98 (1935); the sum over all tables with
    the same sums that are no likelier than the one that was seen.

    Args:
        right: answers of the one model; of `asked`.
        other_right: of the other; of `other_asked`.
    """
    assert 0 <= right <= asked, (right, asked)
    assert 0 <= other_right <= other_asked, (other_right, other_asked)
    together = right + other_right

    def weight(count: int) -> int:
        return comb(asked, count) * comb(other_asked, together - count)

    least, most = max(0, together - other_asked), min(asked, together)
    weights = [weight(count) for count in range(least, most + 1)]
    seen = weight(right)
    return sum(w for w in weights if w <= seen) / sum(weights)


def compare(run: Iterable[Mapping[str, Any]], card: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Cells that both have asked, in the run's order."""
    asked = {(cell["task"], cell["tokens"]): cell for cell in card if cell["asked"]}
    found = []
    for cell in run:
        key = cell["task"], cell["tokens"]
        if not cell["asked"] or key not in asked:
            continue
        other = asked[key]
        counts = cell["exact"], cell["asked"], other["exact"], other["asked"]
        found.append(
            Compared(
                task=key[0], tokens=key[1], right=counts[0], asked=counts[1],
                card_right=counts[2], card_asked=counts[3], p=fisher(*counts),
            )
        )  # fmt: skip
    return found


def holm(compared: Sequence[Compared], level: float = LEVEL) -> list[Compared]:
    """Those that differ when the whole family is to be wrong once in `1 / level` times at most.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal
    of Statistics 6 (1979).
    """
    rejected = []
    for number, cell in enumerate(sorted(compared, key=lambda cell: cell.p)):
        if cell.p > level / (len(compared) - number):
            break
        rejected.append(cell)
    return rejected


def report(compared: Sequence[Compared]) -> str:
    """All cells, the run's share and the card's in brackets, and those that differ."""
    lengths = sorted({cell.tokens for cell in compared})
    at = {(cell.task, cell.tokens): cell for cell in compared}
    rows = [
        [task, *(_shown(at.get((task, tokens))) for tokens in lengths)]
        for task in dict.fromkeys(cell.task for cell in compared)
    ]
    differ = [cell for cell in compared if cell.p <= LEVEL]
    worse = [cell for cell in differ if not cell.better]
    lines = [format_table(["task", *(f"{tokens:,}" for tokens in lengths)], rows), ""]
    lines.append(
        f"{len(compared) - len(differ)} of {len(compared)} cells agree (Fisher's exact test, p "
        f"above {LEVEL:g}); of the others {len(worse)} are worse and {len(differ) - len(worse)} "
        "better than the card"
    )
    lines += [
        f"  {cell.task} at {cell.tokens:,}: {cell.figures()}, p {cell.p:.2g}"
        for cell in sorted(differ, key=lambda cell: cell.p)
    ]
    lines.append(f"all cells together (Holm): {len(holm(compared))} differ")
    return "\n".join(lines)


def cells_of(paths: Sequence[Path], kind: str = "") -> tuple[list[dict[str, Any]], str]:
    """The cells of results, and the kind of all of them.

    Args:
        kind: that they must have; empty: that of any evaluation.

    Raises:
        ConfigError: a file is no such result, or two have the same cell.
    """
    from penstock.evaluate.result import Result

    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        result = Result.load(path)
        if result.kind not in ((kind,) if kind else (evaluate.KIND, evaluate_prose.KIND)):
            raise ConfigError(f"{path} is a result of {result.kind}, not of {kind or 'evaluation'}")
        kind = result.kind
        for cell in result.figures["cells"]:
            key = cell["task"], cell["tokens"]
            if cell["asked"] and key in cells:
                raise ConfigError(f"{path} has {key[0]} at {key[1]:,} tokens, as another one has")
            if cell["asked"]:
                cells[key] = cell
    return list(cells.values()), kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.compare", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="results of the run")
    parser.add_argument("--card", type=Path, action="append", required=True, help="of the card")
    args = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        run, kind = cells_of(args.run)
        compared = compare(run, cells_of(args.card, kind)[0])
        if not compared:
            raise ConfigError("there is no task and length that both have")
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(compared))
    return int(some_are_worse(compared))


def some_are_worse(compared: Iterable[Compared]) -> bool:
    """Whether a cell is worse than the card's by more than chance has it.

    Each cell by itself: where nearly all answers are right, few cells can differ at all, so that a
    run as good as recall-2's card is called worse in 35 of 1,000 cases (drawn, 52 cells), and not
    in seven of ten as 52 tests at .05 would have it.
    """
    return any(cell.p <= LEVEL and not cell.better for cell in compared)


def _shown(cell: Compared | None) -> str:
    if cell is None:
        return "-"
    return cell.figures() + ("" if cell.p > LEVEL else " *")


if __name__ == "__main__":
    sys.exit(main())
