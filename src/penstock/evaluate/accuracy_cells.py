"""Cells of the accuracy table: one task under one setting, and the losses over tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.byte_size import format_bytes
from penstock.evaluate.answers import Answers, Question
from penstock.evaluate.intervals import paired_bootstrap
from penstock.evaluate.retrieval_counts import Counts, add_counts, retrieving_share
from penstock.evaluate.tasks import judge, score_any_order
from penstock.evaluate.tasks.metrics import rouge_l
from penstock.evaluate.tasks.real.passages import FIDELITY
from penstock.evaluate.text_table import format_table

REFERENCE = "full"
TIME_WAS_UP = "time was up"
_ADDED = (
    "seconds", "tokens", "sparse_tokens", "read_bytes", "units_wanted", "units_hit", "units_reused",
)  # fmt: skip
_LISTS = ("scores", "any_order", "agreement", "said", "kl")


@dataclass(kw_only=True)
class Cell:
    """All samples of a task that a setting has answered."""

    length: int = 0
    """Most tokens of a prompt; 0 in results that have one length (settings.tokens)."""
    task: str
    setting: str
    scores: list[float] = field(default_factory=list)
    """0 to 1 by the task's own measure (exact match for the recall tasks), in the order of the
    samples, which is the same for every setting."""
    any_order: list[float] = field(default_factory=list)
    """Share of the values that the answer names."""
    seconds: float = 0.0
    tokens: int = 0
    sparse_tokens: int = 0
    """Tokens of the answers that were decoded over a selection, see `Answers`."""
    read_bytes: int = 0
    units_wanted: int = 0
    units_hit: int = 0
    units_reused: int = 0
    ledger_bytes: int = 0
    """Fast memory of a batch's cache, the largest one."""
    full_cache_bytes: int = 0
    refused: str | None = None
    """Why it could not run."""
    retrieval: Counts | None = None
    """When layers retrieved, for methods that do not at every step."""
    agreement: list[float] = field(default_factory=list)
    """ROUGE-L with full attention's own answers, by sample; suite real alone."""
    said: list[str] = field(default_factory=list)
    """Full attention's answers, for `agreement`."""
    kl: list[float] = field(default_factory=list)
    """Fidelity: KL(full || setting) of the next token in nats, the mean of each sample's steps;
    `scores` are then shares of steps with the same most likely token."""
    mass: list[float] = field(default_factory=list)
    """Fidelity: attention mass captured, 0 to 1, by layer."""

    @property
    def key(self) -> tuple[int, str, str]:
        """Length, task and setting."""
        return self.length, self.task, self.setting

    def merge(self, later: "Cell") -> None:
        """Count what another cell of the same key has answered after this one."""
        if later.mass:
            before, after = len(self.scores), len(later.scores)
            pairs = zip(self.mass or later.mass, later.mass, strict=True)
            self.mass = [(a * before + b * after) / (before + after) for a, b in pairs]
        for name in _LISTS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.retrieval = add_counts(self.retrieval, later.retrieval)
        if later.ledger_bytes > self.ledger_bytes:
            self.ledger_bytes, self.full_cache_bytes = later.ledger_bytes, later.full_cache_bytes
        self.refused = self.refused or later.refused

    def add(
        self, question: Question, answers: Answers, compared: Sequence[str] | None = None
    ) -> None:
        """Count a batch.

        Args:
            compared: full attention's answers; None: they are not compared.
        """
        for sample, text in zip(question.samples, answers.texts, strict=True):
            self.scores.append(judge(sample, text))
            self.any_order.append(score_any_order(sample, text))
        if compared is not None:
            pairs = zip(answers.texts, compared, strict=True)
            self.agreement += [rouge_l(text, [other]) for text, other in pairs]
            self.said += answers.texts if self.setting == REFERENCE else []
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(answers, name))
        self.retrieval = add_counts(self.retrieval, answers.retrieval)
        if answers.ledger_bytes > self.ledger_bytes:
            self.ledger_bytes = answers.ledger_bytes
            self.full_cache_bytes = answers.full_cache_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A setting at one length, over all tasks that it and the reference have answered."""

    length: int
    setting: str
    mean: float | None
    """Exact match, the mean over tasks."""
    loss: float | None
    """Points lost to full attention, the mean over tasks; None without a reference."""
    loss_error: float | None
    """Standard error of the loss: samples are paired."""
    loss_low: float | None
    """Lower end of the loss's 95 % interval, by a paired bootstrap within tasks."""
    loss_high: float | None
    tasks: int
    hit_rate: float | None
    retrieving_share: float | None
    """Steps that retrieved, of all; None for methods that do at every step."""
    read_bytes_per_token: float | None
    ledger_bytes: int
    full_cache_bytes: int
    seconds: float
    refused: str | None


