"""Rows of `near_storage.decode`: cases, the memory of both sides, what was solved."""

import dataclasses
import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from penstock.core.errors import ConfigError
from penstock.engine.tiers.slot_table import ABSENT
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.evaluate.process_memory import anonymous_bytes, resident_pages, settle
from penstock.methods import SelectionPolicy
from penstock.methods.hillinfer.layer import NearLayer
from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_work import NearWork
from penstock.methods.hillinfer.policy import HillInfer
from penstock.methods.hillinfer.work_split import Split, balance, solve
from penstock.models.loader import LoadedModel
from penstock.storage.memory_file import MemoryFile
from research.clusters.steps import MAIN, Case, ForcedText, LiveRow, Pace, Say, run_group

# Methods under one memory budget, and hot pools of many sizes -------------------------------------

SPLIT = "split"
"""Section beside MAIN: HillInfer with hot pools of several sizes, and with the solved one."""
OURS, PLAIN = "hillinfer", "hillinfer:near=false"
UNLIMITED = ("full", "flexgen")
"""Methods that take no budget: everything in memory, or nothing."""
_PLACE = (MAIN, SPLIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class NearCase(Case):
    """One row: a method on a device at a length, with a hot pool of a size or a budget.

    `reuse` of `Case` is, in the section "split", the most tokens that may be hot, in selections;
    in "main" it says nothing: slots are what the budget holds, or `hot`.
    """

    hot: int = 0
    """Tokens of the hot pool; 0: HillInfer solves for it, and other methods have what fits."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows apart."""
        return (*self.group, self.method, self.reuse, self.hot)

    @property
    def title(self) -> str:
        """The case in words."""
        whole = super(NearCase, self).title  # slots=True makes another class of this one
        return f"{whole}, {self.hot:,} hot" if self.hot else whole

    @property
    def policy(self) -> SelectionPolicy:
        """The policy, with as many selected tokens as all others."""
        policy: Any = parse_setting(self.method).policy
        if "selected_tokens" not in {field.name for field in dataclasses.fields(policy)}:
            return policy  # type: ignore[no-any-return]
        policy = replace(policy, selected_tokens=self.selected)
        if isinstance(policy, HillInfer):
            solved = self.section == SPLIT and not self.hot
            most = round(self.reuse * self.selected) if solved else None
            return replace(policy, hot_tokens=self.hot or None, reuse_tokens=most)
        if not policy.drops:
            policy = replace(policy, reuse_tokens=self.length)
        same: SelectionPolicy = policy
        return same


def with_budget(method: str, memory: str) -> str:
    """A setting with the budget in it, unless it names one or its method takes none."""
    head, colon, options = method.partition(":")
    if "@" in head or head in UNLIMITED:
        return method
    return f"{head}@{memory}{colon}{options}"


def without_budget(method: str) -> str:
    """A setting as it is spoken of."""
    head, colon, options = method.partition(":")
    return f"{head.partition('@')[0]}{colon}{options}"


def main_cases(
    methods: Sequence[str], *, device: str, length: int, alpha: float, memory: str,
    hot_share: float,
) -> list[NearCase]:  # fmt: skip
    """All methods under the same budget; then HillInfer with and without a device with the same
    hot pool, whatever memory that takes.

    Args:
        memory: budget of what the main process holds, as `TieredCache` takes it.
        hot_share: of that hot pool, in what the length is; 0: not measured.
    """
    place: dict[str, Any] = {"section": MAIN, "device": device, "length": length, "ratio": alpha}
    out = [NearCase(**place, method=with_budget(method, memory)) for method in methods]
    if hot_share:
        hot = max(round(hot_share * length), out[0].selected)
        out += [NearCase(**place, method=method, hot=hot) for method in (OURS, PLAIN)]
    return out


def split_cases(
    *, device: str, length: int, alpha: float, sizes: int, most: float
) -> list[NearCase]:
    """HillInfer with the split solved; then `sizes` hot pools, from one selection to the most.

    Args:
        most: largest hot pool, in what the length is.

    Raises:
        ConfigError: the largest pool does not hold one selection.
    """
    if most < alpha:
        raise ConfigError(f"a hot pool of {most:g} does not hold a selection of {alpha:g}")
    place: dict[str, Any] = {
        "section": SPLIT, "device": device, "length": length, "ratio": alpha, "method": OURS,
        "reuse": most / alpha,
    }  # fmt: skip
    shares = [alpha + (most - alpha) * i / (sizes - 1) for i in range(sizes)]
    return [NearCase(**place), *(NearCase(**place, hot=round(share * length)) for share in shares)]


def section_order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows in the order in which they are printed."""
    return _PLACE.index(row["section"]), row["length"], -row["ratio"], row["device"]


# A row of `near_storage.decode`, with the memory of both sides and what was solved ----------------

_WARM_SHARE = 1.0
"""A slow row's warm-up, in what its rounds may take."""


def anonymous_of(process_id: int) -> int:
    """Private memory of another process that is no file's, in bytes; resident memory where the
    system cannot say."""
    process = psutil.Process(process_id)
    maps = process.memory_maps(grouped=True)
    if maps and hasattr(maps[0], "anonymous"):
        return sum(int(one.anonymous) for one in maps)
    return int(process.memory_info().rss)


def resident_bytes(array: Any) -> int:
    """Bytes of an array of our own that are in memory: pages that were written. All of them where
    the system cannot say."""
    start = int(array.__array_interface__["data"][0])
    first = -(-start // mmap.PAGESIZE)
    pages = max(0, (start + array.nbytes) // mmap.PAGESIZE - first)
    resident = resident_pages(first * mmap.PAGESIZE, pages * mmap.PAGESIZE)
    return int(array.nbytes) if resident is None else resident * mmap.PAGESIZE


class NearRow(LiveRow):
    """A case with its cache filled, decoding the forced tokens."""

    cache: Any

    def __init__(
        self, case: NearCase, text: ForcedText, loaded: LoadedModel, pace: Pace, row_s: float
    ) -> None:
        """Fill the cache and decode the warm-up.

        Args:
            row_s: seconds of decoding after which a slow row takes fewer steps.

        Raises:
            BudgetError: the cache cannot be as small as its method says.
            StorageError: the disk is full or cannot be used, or a device does not start.
        """
        self._case, self._pace, self._row_s = case, pace, row_s
        self._capacities: list[int] = []
        settle()
        before = anonymous_bytes()
        super().__init__(case, text, loaded, dataclasses.replace(pace, warm=2))
        try:
            end = time.perf_counter() + _WARM_SHARE * row_s
            for _ in range(pace.warm - 2):
                self._last_s = self._step()
                if time.perf_counter() > end:
                    break
            settle()
            self._grown = anonymous_bytes() - before
        except BaseException:
            self.close()
            raise

    _last_s = 0.0
    _fit = 0

    def run_round(self, steps: int) -> None:
        """See `LiveRow.run_round`; a slow row decodes fewer."""
        if not self._fit:
            fit = self._row_s / self._pace.rounds / max(self._last_s, 1e-9)
            self._fit = max(1, min(steps, int(fit)))
        super().run_round(self._fit)  # all rounds alike
        if (work := self._work) is not None:
            self._capacities.append(work.capacity)

    @property
    def _work(self) -> NearWork | None:
        layer = self.cache.tiers.layers[0]
        return layer._work if isinstance(layer, NearLayer) else None

    def figures(self) -> dict[str, Any]:
        """For JSON; times, tokens and bytes are of one step, on average."""
        found = super().figures()
        count, unit = found["steps"], self.cache.plan.unit_bytes
        promoted = self._counters.get("units_promoted", 0) / count
        demoted = self._counters.get("units_demoted", 0) / count
        decoded = self._at - self._text.prompt_tokens
        checked = decoded - (self._at == self._text.ids.shape[1])
        return found | {
            "right": self._right / max(1, checked), "decoded": decoded,
            "promoted": promoted, "demoted": demoted,
            "promoted_bytes": promoted * unit, "demoted_bytes": demoted * unit,
            **self._memory(), **self._solved(),
        }  # fmt: skip

    # Memory -----------------------------------------------------------------------------------

    def _memory(self) -> dict[str, Any]:
        """Main process and devices, without the memory that stands for a simulated drive."""
        store = self.cache.tiers._store
        stands_in = 0
        for region in [] if store is None else store._regions:
            inner = getattr(region.file, "inner", region.file)
            if isinstance(inner, MemoryFile) and inner._bytes is not None:
                stands_in += resident_bytes(inner._bytes)
        devices = store.devices if isinstance(store, NearStore) else []
        shared = sum(device.memory.nbytes for device in devices)
        processes = [device.process_id for device in devices if device.process_id is not None]
        return {
            "grown_bytes": self._grown - stands_in,
            "shared_bytes": shared,
            "main_bytes": self._grown - stands_in + shared,
            "device_bytes": [anonymous_of(number) for number in processes],
            "device_rss": [psutil.Process(number).memory_info().rss for number in processes],
        }

    # What was solved --------------------------------------------------------------------------

    def _solved(self) -> dict[str, Any]:
        work = self._work
        if work is None:
            return {}
        layers = self.cache.tiers.layers
        length = layers[0].length
        held = [float((layer.table.unit_in != ABSENT).sum()) for layer in layers]
        return {
            "hot_tokens": float(np.mean(held)),
            "round_capacity": self._capacities,
            "past_tokens": length,
            "solved": work.solved,
            **_rates(work, self._case, length, self.cache.plan.num_slots),
        }


def _rates(work: NearWork, case: NearCase, length: int, most: int) -> dict[str, Any]:
    """Rates as they were measured, and the splits that follow from them; none of a fixed pool.

    Args:
        most: tokens that may be hot.
    """
    rates, split = work.rates, work.split
    if rates is None or split is None:
        return {}
    alpha, total = case.selected / length, split.hot_tokens + split.cold_tokens
    skewed = solve(
        rates, alpha, total, most, work.hot_share, min_hot_tokens=case.selected,
        seen_hot_tokens=split.hot_tokens,
    )  # fmt: skip
    return {
        "rates": {
            name: value for name, value in dataclasses.asdict(rates).items() if math.isfinite(value)
        },
        "alpha": alpha, "most_hot": most, "split": _as_row(split),
        "eq4_beta": balance(rates, alpha), "eq4": _as_row(
            solve(rates, alpha, total, most, min_hot_tokens=case.selected)
        ), "eq4_skewed": _as_row(skewed),
    }  # fmt: skip


def _as_row(split: Split) -> dict[str, float]:
    beta = split.beta
    return {
        "hot_tokens": split.hot_tokens, "cold_tokens": split.cold_tokens,
        "step_ms": 1e3 * split.step_s, **({"beta": beta} if math.isfinite(beta) else {}),
    }  # fmt: skip


def plain_steps(loaded: LoadedModel, steps: int = 3) -> None:
    """Decode with the plain model, so that what libraries keep for one token is no row's."""
    model: Any = loaded.model
    with torch.no_grad():
        for _ in range(steps):
            model(torch.zeros((1, 1), dtype=torch.int64), use_cache=False)


def run_near_group(
    cases: Sequence[NearCase], text: ForcedText, loaded: LoadedModel, pace: Pace, row_s: float,
    say: Say, done: Callable[[int], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """See `run_group`, of `NearRow`s.

    Args:
        row_s: see `NearRow`.
    """
    plain_steps(loaded)
    rows = [partial(NearRow, case, text, loaded, pace, row_s) for case in cases]
    return run_group(cases, rows, pace, say, done)
