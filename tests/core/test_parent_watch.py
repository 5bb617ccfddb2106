"""A process that works for another one ends with it, also where that one is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.core.parent_watch import end_with_parent

SCRIPT = """
import multiprocessing, sys, time
from penstock.core.parent_watch import end_with_parent

def work(found):
    if sys.argv[1] == "watched":
        end_with_parent()
    found.put(multiprocessing.current_process().pid)
    while True:
        time.sleep(0.05)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    context.Process(target=work, args=(found,), daemon=True).start()
    print(found.get(), flush=True)
    time.sleep(600)
"""


def works(process: psutil.Process) -> bool:
    """Whether it is there, and not merely still listed."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("how", "signal_number"),
    [
        ("watched", signal.SIGTERM), ("watched", signal.SIGKILL), ("left alone", signal.SIGKILL),
    ],
)  # fmt: skip
def test_a_killed_parent(how: str, signal_number: int, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script, how], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        child = psutil.Process(int(it.stdout.readline()))
        assert child.is_running()
        it.send_signal(signal_number)
        it.wait()
        if how == "watched":
            until = time.monotonic() + 60
            while works(child) and time.monotonic() < until:
                time.sleep(0.05)
            assert not works(child)
        else:
            time.sleep(0.5)
            assert works(child), "what the watch is for"
            child.kill()


def test_without_a_parent_nothing_happens() -> None:
    end_with_parent()
