"""Ctrl-C at any moment: one line, exit code 130, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BEGUN = "from penstock.cli.entry import main; print('begun', flush=True); main()"
"""The command line; Ctrl-C while Python itself starts is Python's to answer."""


def listen_to_interrupts() -> None:
    """A child of a background job would ignore Ctrl-C, as its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("moment", ["start", "loading", "prefill"])
def test_ctrl_c(tmp_path: Path, moment: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, "demo", "--tokens", "9000", "--memory", "1/4", "--disk",
         str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=listen_to_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    if moment == "start":
        time.sleep(0.3)
    else:
        awaited = "Penstock demo" if moment == "loading" else "prefill  1"
        for line in process.stdout:
            if line.startswith(awaited):
                break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert errors.splitlines() == [line for line in errors.splitlines() if "interrupted" in line]
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
