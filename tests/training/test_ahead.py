"""Processes that work ahead: order, errors, what is not taken yet.

They import the module of what they build, so that this one must stay light.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.ahead import AheadError, do_ahead

ROOT = Path(__file__).parents[2]


def build_asker(fails_at: int) -> Callable[[int], int]:
    def do(job: int) -> int:
        if job == fails_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if job == -fails_at:
            raise ValueError("no such job")
        return job * job

    return do


def test_results_come_in_order() -> None:
    assert list(do_ahead(build_asker, (99,), range(40), workers=2)) == [n * n for n in range(40)]


def test_a_killed_process_is_reported() -> None:
    with pytest.raises(AheadError, match="died"):
        list(do_ahead(build_asker, (17,), range(40), workers=2))


def test_an_error_comes_through() -> None:
    with pytest.raises(ValueError, match="no such job"):
        list(do_ahead(build_asker, (-17,), range(40), workers=2))


def test_jobs_are_not_all_taken_at_once() -> None:
    taken: list[int] = []

    def jobs() -> Any:
        for number in range(1000):
            taken.append(number)
            yield number

    results = do_ahead(build_asker, (99,), jobs(), workers=1)
    assert next(results) == 0
    assert len(taken) < 20
    results.close()  # type: ignore[attr-defined]


def test_processes_of_rows_and_of_corpora_import_no_torch() -> None:
    """Each of them would take seconds to start."""
    code = "import sys, training.corpus, training.workers; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
