"""One batch size of the throughput table: build rows, decode them in rounds, sum up."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError
from penstock.devices.presets import PRESETS
from penstock.devices.profile import DeviceProfile
from penstock.evaluate.decode_loop import Bench, LiveRow
from penstock.evaluate.process_memory import anonymous_bytes, settle
from penstock.evaluate.read_burst import FetchRecorder, measure_burst
from penstock.evaluate.result import without_folder
from penstock.evaluate.sessions import Session
from penstock.evaluate.throughput_rows import (
    FLOORS,
    GROUPS_OF_8,
    KVSWAP,
    NO_REUSE,
    OVERLAP,
    OVERLAP_OF_8,
    REAL,
    Row,
)
from penstock.methods import SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.workloads.selection_streams import SelectionStream

BURST_ROWS = (KVSWAP, NO_REUSE, OVERLAP, GROUPS_OF_8, OVERLAP_OF_8)
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long rows run."""

    rounds: int
    steps: int
    """Steps of a row in each round."""
    round_s: float
    """A row's round ends early after this long, but not before one step."""


@dataclass(kw_only=True)
class RowResult:
    """A row's figures, all of which go into the result file."""

    name: str
    batch: int
    device: str
    simulated: bool
    synthetic_stream: bool
    stream: str = "own"
    """Where the selections came from."""
    is_floor: bool = False
    skipped: str | None = None
    session: int = 0
    rounds_ms: list[list[float]] = field(default_factory=list)
    floors_ms: list[list[float]] = field(default_factory=list)
    """Medians of the fastest floor before and behind each round."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_ms(self) -> list[float]:
        """Every measured step, in milliseconds."""
        return [ms for steps in self.rounds_ms for ms in steps]

    @property
    def median_ms(self) -> float:
        """Median step time."""
        return float(np.median(self.steps_ms))


def new_result(row: Row, batch: int) -> RowResult:
    """A row without figures."""
    return RowResult(
        name=row.name, batch=batch, device=row.device, simulated=row.is_simulated,
        synthetic_stream=row.synthetic_stream, stream=row.stream, is_floor=row.is_floor,
    )  # fmt: skip


def run_session(
    session: Session, number: int, bench: Bench, store: str, pace: Pace, disk: DeviceProfile,
    say: Say,
) -> list[RowResult]:  # fmt: skip
    """Build the rows of one session, decode them in turn, and measure what they did.

    Args:
        store: directory or "auto", for rows on the real disk.
        disk: the real disk as measured, for the predicted step times.
        say: told what is going on.
    """
    results: list[RowResult] = []
    live: list[tuple[LiveRow, RowResult]] = []
    try:
        for row in session.rows:
            result = new_result(row, bench.batch)
            result.session = number
            results.append(result)
            say(f"batch {bench.batch}: filling {row.name}")
            try:
                where = _store_of(row, store, in_memory=row.name in session.in_memory)
                live.append((LiveRow(row, bench, where), result))
            except PenstockError as error:
                result.skipped = str(error)
        settle()
        held = anonymous_bytes()
        recorders = _decode(live, pace, say)
        settle()
        drift = anonymous_bytes() - held
        for built, result in live:
            _describe(built, result, drift)
            _describe_simulation(result, session)
        _predict(results, disk)
        for built, result in live:
            if result.name in recorders:
                say(f"batch {bench.batch}: read burst of {result.name}")
                burst = measure_burst(built.cache, recorders[result.name])
                if burst is not None:
                    shares = {"share": burst.share}
                    result.figures["burst"] = {**dataclasses.asdict(burst), **shares}
    finally:
        for built, _ in live:
            built.close()
    return results


def _describe_simulation(result: RowResult, session: Session) -> None:
    if result.name in session.in_memory:
        result.figures["simulated_over"] = "memory"
        del result.figures["growth_bytes"]  # the document itself is in it
    elif result.simulated:
        result.figures["simulated_over"] = "disk"
        result.figures["disk_too_slow"] = result.device in session.too_fast


def _store_of(row: Row, store: str, *, in_memory: bool) -> str:
    if not row.is_simulated:
        return store
    if in_memory:
        return row.device
    return f"{row.device}:{store}"


def _decode(
    live: list[tuple[LiveRow, RowResult]], pace: Pace, say: Say
) -> dict[str, FetchRecorder]:
    """Rounds over all rows, every second one backwards; the last is recorded for the bursts."""
    recorders: dict[str, FetchRecorder] = {}
    floors = [row for row, _ in live if row.row.is_floor]
    for number in range(pace.rounds):
        say(f"decoding, round {number + 1} of {pace.rounds}")
        for row, result in live if number % 2 == 0 else live[::-1]:
            if number and row.last_s > pace.round_s:
                continue  # one step of it took longer than a round may: that one must do
            recorded = row.row.name in BURST_ROWS and row.row.device == REAL
            last = number + 1 == pace.rounds
            if recorded and last:
                recorders[row.row.name] = FetchRecorder(row.cache)
            beside = row.row.on_disk and floors and all(floor.measured.rounds_s for floor in floors)
            before = _floor_ms(floors, pace) if beside else 0.0
            row.run_round(pace.steps, pace.round_s)
            if recorded and last:
                recorders[row.row.name].stop()
            if beside:
                result.floors_ms.append([before, _floor_ms(floors, pace)])
    for row, result in live:
        result.rounds_ms = [[s * 1e3 for s in steps] for steps in row.measured.rounds_s]
    return recorders


def _floor_ms(floors: list[LiveRow], pace: Pace) -> float:
    """One more round of the fastest floor; its median step, in milliseconds."""
    fastest = min(floors, key=lambda floor: float(np.median(floor.measured.steps_s)))
    fastest.run_round(pace.steps, pace.round_s)
    return float(np.median(fastest.measured.rounds_s[-1])) * 1e3


def _describe(row: LiveRow, result: RowResult, drift: int) -> None:
    """Everything but the prediction and the burst."""
    steps = result.steps_ms
    seconds = sum(steps) / 1e3
    figures = result.figures
    figures.update(
        steps=len(steps), median_ms=result.median_ms,
        p10_ms=float(np.percentile(steps, 10)), p90_ms=float(np.percentile(steps, 90)),
        tokens_per_s=row.bench.batch * 1e3 / result.median_ms,
        growth_bytes=row.growth_bytes, file_cache_bytes=row.file_cache_bytes,
        session_drift_bytes=drift,
    )  # fmt: skip
    if not isinstance(row.cache, TieredCache):
        return
    counted, cache = row.measured.counters, row.cache
    report, plan = cache.report(), cache.plan
    tokens = max(1.0, counted["tokens"])
    wanted = counted["units_wanted"]
    figures.update(
        stall_share=counted["stall_s"] / seconds,
        hit_rate=counted["units_hit"] / wanted if wanted else None,
        read_bytes_per_token=counted["read_bytes"] / tokens,
        reads_per_token=counted["reads"] / tokens,
        select_ms=counted["predict_s"] / len(steps) * 1e3,
        ledger_bytes=report.used_bytes, limit_bytes=report.limit_bytes,
        full_cache_bytes=report.full_cache_bytes, ledger_items=report.items,
        policy=_settings_of(cache.policy),
        num_slots=plan.num_slots, selected_groups=plan.selected_units,
        shared_pools=plan.shared_pools, shared_every=plan.shared_every, unit_bytes=plan.unit_bytes,
    )  # fmt: skip
    store = cache.tiers._store
    if store is not None:
        figures["store"] = without_folder(cache.store_description)
        figures["is_direct"] = store.is_direct


def _settings_of(policy: SelectionPolicy) -> dict[str, Any]:
    """A policy's fields with every choice made; a stream by its description."""
    out = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    out |= {k: v.describe() for k, v in out.items() if isinstance(v, SelectionStream)}
    return {name: value for name, value in out.items() if value is not None}


def _predict(results: list[RowResult], disk: DeviceProfile) -> None:
    """Step time if reads ran wholly under compute: floor + max(0, device read time - floor).

    For every row that has a store, those that read nothing (all was still in slots) too.
    """
    floor_ms = best_floor_ms(results)
    for result in results:
        figures = result.figures
        if floor_ms is None or "store" not in figures:
            continue
        profile = PRESETS[result.device] if result.simulated else disk
        reads = figures["reads_per_token"] * result.batch
        read_bytes = figures["read_bytes_per_token"] * result.batch
        read_ms = profile.steady_read_time_s(reads, read_bytes) * 1e3
        figures["device_read_ms"] = read_ms
        figures["predicted_ms"] = floor_ms + max(0.0, read_ms - floor_ms)


def best_floor_ms(results: list[RowResult]) -> float | None:
    """The faster of the two floors of a session."""
    floors = [r.median_ms for r in results if r.name in FLOORS and r.rounds_ms]
    return min(floors, default=None)


def say_on_stderr(text: str) -> None:
    """Progress, a line at a time."""
    print(f"  {text}", file=sys.stderr, flush=True)
