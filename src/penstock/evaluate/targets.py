"""Targets: ratios within one run, and whether they meet what the project promises."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.evaluate.throughput_rows import (
    FLEXGEN,
    FLOORS,
    GROUPS_OF_8,
    KVSWAP,
    OVERLAP,
    OVERLAP_OF_8,
    RESIDENT,
    STATIC,
)
from penstock.evaluate.throughput_run import RowResult

MEMORY_SLACK = 1.10


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One promise, what was measured, and whether it holds."""

    name: str
    batch: int
    value: float
    bound: float
    at_least: bool

    @property
    def passed(self) -> bool:
        """Whether the value is on the right side of the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        """For people."""
        sign = ">=" if self.at_least else "<="
        verdict = "pass" if self.passed else "FAIL"
        bound = f"({sign} {self.bound:g})"
        return f"[{verdict}] batch {self.batch}: {self.name}: {self.value:.3g} {bound}"


def step_ratio(top: RowResult, below: RowResult, rows: Sequence[RowResult]) -> float | None:
    """Step time of one row over that of another.

    Rows of one session ran in turn: the median over rounds of the ratio of their medians; to a
    floor, of the ratio to the floors before and behind the round, where those were run, since a
    machine's speed drifts within a round of all rows. Rows of different sessions are compared
    through the floor of their own session.
    """
    if not top.rounds_ms or not below.rounds_ms:
        return None
    if below.is_floor and len(top.floors_ms) == len(top.rounds_ms):
        beside = zip(top.rounds_ms, top.floors_ms, strict=True)
        return float(np.median([np.median(steps) / np.mean(floors) for steps, floors in beside]))
    if top.session == below.session:
        pairs = zip(top.rounds_ms, below.rounds_ms, strict=False)
        return float(np.median([np.median(a) / np.median(b) for a, b in pairs]))
    floors = [_floor(rows, row) for row in (top, below)]
    if floors[0] is None or floors[1] is None:
        return None
    return (top.median_ms / floors[0].median_ms) / (below.median_ms / floors[1].median_ms)


def judge(results: Sequence[RowResult]) -> list[Target]:
    """All targets that the rows at hand allow, for every batch size."""
    found = []
    for batch in sorted({result.batch for result in results}):
        rows = [r for r in results if r.batch == batch and r.rounds_ms]
        for name in (KVSWAP, OVERLAP, GROUPS_OF_8, OVERLAP_OF_8):
            if (row := _find(rows, name)) is not None:
                found += _judge_kvswap(row, rows)
        resident, static = _find(rows, RESIDENT), _find(rows, STATIC)
        if resident is not None and static is not None:
            ratio = step_ratio(resident, static, rows)
            found += _target("(d) all resident / StaticCache, step time", batch, ratio, 1.10)
    return found


def _judge_kvswap(row: RowResult, rows: Sequence[RowResult]) -> list[Target]:
    batch, name, figures = row.batch, row.name, row.figures
    static, flexgen, floor = _find(rows, STATIC), _find(rows, FLEXGEN), _floor(rows, row)
    found: list[Target] = []
    if static is not None:
        ratio = step_ratio(static, row, rows)
        found += _target(f"(a) {name} / StaticCache, tokens/s", batch, ratio, 2.0, at_least=True)
    if floor is not None:
        found += _target(
            f"(b) {name} / {floor.name}, step time", batch, step_ratio(row, floor, rows), 1.25
        )
    if flexgen is not None:
        ratio = step_ratio(flexgen, row, rows)
        found += _target(f"(c) {name} / flexgen, tokens/s", batch, ratio, 5.0, at_least=True)
    found += _target(f"(e) {name}, stall share", batch, figures.get("stall_share"), 0.10)
    if "burst" in figures:
        share = figures["burst"]["share"]
        found += _target(
            f"(e) {name}, burst bandwidth / device's", batch, share, 0.90, at_least=True
        )
    if figures.get("ledger_bytes"):
        held = figures["growth_bytes"] + (figures["file_cache_bytes"] or 0)
        share = held / figures["ledger_bytes"]
        found += _target(f"(5) {name}, memory growth / ledger", batch, share, MEMORY_SLACK)
    return found


def _target(
    name: str, batch: int, value: float | None, bound: float, *, at_least: bool = False
) -> list[Target]:
    if value is None:
        return []
    return [Target(name=name, batch=batch, value=value, bound=bound, at_least=at_least)]


def _find(rows: Sequence[RowResult], name: str) -> RowResult | None:
    return next((row for row in rows if row.name == name), None)


def _floor(rows: Sequence[RowResult], near: RowResult) -> RowResult | None:
    """The faster floor of the same session."""
    floors = [r for r in rows if r.name in FLOORS and r.session == near.session and r.rounds_ms]
    return min(floors, key=lambda row: row.median_ms, default=None)
