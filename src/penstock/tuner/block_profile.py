"""BlockProfile: model delay T_model and ranking delay, fitted to a few measured runs.

Source: KVSwap (arXiv 2511.11907), appendix A.3.

Differences: the paper interpolates between points of a grid over batch and length. Here both delays
are sums of terms that say what work costs (bytes of index, units, attended tokens, reads), with
non-negative factors fitted to relative error; between measured points that is an interpolation, and
it needs far fewer of them. Whole models are run instead of one block: launches and caches of
neighbouring layers count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.slot_plan import SlotPlan
from penstock.devices.profile import DeviceProfile
from penstock.tuner.engine_run import StepFigures
from penstock.tuner.pipeline import LayerTimes, step_time

Floats = NDArray[np.float64]

RANK_TERMS = (
    "step", "sequences", "index bytes", "scored tokens", "units", "selected", "read",
    "predicting weights",
)  # fmt: skip
BLOCK_TERMS = ("step", "sequences", "attended tokens", "read", "staged")
_SWEEPS = 5000
_IO_FACTORS = np.geomspace(0.25, 4.0, 81)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a setting does in a step, all layers and sequences: the input of a prediction."""

    batch: int
    context: int
    num_layers: int
    group_tokens: int
    true_query_layers: frozenset[int]
    """Layers that wait for their true query, beside the first."""
    index_bytes: float
    units: float
    """Units that can be chosen."""
    selected: float
    """Units of all selections."""
    attended_tokens: float
    missing: float
    """Units that a step fetches."""
    reads: float
    """Requests: neighbouring units go together."""
    read_bytes: float
    is_staged: bool
    """Reads do not land in the slots themselves."""
    copies_weights: bool
    """Queries are predicted with 8-bit copies of the weights."""
    is_surveyed: bool = False
    """Missing units and reads were counted for this very text (`fetch_survey`)."""

    def fetching(self, missing: float, reads: float) -> "Work":
        """The same work with other units and requests, counted."""
        share = missing / self.missing if self.missing else 1.0
        return replace(
            self, missing=missing, reads=reads, read_bytes=share * self.read_bytes,
            is_surveyed=True,
        )  # fmt: skip


def work_of(
    plan: SlotPlan, *, rows_per_sequence: int, num_layers: int, context: int, hit_rate: float,
    row_bytes: int, true_query_layers: frozenset[int],
) -> Work:  # fmt: skip
    """What a plan does in a step.

    Args:
        hit_rate: share of a selection that is in the slots.
        row_bytes: a unit on disk.
    """
    rows = plan.batch
    selected = num_layers * rows * plan.selected_units
    sharing = plan.sharing(num_layers)
    missing = selected * (sharing + (1.0 - sharing) * (1.0 - hit_rate))
    places = plan.selected_units if plan.compact else plan.num_slots
    attended = min(context, (places + plan.kept_slots) * plan.group_tokens)
    return Work(
        batch=rows // rows_per_sequence, context=context, num_layers=num_layers,
        group_tokens=plan.group_tokens,
        true_query_layers=true_query_layers, index_bytes=plan.index_bytes,
        units=num_layers * rows * context / plan.group_tokens, selected=selected,
        attended_tokens=num_layers * rows * attended, missing=missing,
        reads=missing, read_bytes=missing * row_bytes,
        is_staged=plan.staging_slots > 0, copies_weights=plan.predictor_bytes > 0,
    )  # fmt: skip


def _rank_row(work: Work) -> list[float]:
    tokens = work.num_layers * work.batch * work.context
    return [
        1.0, work.batch, work.index_bytes / 2**20, tokens / 2**16,
        work.units / 2**14, work.selected / 2**10, work.reads / 2**10,
        0.0 if work.copies_weights else 1.0,
    ]  # fmt: skip


