"""What suite real prints: for each length what a budget costs, then every task."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.evaluate.accuracy_cells import REFERENCE, Cell, Summary, summarise
from penstock.evaluate.accuracy_settings import short_names
from penstock.evaluate.audit.table import format_nats
from penstock.evaluate.intervals import bootstrap_mean
from penstock.evaluate.tasks.real.passages import FIDELITY
from penstock.evaluate.text_table import format_table

_LONG = "long_answer"
_RESAMPLES = 2000
_BYTES = re.compile(r" \(\d+ bytes\)$")
_NAMES = {
    "extraction": "extract", "multi_query": "queries", _LONG: "long", "multi_hop": "hops",
    "multi_value": "values", "repository": "repo", "tracking": "track", "aggregation": "aggr",
    "multi_key": "keys", "single_2": "number", "single_3": "uuid",
}  # fmt: skip
"""Tasks above narrow columns."""
LEGEND = """\
score: mean over tasks, %. lost: points lost to full attention on the same samples, with its 95 %
interval. KL: of the next token over 256 decoded tokens of held-out text, full attention to policy,
in nats. same: steps with the same most likely token. mass: share of full attention's probability on
what was attended to. hits: of the units that steps wanted, those that were in memory. sparse:
tokens of an answer that were decoded over a selection, the mean; its first token comes from exact
prefill. like full: ROUGE-L of long answers with full attention's own.
memory: of the cache, as a share of the full one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelitySummary:
    """How close a setting stays to full attention on one kind of text at one length."""

    length: int
    setting: str
    task: str
    samples: int
    kl: float
    """Mean over samples, in nats, with its 95 % interval."""
    kl_low: float
    kl_high: float
    same: float
    """Share of steps with the same most likely token."""
    mass: float
    """Attention mass captured, the mean over layers."""
    worst_mass: float
    worst_layer: int
    """Number among the layers that select."""


def fidelity_of(cells: Sequence[Cell]) -> list[FidelitySummary]:
    """Sum up what was measured of fidelity, cell by cell."""
    out = []
    for cell in cells:
        if cell.task not in FIDELITY or not cell.kl:
            continue
        kl = bootstrap_mean(cell.kl, resamples=_RESAMPLES)
        worst = int(np.argmin(cell.mass))
        out.append(
            FidelitySummary(
                length=cell.length,
                setting=cell.setting,
                task=cell.task,
                samples=len(cell.kl),
                kl=kl.value,
                kl_low=kl.low,
                kl_high=kl.high,
                same=float(np.mean(cell.scores)),
                mass=float(np.mean(cell.mass)),
                worst_mass=cell.mass[worst],
                worst_layer=worst,
            )
        )
    return out


def real_report(cells: Sequence[Cell], model: str) -> str:
    """Tables of every length, and what their columns mean."""
    parts = []
    for length in dict.fromkeys(cell.length for cell in cells):
        mine = [cell for cell in cells if cell.length == length]
        samples = max(len(cell.scores) for cell in mine)
        answered = {cell.task for cell in mine if cell.scores} - set(FIDELITY)
        parts.append(
            f"{model}: prompts of {length:,} tokens, {len(answered)} tasks of {samples} samples\n\n"
            + _tables(mine)
        )
    settings = dict.fromkeys(cell.setting for cell in cells)
    lines = [
        f"{name}: {text.partition(':')[2]}"
        for text, name in short_names(list(settings)).items()
        if text != name
    ]
    return "\n".join(["\n\n".join([*parts, LEGEND]), *lines])


def basis_line(adapter_tokens: int | None) -> str:
    """Where policies with a low-rank index have their basis from.

    Args:
        adapter_tokens: of calibration; None: there is no adapter.
    """
    if adapter_tokens is None:
        return "Low-rank indexes have a basis of each prompt's own keys (no adapter is at hand)."
    return f"Low-rank indexes have an adapter of {adapter_tokens:,} calibration tokens."