def summarise(cells: Sequence[Cell]) -> list[Summary]:
    """Sum up answers, length by length and setting by setting, in their order."""
    out = []
    cells = [cell for cell in cells if cell.task not in FIDELITY]
    for length in dict.fromkeys(cell.length for cell in cells):
        out += _summarise([cell for cell in cells if cell.length == length])
    return out


def _summarise(cells: Sequence[Cell]) -> list[Summary]:
    reference = {cell.task: cell for cell in cells if cell.setting == REFERENCE and cell.scores}
    out = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        mine = [cell for cell in cells if cell.setting == setting]
        done = [cell for cell in mine if cell.scores]
        losses, variances, pairs = [], [], []
        for cell in done:
            if cell.task in reference:
                count = min(len(reference[cell.task].scores), len(cell.scores))
                pairs.append((reference[cell.task].scores[:count], cell.scores[:count]))
                lost = np.subtract(*pairs[-1])
                losses.append(float(lost.mean()))
                variances.append(float(lost.var(ddof=1)) / len(lost) if len(lost) > 1 else 0.0)
        wanted, tokens = sum(c.units_wanted for c in done), sum(c.tokens for c in done)
        retrieval: Counts | None = None
        for cell in done:
            retrieval = add_counts(retrieval, cell.retrieval)
        largest = max(done, key=lambda cell: cell.ledger_bytes, default=None)
        interval = paired_bootstrap(*pairs, resamples=2000) if pairs else None
        error = float(np.sqrt(sum(variances))) / len(losses) if losses else None
        summary = Summary(
            length=cells[0].length, setting=setting, tasks=len(done),
            mean=float(np.mean([np.mean(c.scores) for c in done])) if done else None,
            loss=100 * float(np.mean(losses)) if losses else None,
            loss_error=100 * error if error is not None else None,
            loss_low=None if interval is None else 100 * interval.low,
            loss_high=None if interval is None else 100 * interval.high,
            hit_rate=sum(c.units_hit for c in done) / wanted if wanted else None,
            retrieving_share=retrieving_share(retrieval),
            read_bytes_per_token=sum(c.read_bytes for c in done) / tokens if tokens else None,
            ledger_bytes=largest.ledger_bytes if largest else 0,
            full_cache_bytes=largest.full_cache_bytes if largest else 0,
            seconds=sum(cell.seconds for cell in done),
            refused=next((cell.refused for cell in mine if cell.refused), None),
        )  # fmt: skip
        out.append(summary)
    return out


def accuracy_table(cells: Sequence[Cell]) -> str:
    """Scores in per cent: a table for each length, settings down, tasks across."""
    lengths = list(dict.fromkeys(cell.length for cell in cells))
    if len(lengths) > 1:
        tables = [
            f"{length:,} tokens\n{accuracy_table([c for c in cells if c.length == length])}"
            for length in lengths
        ]
        return "\n\n".join(tables)
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    at = {(cell.setting, cell.task): cell for cell in cells}
    rows: list[list[str]] = []
    for summary in summarise(cells):
        if summary.refused is not None and summary.mean is None:
            rows.append([summary.setting, summary.refused])
            continue
        row = [summary.setting]
        for task in tasks:
            scores = at[summary.setting, task].scores
            row.append(f"{100 * float(np.mean(scores)):.0f}" if scores else "")
        rows.append([*row, *_summary_cells(summary)])
    header = ["score, %", *tasks, "mean", "loss", "memory", "hits", "retr.", "KB/token", "s"]
    return format_table(header, rows)


def _summary_cells(summary: Summary) -> list[str]:
    def show(value: float | None, pattern: str, factor: float = 1.0) -> str:
        return "" if value is None else format(value * factor, pattern)

    loss = show(summary.loss, ".1f")
    if summary.loss_low is not None and summary.setting != REFERENCE:
        loss += f" [{show(summary.loss_low, '.1f')}, {show(summary.loss_high, '.1f')}]"
    return [
        show(summary.mean, ".1f", 100), loss, format_bytes(summary.ledger_bytes),
        show(summary.hit_rate, ".0%"), show(summary.retrieving_share, ".0%"),
        show(summary.read_bytes_per_token, ".0f", 1e-3),
        f"{summary.seconds:.0f}",
    ]  # fmt: skip


def not_run(cells: Sequence[Cell], samples: int) -> list[dict[str, Any]]:
    """Cells with fewer samples than were asked for."""
    return [
        {
            "length": cell.length, "task": cell.task, "setting": cell.setting,
            "samples": len(cell.scores), "wanted": samples, "why": cell.refused or TIME_WAS_UP,
        }
        for cell in cells
        if len(cell.scores) < samples
    ]  # fmt: skip
