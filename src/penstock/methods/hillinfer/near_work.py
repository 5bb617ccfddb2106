"""NearWork: what the layers of a HillInfer cache share: a worker, the scorer, the split."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from penstock.methods.hillinfer.index import Measured
from penstock.methods.hillinfer.near_storage.scorer import Scorer
from penstock.methods.hillinfer.work_split import Rates, RateWatch, Split, solve

Found = TypeVar("Found")
SETTLED_STEPS = 8
"""Requests of every layer whose rates are noted before a split is solved, and the next one."""
WORTH = 0.1
"""Another split must take so much less time than the present one: moving tokens costs too."""


def in_current_stream(job: Callable[[], Found], device: torch.device) -> Callable[[], Found]:
    """The job for another thread, behind all that is queued here.

    A thread begins in the default stream of the first device, which waits for no other; what the
    caller has queued on a stream of its own would not be there yet.
    """
    if device.type != "cuda":
        return job
    stream = torch.cuda.current_stream(device)

    def run() -> Found:
        with torch.cuda.stream(stream):
            return job()

    return run


class NearWork:
    """One thread that evaluates the next layer while this one computes; the hot pool's size.

    Source: HillInfer, section 4.3 (APP: evaluation and prefetch of layer i+1 under the computation
    of layer i; Eq. 2 to 4 from measured rates; the correction for skewness).

    Differences: the split minimises the longer scoring and the longer sending, which follow each
    other, since what is selected is known when both sides have scored (`work_split`); rates are
    measured on the first steps' own requests instead of offline, and again all the time; the split
    is solved anew when one has moved by a quarter (`RateWatch`).
    """

    def __init__(
        self, scorer: Scorer, *, layers: int, most_hot: int, least_hot: int, fixed: int | None,
    ) -> None:  # fmt: skip
        """Start the thread.

        Args:
            most_hot: slots of a row (M_0).
            least_hot: tokens that a step selects at most, which must find a slot.
            fixed: tokens of the hot pool, where the user says so.
        """
        self.scorer = scorer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-near")
        self._layers, self._most, self._least = layers, most_hot, least_hot
        self._fixed = None if fixed is None else max(least_hot, min(fixed, most_hot))
        self._watch: RateWatch | None = None
        self._noted, self._due = 0, SETTLED_STEPS * layers
        self._hot = self._selected = 0.0
        self._lock = threading.Lock()
        self.split: Split | None = None
        """What was solved last, for reports."""
        self.solved = 0
        """How often it was."""

    def run(self, job: Callable[[], Found], device: torch.device) -> "Future[Found]":
        """Do a layer's evaluation, in its turn.

        Args:
            device: where its tensors are.
        """
        return self._executor.submit(in_current_stream(job, device))

    @property
    def capacity(self) -> int:
        """Tokens of a row that are hot at most, now."""
        if self._fixed is not None:
            return self._fixed
        return self._most if self.split is None else max(self._least, self.split.hot_tokens)

    @property
    def rates(self) -> Rates | None:
        """Rates as they were measured, of all rows together; None of a fixed pool, or before any
        were noted."""
        return None if self._watch is None else self._watch.rates

    @property
    def hot_share(self) -> float:
        """Share of the tokens attended to that were hot, lately."""
        return self._hot / max(self._selected, 1e-9)

    def note(
        self, measured: Measured, *, rows: int, selected: int, selected_hot: int, alpha: float,
        link: float, host_link: float = math.inf,
    ) -> None:  # fmt: skip
        """Learn from one layer's step; solves the split again when it is due.

        Args:
            rows: of the batch.
            selected, selected_hot: tokens attended to, and those of them that were hot.
            link: tokens per second that come from the cold pool; 0: not known yet.
            host_link: that come from the hot pool, and from the cold pool behind its own link;
                infinite where attention runs beside it, 0: not known yet.
        """
        if self._fixed is not None:
            return
        with self._lock:
            if self._watch is None:
                self._watch = RateWatch(Rates(host_scores=0.0, device_scores=0.0, device_link=0.0))
            watch = self._watch
            watch.note("host_scores", measured.hot_tokens, measured.host_s)
            watch.note("device_scores", measured.cold_tokens, measured.device_s)
            if link:
                watch.note("device_link", 1, 1 / link)
            if 0 < host_link < math.inf:
                watch.note("host_link", 1, 1 / host_link)
            weight = 0.05
            self._hot += weight * (selected_hot - self._hot)
            self._selected += weight * (selected - self._selected)
            self._noted += 1
            if (
                self._noted < self._due
                or min(watch.rates.host_scores, watch.rates.device_scores) == 0
            ):
                return
            if self.split is not None and not watch.drifted():
                return
            self._due = self._noted + SETTLED_STEPS * self._layers
            total = (measured.hot_tokens + measured.cold_tokens) // rows
            per_row = Rates(
                host_scores=watch.rates.host_scores / rows,
                device_scores=watch.rates.device_scores / rows,
                device_link=watch.rates.device_link / rows or math.inf,
                host_link=watch.rates.host_link / rows,
            )
            solved = partial(
                solve, per_row, alpha, total,
                hot_share_of_selected=self.hot_share,
                seen_hot_tokens=measured.hot_tokens // rows, selects_jointly=True,
                crosses_host_link=True,
            )  # fmt: skip
            best = solved(max_hot_tokens=self._most, min_hot_tokens=self._least)
            now = solved(max_hot_tokens=self.capacity, min_hot_tokens=self.capacity)
            if self.split is None or best.step_s < (1 - WORTH) * now.step_s:
                self.split = best
            watch.solved()
            self.solved += 1

    def close(self) -> None:
        """Let the job under way end and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