def _tables(cells: Sequence[Cell]) -> str:
    summaries = {one.setting: one for one in summarise(cells)}
    fidelity = {(one.setting, one.task): one for one in fidelity_of(cells)}
    refused = {cell.setting: cell.refused for cell in cells if cell.refused}
    settings = list(dict.fromkeys(cell.setting for cell in cells))
    settings.sort(key=lambda setting: _rank(summaries.get(setting), setting))
    names = short_names(settings)
    most = max((one.tasks for one in summaries.values()), default=0)
    rows, by_task = [], []
    tasks = [task for task in dict.fromkeys(c.task for c in cells) if task not in FIDELITY]
    at = {(cell.setting, cell.task): cell for cell in cells}
    for setting in settings:
        summary = summaries.get(setting)
        mine = [one for key, one in fidelity.items() if key[0] == setting]
        if not mine and (summary is None or summary.mean is None):
            rows.append([names[setting], _why_not(refused.get(setting))])
            continue
        name = names[setting]
        if summary is not None and summary.tasks < most:
            name += f" ({summary.tasks} of {most} tasks)"
        of_setting = [cell for cell in cells if cell.setting == setting]
        rows.append([
            name, *_answers(summary), *_closeness(fidelity, setting), *_cost(of_setting),
        ])  # fmt: skip
        if summary is not None and summary.mean is not None:
            scores = [at[setting, task].scores for task in tasks]
            by_task.append(
                [names[setting], *(_per_cent(one) for one in scores), _like_full(at, setting)]
            )
    closeness = ["KL prose", "KL code", "same", "mass"]
    header = ["policy", "score", "lost", *closeness, "hits", "sparse", "memory"]
    table = format_table(header, rows)
    if not by_task:
        return table
    heads = ["by task, %", *(_NAMES.get(task, task) for task in tasks), "like full"]
    return f"{table}\n\n{format_table(heads, by_task)}"


def _why_not(refused: str | None) -> str:
    """The end of a refusal, which names the budget that would do."""
    if refused is None:
        return "not run"
    return f"refused: {_BYTES.sub('', refused.rpartition('; ')[2])}"


def _rank(summary: Summary | None, setting: str) -> tuple[int, float]:
    """Full attention first, then by points lost; what could not run comes last."""
    if setting == REFERENCE:
        return 0, 0.0
    if summary is None or summary.loss is None:
        return 2, 0.0
    return 1, summary.loss


def _answers(summary: Summary | None) -> list[str]:
    if summary is None or summary.mean is None:
        return ["", ""]
    lost = ""
    if summary.setting != REFERENCE and summary.loss is not None:
        lost = f"{summary.loss:.1f} [{summary.loss_low:.1f}, {summary.loss_high:.1f}]"
    return [f"{100 * summary.mean:.1f}", lost]


def _closeness(fidelity: dict[tuple[str, str], FidelitySummary], setting: str) -> list[str]:
    found = [fidelity.get((setting, task)) for task in FIDELITY]
    there = [one for one in found if one is not None]
    kl = ["" if one is None else format_nats(one.kl) for one in found]
    pairs = [(one.same, one.mass) for one in there]
    if not pairs:
        return [*kl, "", ""]
    same, mass = (
        float(np.mean([getattr(one, name) for one in there])) for name in ("same", "mass")
    )
    return [*kl, f"{same:.1%}", f"{mass:.3f}"]


def _cost(cells: Sequence[Cell]) -> list[str]:
    answers = [cell for cell in cells if cell.scores and cell.task not in FIDELITY]
    count = sum(len(cell.scores) for cell in answers)
    sparse = f"{sum(cell.sparse_tokens for cell in answers) / count:.0f}" if count else ""
    shares = [c.ledger_bytes / c.full_cache_bytes for c in cells if c.scores and c.full_cache_bytes]
    wanted = sum(cell.units_wanted for cell in cells)
    hits = f"{sum(cell.units_hit for cell in cells) / wanted:.0%}" if wanted else ""
    return [hits, sparse, f"{max(shares):.1%}" if shares else ""]


def _per_cent(scores: Sequence[float]) -> str:
    return f"{100 * float(np.mean(scores)):.0f}" if scores else ""


def _like_full(at: dict[tuple[str, str], Cell], setting: str) -> str:
    cell = at.get((setting, _LONG))
    return _per_cent(cell.agreement) if cell is not None else ""
