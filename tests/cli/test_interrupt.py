"""Ctrl-C at any moment: one line, exit code 130, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def listen_to_interrupts() -> None:
    """A child of a background job would ignore Ctrl-C, as its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("moment", ["start", "loading", "prefill"])
def test_ctrl_c(tmp_path: Path, moment: str) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "penstock",
            "demo",
            "--tokens",
            "9000",
            "--memory",
            "1/4",
            "--disk",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=listen_to_interrupts,
    )
    assert process.stdout is not None
    if moment == "start":
        time.sleep(0.7)
    else:
        awaited = "Penstock demo" if moment == "loading" else "prefill  1"
        for line in process.stdout:
            if line.startswith(awaited):
                break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines() == [line for line in errors.splitlines() if "interrupted" in line]
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