def _block_row(work: Work) -> list[float]:
    return [
        1.0, work.batch, work.attended_tokens / 2**13, work.reads / 2**10,
        (work.missing if work.is_staged else 0.0) / 2**10,
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """Fitted delays of one model on one machine and device. Factors in seconds per term."""

    rank: tuple[float, ...]
    """See `RANK_TERMS`."""
    block: tuple[float, ...]
    """See `BLOCK_TERMS`."""
    io_factor: float
    """Measured waiting is best explained by so many times the device profile's time."""
    neighbours: Mapping[int, float]
    """Share of fetched units that are read together with the one before, where all that is selected
    is fetched; by the unit's tokens."""
    device: DeviceProfile

    def merged(self, work: Work) -> Work:
        """The same work with neighbours read together, where it is not counted."""
        if work.is_surveyed or not self.neighbours:
            return work
        nearest = min(self.neighbours, key=lambda g: abs(np.log2(g / work.group_tokens)))
        joined = self.neighbours[nearest] * _joined(work.missing, work.selected)
        return replace(work, reads=work.missing * (1 - joined))

    def predict(self, work: Work) -> tuple[float, float]:
        """Seconds of a step, and of these the wait for reads."""
        rank = float(np.dot(self.rank, _rank_row(work)))
        block = float(np.dot(self.block, _block_row(work)))
        return _step(work, rank, block, self.io_factor, self.device)

    def io_s(self, work: Work) -> float:
        """T_io of one layer, seconds."""
        return _io_s(work, self.io_factor, self.device)

    def layer_s(self, work: Work) -> float:
        """T_model of one layer, seconds: block, ranking and bookkeeping."""
        rank = float(np.dot(self.rank, _rank_row(work)))
        return (rank + float(np.dot(self.block, _block_row(work)))) / work.num_layers

    def as_dict(self) -> dict[str, Any]:
        """For JSON: factors by term."""
        return {
            "rank_s": dict(zip(RANK_TERMS, self.rank, strict=True)),
            "block_s": dict(zip(BLOCK_TERMS, self.block, strict=True)),
            "io_factor": self.io_factor,
            "neighbours": {str(k): v for k, v in sorted(self.neighbours.items())},
        }


def fit_profile(runs: Sequence[tuple[Work, StepFigures]], device: DeviceProfile) -> BlockProfile:
    """The profile that comes nearest to measured runs, by relative error.

    Args:
        runs: what was done and what it took; at least one.
        device: where the reads went.
    """
    works = [work for work, _ in runs]
    rank = fit_terms([_rank_row(w) for w in works], [max(f.select_s, 1e-6) for _, f in runs])
    block = fit_terms([_block_row(w) for w in works], [max(f.block_s, 1e-6) for _, f in runs])
    measured = np.array([figures.step_s for _, figures in runs])
    errors = []
    for factor in _IO_FACTORS:
        steps = [_step(w, f.select_s, f.block_s, factor, device)[0] for w, f in runs]
        errors.append(float(np.square(np.log(np.array(steps) / measured)).sum()))
    return BlockProfile(
        rank=tuple(rank), block=tuple(block), device=device, neighbours=_neighbours(works),
        io_factor=float(_IO_FACTORS[int(np.argmin(errors))]),
    )  # fmt: skip


def _joined(missing: float, selected: float) -> float:
    """How much of what lies side by side is read together, where slots keep a part of a selection.

    Both neighbours must be missing, and the slots that take them must lie side by side too. The
    square of the missing share is what runs show (research/notes/2026-11-22-requests-of-a-step.md).
    """
    return float((missing / selected) ** 2) if selected else 1.0


def _neighbours(works: Sequence[Work]) -> dict[int, float]:
    """Share of fetched units that are read with the one before, by the unit's tokens."""
    totals: dict[int, tuple[float, float]] = {}
    for work in works:
        if work.missing:
            saved, most = totals.get(work.group_tokens, (0.0, 0.0))
            totals[work.group_tokens] = (
                saved + work.missing - work.reads,
                most + work.missing * _joined(work.missing, work.selected),
            )  # fmt: skip
    return {group: min(0.9, max(0.0, saved / most)) for group, (saved, most) in totals.items()}


def fit_terms(rows: Sequence[Sequence[float]], measured_s: Sequence[float]) -> Floats:
    """Non-negative factors of least squares on relative error, by coordinate descent.

    Args:
        rows: terms of every run. [runs][terms]
        measured_s: [runs], positive.
    """
    target = np.asarray(measured_s, dtype=np.float64)
    terms = np.asarray(rows, dtype=np.float64) / target[:, None]
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
    terms = terms / scale
    products, wanted = terms.T @ terms, terms.sum(axis=0)
    # A little of everything where runs cannot tell terms apart.
    products[np.diag_indices_from(products)] += 1e-6 * len(target)
    matrix, right = products.tolist(), wanted.tolist()
    factors = [0.0] * len(right)  # in plain floats: arrays of so few would take four times as long
    for _ in range(_SWEEPS):
        change = 0.0
        for i, row in enumerate(matrix):
            before = factors[i]
            factors[i] = max(0.0, before + (right[i] - sum(map(mul, row, factors))) / row[i])
            change = max(change, abs(factors[i] - before))
        if change < 1e-9 * max(1.0, *factors):
            break
    return np.asarray(np.array(factors) / scale)


def _io_s(work: Work, factor: float, device: DeviceProfile) -> float:
    page = device.flash_page_bytes
    if not work.reads:
        return 0.0
    request = work.read_bytes / work.reads
    pages = work.reads * -(-request // page) * page
    reads, read_bytes = work.reads / work.num_layers, pages / work.num_layers
    return factor * device.steady_read_time_s(reads, read_bytes)


def _step(
    work: Work, rank_s: float, block_s: float, io_factor: float, device: DeviceProfile
) -> tuple[float, float]:
    layers = work.num_layers
    io = _io_s(work, io_factor, device)
    times = [
        LayerTimes(
            block_s=block_s / layers, rank_s=rank_s / layers, io_s=io,
            is_predicted=number > 0 and number not in work.true_query_layers,
        )
        for number in range(layers)
    ]  # fmt: skip
    return step_time(times, latency_s=device.latency_s)
