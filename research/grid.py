"""Grid: jobs that a program measures one by one, and the rows that come of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from penstock.core.errors import BudgetError, ConfigError, StoreFullError
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.resuming import GroupedRows, Key, Row, check_same, grow
from penstock.evaluate.sitting import Sitting

Job = TypeVar("Job", bound=Hashable)


class Grid(ABC, Generic[Job]):
    """All jobs of a run.

    A job measures rows that are compared; one row lacking or failed, and all are measured again.
    A subclass says what tells rows apart (`KEY`), and measures a job. A job is its row's key, or
    `keys` has those of its rows.
    """

    KEY: ClassVar[tuple[str, ...]]
    """Fields of a row that tell it from others."""

    SHARED: ClassVar[tuple[str, ...]] = ()
    """Settings that a result which is gone on with must have in common."""
    GROWING: ClassVar[tuple[str, ...]] = ()
    """Settings with lists, which then hold what either run was asked for."""
    ROWS: ClassVar[str] = "rows"
    """What the result calls the rows."""

    def __init__(self, settings: dict[str, Any], jobs: Sequence[Job]) -> None:
        """Start without rows.

        Args:
            settings: of the result; those that grow are changed in place.
            jobs: in the order in which they are measured.
        """
        self.settings, self.jobs = settings, list(jobs)
        self.held = GroupedRows(self.key_of)

    @property
    def rows(self) -> list[Row]:
        """All rows that there are."""
        return self.held.rows

    def key_of(self, row: Row) -> Key:
        """What tells a row from others."""
        return tuple(row[name] for name in self.KEY)

    def keys(self, job: Job) -> Sequence[Key]:
        """Keys of the job's rows."""
        assert isinstance(job, tuple)
        return [job]

    @abstractmethod
    def title(self, job: Job) -> str:
        """The job in a few words."""

    @abstractmethod
    def measure(self, job: Job, progress: Progress) -> Sequence[Row]:
        """Measure a job; a row that fails says why.

        Args:
            progress: may be stepped, up to the job's `work` in all.
        """

    @abstractmethod
    def report(self) -> str:
        """The tables."""

    def work(self, job: Job) -> int:
        """What a job costs, for the time left."""
        return 1

    def open(self) -> None:
        """Make ready what all jobs share; called when there is anything to measure."""

    def close(self) -> None:
        """Give back what `open` and the jobs made."""

    def figures(self) -> dict[str, Any]:
        """For the result."""
        return {self.ROWS: self.rows}

    def take_up(self, former: Result) -> None:
        """Keep what an earlier run measured.

        Raises:
            ConfigError: that run was another one.
        """
        check_same(former.settings, self.settings, self.SHARED)
        grow(self.settings, former.settings, self.GROWING)
        self.held.take_up(former.figures[self.ROWS], [self.keys(job) for job in self.jobs])

    def run(self, sitting: Sitting) -> None:
        """Measure what is left, or what the time allows.

        Raises:
            ConfigError: the GPU answers no more.
        """
        done = self.held.done
        left = [job for job in self.jobs if not done.issuperset(self.keys(job))]
        progress = Progress(sum(map(self.work, self.jobs)))
        progress.skip(sum(map(self.work, self.jobs)) - sum(map(self.work, left)))
        if not left:
            return
        try:
            self.open()
            for job in left:
                if sitting.time_is_up():
                    return
                progress.say(self.title(job))
                end = progress.done + self.work(job)
                rows = self.measure(job, progress)
                progress.step(end - progress.done)
                self.held.put(rows, self.keys(job))
                sitting.keep(self.figures())
                for row in rows:
                    if row.get("device_lost"):
                        raise ConfigError(
                            f"the GPU is lost after {self.title(job)}: {row['error']}; --resume "
                            "goes on with the rest"
                        )
        finally:
            self.close()


def attempt(row: Row, measure: Callable[[], Row], device: torch.device) -> Row:
    """A row with what `measure` adds to it and its seconds, `row_s`.

    Without room it has "skipped"; where anything else fails, "error", and "device_lost" of a GPU.
    """
    began = time.perf_counter()
    try:
        row |= measure()
    except (BudgetError, StoreFullError) as error:
        row["skipped"] = str(error)
    except torch.OutOfMemoryError as error:
        row["skipped"] = f"out of memory: {str(error).splitlines()[0]}"
    except Exception as error:  # the other rows are worth having
        lines = str(error).splitlines() or [""]
        row["error"] = f"{type(error).__name__}: {lines[0]}"
    if "error" in row and device.type == "cuda":
        row["device_lost"] = _is_lost()
    row["row_s"] = time.perf_counter() - began
    return row


def _is_lost() -> bool:
    """Whether the GPU answers nothing any more (after an illegal access)."""
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False
