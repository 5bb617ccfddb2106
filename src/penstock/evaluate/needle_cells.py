"""Cells of a needle grid: one length, depth and setting; and the table of a setting."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.evaluate.answers import Answers
from penstock.evaluate.text_table import format_table


@dataclass(kw_only=True)
class NeedleCell:
    """What one setting found of the needles at one depth of documents of one length."""

    tokens: int
    """Length of the prompts."""
    depth: float
    """Share of the document in front of the needle, 0 to 1."""
    setting: str
    scores: list[float] = field(default_factory=list)
    """0 to 1 by the task's own measure, in the order of the samples. The samples are the same for
    every setting, and at every depth but for the needle's place."""
    ledger_bytes: int = 0
    """Fast memory of the cache of the batch that the cell was asked in, the largest one."""
    full_cache_bytes: int = 0
    """What a full cache of that batch takes."""
    refused: str | None = None
    """Why it could not run."""

    def add(self, score: float, answers: Answers) -> None:
        """Count one sample's answer."""
        self.scores.append(score)
        if answers.ledger_bytes > self.ledger_bytes:
            self.ledger_bytes = answers.ledger_bytes
            self.full_cache_bytes = answers.full_cache_bytes


def summarise_needles(cells: Sequence[NeedleCell]) -> list[dict[str, Any]]:
    """A row for each setting and length: the mean over depths, 0 to 1, None where none answered."""
    rows = []
    for setting, tokens in dict.fromkeys((cell.setting, cell.tokens) for cell in cells):
        mine = [cell for cell in cells if (cell.setting, cell.tokens) == (setting, tokens)]
        done = [cell for cell in mine if cell.scores]
        largest = max(mine, key=lambda cell: cell.ledger_bytes)
        rows.append({
            "setting": setting, "tokens": tokens,
            "mean": float(np.mean([np.mean(cell.scores) for cell in done])) if done else None,
            "samples": sum(len(cell.scores) for cell in done),
            "ledger_bytes": largest.ledger_bytes, "full_cache_bytes": largest.full_cache_bytes,
            "refused": next((cell.refused for cell in mine if cell.refused), None),
        })  # fmt: skip
    return rows


def needles_not_run(cells: Sequence[NeedleCell], samples: int) -> list[dict[str, Any]]:
    """A row for each setting and length that has fewer samples than were asked for, with why."""
    rows = []
    for setting, tokens in dict.fromkeys((cell.setting, cell.tokens) for cell in cells):
        mine = [cell for cell in cells if (cell.setting, cell.tokens) == (setting, tokens)]
        missing = [cell for cell in mine if len(cell.scores) < samples]
        if missing:
            refused = next((cell.refused for cell in missing if cell.refused), None)
            rows.append({
                "setting": setting, "tokens": tokens,
                "samples": sum(len(cell.scores) for cell in mine), "wanted": samples * len(mine),
                "why": refused or "stopped before",
            })  # fmt: skip
    return rows


def needle_tables(cells: Sequence[NeedleCell]) -> str:
    """A small table for each setting, scores in per cent: depths down, lengths across."""
    lengths = sorted({cell.tokens for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    at = {(cell.setting, cell.tokens, cell.depth): cell for cell in cells}
    tables = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        rows = [
            [f"{100 * depth:.0f} % deep", *(_shown(at.get((setting, n, depth))) for n in lengths)]
            for depth in depths
        ]
        tables.append(format_table([setting, *(f"{n:,}" for n in lengths)], rows))
    return "\n\n".join(tables)


def _shown(cell: NeedleCell | None) -> str:
    if cell is None or not cell.scores:
        return "" if cell is None or cell.refused is None else "no room"
    return f"{100 * float(np.mean(cell.scores)):.0f}"
